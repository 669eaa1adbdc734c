"""The tables of ablations, against hand calculation."""

import csv
import io
import re
from dataclasses import replace
from pathlib import Path

import pytest

from xret.heads.ablation.table import Entry, as_csv, as_latex, as_text, require_saveable, save, summarise
from xret.heads.evaluation.result import Result
from xret.pipeline.errors import RunError


def result(rsum, protocol="full", variance=None, images=100):
    recalls = {"R@1": rsum / 10, "R@5": rsum / 5, "R@10": rsum / 5, "medr": 3.0}
    counts = images, 5 * images, 5.0, 0
    return Result("test", protocol, *counts, "pessimistic", recalls, recalls, rsum, rsum / 6, None, variance, None)


def entry(label, seed, rsum, *, paper=None, **options):
    found = result(rsum, **options)
    return Entry(label, {"k": int(label)}, seed, "r", found, paper=paper or {}, row="f30k" if paper else None)


def failed(label, seed):
    return Entry(label, {"k": int(label)}, seed, "r", error="too large")


PAPER = {"rsum": 105.5, "image_to_text R@1": 11.0}
ENTRIES = [
    *(entry("1", seed, 100.0 + 4 * seed, paper=PAPER, variance=-2.0 - seed) for seed in range(3)),
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
    assert one.paper == PAPER
    assert two.std == {}
    assert "log_circular_variance" not in two.mean
    assert (four.mean, four.std, four.paper) == ({}, {}, {})


def test_what_lies_below_the_best_by_more_than_the_spread_is_marked():
    values = {"1": (300, 302, 304), "2": (296, 300, 304), "3": (290, 292, 294), "4": (200,)}  # deviations 2, 4, 2
    lines = summarise([entry(name, seed, rsum) for name, sums in values.items() for seed, rsum in enumerate(sums)])
    title, _, *rows = as_text(lines).splitlines()
    assert [row.rstrip().endswith("*") for row in rows] == [False, False, True, False]
    assert "* is below the best" in title
    assert "*" not in as_text(summarise(ENTRIES))


def test_what_is_corrected_has_a_table_of_its_own_without_the_papers_values():
    corrected = [replace(one, hubness=True, result=result(300.0), paper={}, row=None) for one in ENTRIES[:3]]
    plain, other = as_text(summarise([*ENTRIES[:3], *corrected])).split("\n\n")
    assert plain == as_text(summarise(ENTRIES[:3]))
    assert ("hubness corrected" in other, "paper" in other, "300.00 ± 0.00" in other) == (True, False, True)
    rows = list(csv.DictReader(io.StringIO(as_csv(summarise([*ENTRIES[:3], *corrected])))))
    assert [row["protocol"] for row in rows] == ["full", "full, hubness corrected"]
    assert [one.to_dict()["hubness"] for one in (ENTRIES[0], corrected[0])] == [False, True]


def test_the_text_is_aligned():
    title, head, *rows = as_text(summarise(ENTRIES)).splitlines()
    assert title == (
        "split test, protocol full, ties pessimistic; mean ± sample standard deviation over 3 seeds; paper: F30K"
    )
    assert head.split() == [
        "i2t", "R@1", "paper", "i2t", "R@5", "i2t", "R@10", "t2i", "R@1", "t2i", "R@5", "t2i", "R@10", "RSUM", "paper",
        "log", "var.", "failed",
    ]  # fmt: skip
    assert [row.split()[0] for row in rows] == ["1", "2", "4"]
    at = head.index("RSUM") + len("RSUM")
    assert [row[:at].split()[-1] for row in rows] == ["4.00", "200.00", "-"]
    assert len({len(line) for line in (head, *rows)}) == 1
    frozen = [replace(one, result=replace(one.result, frozen=True)) for one in ENTRIES[:4]]
    assert "frozen here" in as_text(summarise(frozen)).splitlines()[0]
    assert "too few" in as_text(summarise([entry("1", 0, 90.0, images=12)])).splitlines()[0]


def test_protocols_are_parts_of_their_own_and_failures_are_in_each():
    lines = summarise([entry("1", 0, 50.0, protocol="1k-folds"), entry("1", 0, 40.0), failed("2", 0)])
    assert [(line.label, line.protocol, line.seeds, line.failed) for line in lines] == [
        ("1", "1k-folds", 1, 0), ("2", "1k-folds", 0, 1), ("1", "full", 1, 0), ("2", "full", 0, 1),
    ]  # fmt: skip
    assert as_text(lines).count("split test, protocol") == 2
    assert as_latex(lines).count("\\begin{tabular}") == 2
    nothing = summarise([failed("1", 0)])
    assert [(line.protocol, line.failed) for line in nothing] == [("-", 1)]
    assert as_text(nothing).splitlines()[-1].split() == ["1", "-", "1"]


def test_csv_reads_back():
    rows = list(csv.DictReader(io.StringIO(as_csv(summarise(ENTRIES)))))
    assert [row["k"] for row in rows] == ["1", "2", "4"]
    assert [row["rsum mean"] for row in rows] == ["104.0", "200.0", ""]
    assert (rows[0]["rsum std"], rows[0]["rsum paper"], rows[0]["row"]) == ("4.0", "105.5", "f30k")
    assert (rows[1]["rsum std"], rows[2]["failed"]) == ("", "1")
    several = [replace(ENTRIES[3], views=3), replace(ENTRIES[3], label="5", values={"k": 5, "l": 7})]
    rows = list(csv.DictReader(io.StringIO(as_csv(summarise(several)))))
    assert [(row["l"], row["views"]) for row in rows] == [("", "3"), ("7", "1")]


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
    save(summarise(ENTRIES), file := tmp_path / f"k.{ending}")
    assert file.read_bytes()[:4] in (b"\x89PNG", b"%PDF", b"<?xm")


def test_a_plot_says_what_its_lines_and_bars_are(tmp_path):
    pytest.importorskip("matplotlib")
    alone = replace(entry("1", 0, 50.0), values={}, label="untrained")
    save(summarise([alone, *ENTRIES, *(entry("20", seed, 90.0 + seed) for seed in range(2))]), tmp_path / "k.svg")
    texts = set(re.findall("<!-- (.*?) -->", (tmp_path / "k.svg").read_text()))
    assert texts >= {
        "k",
        "RSUM: sum of six recalls in percent",
        "protocol full: mean of 3 seeds ± standard deviation",
        "protocol full: the paper's value",
        "protocol full: untrained",
        *("1", "2", "4", "20"),
    }
    save(summarise([failed("1", 0), failed("2", 0)]), tmp_path / "none.svg")
    assert "<svg" in (tmp_path / "none.svg").read_text()


def test_what_can_be_saved(monkeypatch):
    pytest.importorskip("matplotlib")
    require_saveable(Path("k.csv"), [{"a": "x"}])
    require_saveable(Path("k.svg"), [{"a": 1}, {"a": 2.5}])
    require_saveable(Path("k.svg"), [{"a": 1, "b": 1}, {"a": 2, "b": 2}])
    for values in ([{"a": 1, "b": 2}], [{"a": "x"}], [{"a": True}], [{"a": 1}, {"b": 1}]):
        with pytest.raises(RunError, match="a single varied key"):
            require_saveable(Path("k.svg"), values)
    with pytest.raises(RunError, match=r"k\.gif must end in \.csv, \.tex, \.png"):
        require_saveable(Path("k.gif"), [{"a": 1}])
    monkeypatch.setattr("xret.pipeline.errors.find_spec", lambda name: None)
    with pytest.raises(RunError, match=r"a plot needs matplotlib; install with `pip install 'xret\[plots\]'`"):
        require_saveable(Path("k.png"), [{"a": 1}])


def test_protocols_of_r_precision_have_their_own_columns():
    ways = {
        way: {"R@1": value + 30, "mAP@R": value, "R-P": value + 10}
        for way, value in (("image_to_text", 31.0), ("text_to_image", 33.0))
    }
    (line,) = summarise([replace(entry("1", 0, 0.0), result=replace(result(0.0, "eccv"), rsum=None, **ways))])
    assert line.mean["text_to_image R-P"] == 43
    assert "rsum" not in line.mean
    head, row = as_text([line]).splitlines()[1:]
    assert head.split()[:6] == ["i2t", "R@1", "i2t", "mAP@R", "i2t", "R-P"]
    assert row.split() == ["1", "61.00", "31.00", "41.00", "63.00", "33.00", "43.00"]
