"""The tables of ablations, against hand calculation."""

import csv
import io
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from tick_labels import labels_apart

from xret.heads.ablation.table import Entry, as_csv, as_latex, as_text, plot, require_plot, summarise
from xret.pipeline.errors import RunError


def entry(label, seed, rsum, *, protocol="full", paper=None, variance=None):
    recalls = {"R@1": rsum / 10, "R@5": rsum / 5, "R@10": rsum / 5}
    first = {"k": int(label)}, label, seed, "done", "r", "test"
    return Entry(*first, protocol, rsum, recalls, recalls, variance, paper, ties="pessimistic")


def failed(label, seed):
    return Entry({"k": int(label)}, label, seed, "failed", "r", "test", error="too large")


ENTRIES = [
    entry("1", 0, 100.0, paper={"row": "f30k", "rsum": 105.5, "image_to_text R@1": 11.0}, variance=-2.0),
    entry("1", 1, 104.0, paper={"row": "f30k", "rsum": 105.5, "image_to_text R@1": 11.0}, variance=-3.0),
    entry("1", 2, 108.0, paper={"row": "f30k", "rsum": 105.5, "image_to_text R@1": 11.0}, variance=-4.0),
    entry("2", 0, 200.0),
    failed("2", 1),
    failed("4", 0),
]


def test_the_table_against_hand_calculation():
    one, two, four = summarise(ENTRIES)
    assert (one.seeds, one.failed, two.seeds, two.failed, four.seeds, four.failed) == (3, 0, 1, 1, 0, 1)
    assert one.mean["rsum"] == 104
    assert one.std["rsum"] == 4  # sqrt((16 + 0 + 16) / 2)
    assert one.mean["image_to_text R@1"] == pytest.approx(10.4)
    assert one.std["text_to_image R@10"] == pytest.approx(0.8)
    assert (one.mean["log_circular_variance"], one.std["log_circular_variance"]) == (-3, 1)
    assert one.paper == {"rsum": 105.5, "image_to_text R@1": 11.0}
    assert two.std == {}
    assert "log_circular_variance" not in two.mean
    assert (four.mean, four.std, four.paper) == ({}, {}, {})


def test_the_text_is_aligned():
    title, head, *rows = as_text(summarise(ENTRIES)).splitlines()
    assert title == (
        "split test, protocol full, ties pessimistic; mean ± sample standard deviation over 3 seeds; paper: F30K"
    )
    few = [replace(one, images=12 if one.status == "done" else None) for one in ENTRIES]
    assert as_text(summarise(few)).splitlines()[0] == f"{title}; 12 images are too few to tell variants apart"
    assert as_text(summarise([replace(one, images=100) for one in ENTRIES])).splitlines()[0] == title
    assert head.split() == [
        "i2t", "R@1", "paper", "R@5", "R@10", "t2i", "R@1", "R@5", "R@10", "RSUM", "paper", "log", "var.", "failed",
    ]  # fmt: skip
    assert [row.split()[0] for row in rows] == ["1", "2", "4"]
    at = head.index("RSUM") + len("RSUM")
    assert [row[:at].split()[-1] for row in rows] == ["4.00", "200.00", "-"]
    assert len({len(line) for line in (head, *rows)}) == 1


def test_protocols_are_parts_of_their_own_and_failures_are_in_each():
    both = [entry("1", 0, 50.0, protocol="1k-folds"), entry("1", 0, 40.0), failed("2", 0)]
    lines = summarise(both)
    assert [(line.label, line.protocol, line.seeds, line.failed) for line in lines] == [
        ("1", "1k-folds", 1, 0), ("2", "1k-folds", 0, 1), ("1", "full", 1, 0), ("2", "full", 0, 1),
    ]  # fmt: skip
    assert as_text(lines).count("split test, protocol") == 2
    assert as_latex(lines).count("\\begin{tabular}") == 2
    nothing = summarise([failed("1", 0)])
    assert [(line.protocol, line.failed) for line in nothing] == [(None, 1)]
    assert as_text(nothing).splitlines()[-1].split() == ["1", "-", "1"]


def test_csv_reads_back():
    rows = list(csv.DictReader(io.StringIO(as_csv(summarise(ENTRIES)))))
    assert [row["k"] for row in rows] == ["1", "2", "4"]
    assert [float(row["rsum mean"] or math.nan) for row in rows][:2] == [104, 200]
    assert rows[0]["rsum std"] == "4.0"
    assert rows[0]["rsum paper"] == "105.5"
    assert rows[0]["row"] == "f30k"
    assert (rows[1]["rsum std"], rows[2]["rsum mean"], rows[2]["failed"]) == ("", "", "1")


def columns(entries):
    return as_csv(summarise(entries)).splitlines()[0].split(",")


def test_the_csv_has_the_columns_that_vary_and_the_results_that_are_known():
    recalls = [f"{way} R@{k} mean" for way in ("image_to_text", "text_to_image") for k in (1, 5, 10)]
    one, two = replace(ENTRIES[3], cell={"k": 1, "l": 7}, label="1"), replace(ENTRIES[3], cell={"k": 2, "l": 7})
    assert columns([one, two]) == ["label", "k", "seeds", *recalls, "rsum mean"]
    assert columns([one, replace(two, protocol="1k-folds")])[:4] == ["label", "k", "protocol", "seeds"]
    assert columns([one, failed("2", 0)])[:5] == ["label", "k", "l", "seeds", "failed"]
    assert columns(ENTRIES[:3])[:4] == ["label", "seeds", "row", "image_to_text R@1 mean"]
    assert columns(ENTRIES[:3])[-2:] == ["log_circular_variance mean", "log_circular_variance std"]


def test_latex_reads_back_and_is_escaped():
    odd = replace(entry("7", 0, 60.0), label=r"50% a_b & {c} #1 $x \y ~z^2")
    text = as_latex(summarise([*ENTRIES, odd]))
    body = text[text.index("\\toprule") : text.index("\\bottomrule")]
    rows = [line.removesuffix(r" \\").replace(r"\&", "AND").split(" & ") for line in body.splitlines() if "&" in line]
    columns = text.split("{tabular}{")[1].split("}")[0]
    assert {len(row) for row in rows} == {len(columns)}
    head, first, second, _, last = rows
    assert (first[head.index("RSUM")], second[head.index("RSUM")]) == (r"104.00 $\pm$ 4.00", "200.00")
    assert first[head.index("RSUM") + 1] == "105.5"
    assert last[0] == r"50\% a\_b AND \{c\} \#1 \$x \textbackslash{}y \textasciitilde{}z\textasciicircum{}2"


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_a_plot_over_numbers(tmp_path, ending):
    pytest.importorskip("matplotlib")
    file = tmp_path / f"k.{ending}"
    plot(summarise(ENTRIES), file)
    assert file.read_bytes()[:4] in (b"\x89PNG", b"%PDF", b"<?xm")


def test_a_plot_says_what_its_lines_and_bars_are(tmp_path):
    pytest.importorskip("matplotlib")
    alone = replace(entry("1", 0, 50.0), cell={}, label="untrained")
    partial = tmp_path / ".k.svg.0a1b2c3d.partial"  # of a killed process
    partial.write_text("half")
    plot(summarise([alone, *ENTRIES, *(entry("20", seed, 90.0 + seed) for seed in range(2))]), tmp_path / "k.svg")
    assert not partial.exists()
    texts = set(re.findall("<!-- (.*?) -->", (tmp_path / "k.svg").read_text()))
    assert texts >= {
        "split test, ties pessimistic",
        "k (logarithmic)",
        "RSUM: sum of six recalls in percent",
        "protocol full: mean over 1 to 3 seeds, bars ± the sample standard deviation",
        "protocol full: the paper's value, F30K",
        "protocol full: untrained",
        *("1", "2", "4", "20"),
    }
    plot(summarise([entry("1", 0, 90.0), entry("3", 0, 95.0)]), tmp_path / "k.svg")
    texts = set(re.findall("<!-- (.*?) -->", (tmp_path / "k.svg").read_text()))
    assert texts >= {"k", "protocol full: one seed", "1", "3"}


@pytest.mark.parametrize(
    ("values", "shown", "scale"),
    [
        ([0, 0.001, 5, 10000], ["0", "0.001", "5", "10000"], "k (logarithmic beyond 0.001)"),
        ([-1, 0, 1, 500], ["-1", "0", "1", "500"], "k (logarithmic beyond ±1)"),
        ([0, 1, 2, 5], ["0", "1", "2", "5"], "k"),
        ([step / 10 for step in range(11)], [f"{step / 10:g}" for step in range(11)], "k"),
        ([*range(101)], None, "k (logarithmic beyond 1)"),
        ([1, *(1000 + step for step in range(40)), 2000], None, "k (logarithmic)"),
        ([100000 + step for step in range(40)], None, "k"),
        ([0.1234567, 0.1234568, 0.2], None, "k"),
        ([3], ["3"], "k"),
        ([0], ["0"], "k"),
    ],
)
def test_ticks_of_a_plot_have_room(tmp_path, values, shown, scale):
    entries = [replace(entry("1", 0, 90.0 + n), cell={"k": value}, label=str(value)) for n, value in enumerate(values)]
    labels, name = labels_apart(lambda: plot(summarise(entries), tmp_path / "k.svg"))
    assert name == scale
    assert labels == shown or (shown is None and 2 <= len(labels) < len(values))


def test_a_plot_of_nothing_is_empty(tmp_path):
    pytest.importorskip("matplotlib")
    plot(summarise([failed("1", 0), failed("2", 0)]), tmp_path / "k.svg")
    assert "<svg" in (tmp_path / "k.svg").read_text()


def test_what_can_be_plotted(monkeypatch):
    pytest.importorskip("matplotlib")
    require_plot(Path("k.svg"), [{"a": 1}, {"a": 2.5}])
    require_plot(Path("k.svg"), [{"a": 1, "b": 1}, {"a": 2, "b": 2}])
    for values in ([{"a": 1, "b": 2}], [{"a": "x"}], [{"a": True}], [{"a": 1}, {"b": 1}]):
        with pytest.raises(ValueError, match="a single varied key"):
            require_plot(Path("k.svg"), values)
    with pytest.raises(ValueError, match=r"k\.gif must end in \.png"):
        require_plot(Path("k.gif"), [{"a": 1}])
    monkeypatch.setattr("xret.pipeline.versions.find_spec", lambda name: None)
    with pytest.raises(RunError, match=r"a plot needs matplotlib; install with `pip install 'xret\[plots\]'`"):
        require_plot(Path("k.png"), [{"a": 1}])


def test_protocols_of_r_precision_have_their_own_columns(tmp_path):
    ways = {
        way: {"mAP@R": value, "R-P": value + 10, "R@1": value + 30}
        for way, value in (("image_to_text", 31.0), ("text_to_image", 33.0))
    }
    precise = replace(entry("1", 0, 0.0, protocol="eccv"), rsum=None, **ways)
    (line,) = summarise([precise])
    assert line.mean["text_to_image R-P"] == 43
    assert "rsum" not in line.mean
    head, row = as_text([line]).splitlines()[1:]
    assert head.split() == ["i2t", "R@1", "mAP@R", "R-P", "t2i", "R@1", "mAP@R", "R-P"]
    assert row.split() == ["1", "61.00", "31.00", "41.00", "63.00", "33.00", "43.00"]
    with pytest.raises(RunError, match="no protocol of this data set has an RSUM"):
        plot([line], tmp_path / "plot.svg")
    assert not (tmp_path / "plot.svg").exists()
    plot(summarise([precise, entry("1", 0, 90.0)]), tmp_path / "plot.svg")
