"""The report: what is on the page is what the run does, and the page is sound HTML that needs nothing else."""

import re
import shutil
import statistics
from dataclasses import replace
from itertools import combinations
from types import SimpleNamespace

import pytest
import torch
from small_reports import require_sound
from small_store import make_store
from small_trainings import recipe_of

from xret.heads.evaluation.evaluation import evaluate
from xret.heads.evaluation.number_table import shown as number
from xret.heads.evaluation.result import Evaluation, Result
from xret.heads.recipes.recipe import load_recipe
from xret.heads.report import write_report
from xret.heads.report.page import names, spread
from xret.heads.report.tables import differing_settings, evaluation_tables, line_chart, training_charts
from xret.heads.runs.run import Run
from xret.heads.training.train import train
from xret.pipeline.errors import RunError


@pytest.fixture(scope="module")
def two(folder, run):
    out = folder / "two.html"
    size = write_report([run("setdiv"), run("vsepp")], out, data_root=folder, device="cpu")
    assert out.stat().st_size == size
    return out.read_text()


@pytest.mark.parametrize("name", ["gaussian-vsepp", "scan", "pcme"])
def test_every_kind_of_embedding_has_its_page(folder, run, name):
    write_report([run(name)], folder / f"{name}.html", device="cpu")
    text = require_sound((folder / f"{name}.html").read_text()).text
    assert "There are no pictures on this page, only ids and captions" in text
    assert ("Each element on its own" in text) == (name == "pcme")
    assert number(evaluate([folder / name], device="cpu").results[0].rsum) in text


def test_a_page_of_two_runs(two, run):
    outline = require_sound(two)
    for name in ("setdiv", "vsepp"):
        result = evaluate([run(name)], device="cpu").results[0]
        row = re.search(rf'<tr><th scope="row">{name}</th>(.*)</tr>', two)[1]
        cells = re.findall("<td[^>]*>(.*?)</td>", row)
        assert cells[:3] == [number(result.image_to_text[f"R@{k}"]) for k in (1, 5, 10)]
        assert cells[4:7] == [number(result.text_to_image[f"R@{k}"]) for k in (1, 5, 10)]
        assert cells[8] == number(result.rsum)
    assert "12 images, 30 captions (2.50 an image), 0 skipped, ties pessimistic" in outline.text
    assert f"validation RSUM {Run(run('setdiv')).info.best_rsum:.2f}" in outline.text
    assert re.findall(r'<li><a href="#([a-z]+)">', two) == re.findall(r'<h2 id="([a-z]+)">', two)
    assert re.findall(r'<h2 id="([a-z]+)">', two) == [
        "evaluation", "attention", "galleries", "elements", "comparison", "training", "runs",
    ]  # fmt: skip
    galleries = two[two.index('<h2 id="galleries">') : two.index('<h2 id="elements">')]
    assert re.findall("<p><strong>([^<]*)</strong>", galleries) == ["setdiv", "vsepp"] * 6  # three queries each way
    assert "There is no attention of vsepp on this page: the run has no attention over local features." in outline.text


def test_how_far_elements_lie_apart_is_measured_and_collapsed_sets_are_named(setdiv, monkeypatch):
    assert not torch.equal(setdiv.seen.image.elements[:, 0], setdiv.seen.image.elements[:, 1])
    means = []
    for elements in (setdiv.seen.image.elements, setdiv.seen.text.elements):
        pairs = [(row[a] @ row[b]).item() for row in elements for a, b in combinations(range(len(row)), 2)]
        means.append(statistics.fmean(pairs))
    (sentence,) = spread(setdiv)
    assert re.findall(r"(\S+) in (image|text) sets", sentence) == [
        (number(means[0]), "image"),
        (number(means[1]), "text"),
    ]
    assert "sets have collapsed" not in sentence
    side = setdiv.seen.image
    same = replace(side, embedding=side.elements[:, :1].expand_as(side.elements))
    (sentence,) = spread(replace(setdiv, seen=replace(setdiv.seen, image=same)))
    assert "1.00 in image sets" in sentence
    assert "the image sets have collapsed" in sentence


def test_settings_in_which_runs_of_one_recipe_differ():
    other = ["optimizer.lr=0.25", "schedule.warmup_epochs=0", "runtime.cache=stream", "similarity=mil"]
    recipes = [load_recipe("setdiv"), load_recipe("vsepp"), load_recipe("setdiv", other)]
    rows = {row[0]: row[1:] for row in differing_settings(recipes)}
    assert rows["optimizer.lr"] == ["0.001", "0.0002", "0.25"]
    assert rows["similarity.alpha"] == ["16.0", "–", "–"]
    assert "optimizer.name" not in rows
    assert differing_settings([recipes[0], recipes[1], load_recipe("setdiv", other[2:3])]) == []


def test_captions_are_text_not_markup_and_pages_repeat_to_the_byte(two, folder, run):
    assert "<b>&amp;</b>" not in two.replace("&lt;b&gt;", "")
    assert "&lt;b&gt;&amp;amp;&lt;/b&gt;" in two
    write_report([run("setdiv"), run("vsepp")], folder / "again.html", data_root=folder, device="cpu")
    assert (folder / "again.html").read_text() == two


def test_damaged_pictures_are_named(folder, run, tmp_path):
    shutil.copytree(folder / "images", tmp_path / "images")
    for number_ in range(61, 72):
        (tmp_path / "images" / f"{number_}.jpg").write_bytes(b"no picture")
    write_report([run("vsepp")], tmp_path / "r.html", data_root=tmp_path, device="cpu")
    text = " ".join(require_sound((tmp_path / "r.html").read_text()).text.split())
    listed = re.search(r"could not be read are shown as id and caption: ((?:\d+\.jpg(?:, )?)+)", text)[1]
    assert len(listed.split(", ")) > 1
    assert "60.jpg" not in listed


def test_runs_of_two_data_sets_are_refused(run, tmp_path):
    store = make_store(tmp_path / "other.zarr", mark="x")
    train(store, recipe_of("vsepp", 2), tmp_path / "run", device="cpu")
    with pytest.raises(RunError, match=r"the runs are of several data sets, small and xsmall; make a page for each"):
        write_report([run("vsepp"), tmp_path / "run"], tmp_path / "r.html", device="cpu")


def test_names_tell_runs_apart(tmp_path):
    a, b, c = tmp_path / "x" / "run", tmp_path / "y" / "run", tmp_path / "z"
    assert names([a, c]) == ["run", "z"]
    assert names([a, b]) == [f"{a} (1)", f"{b} (2)"]
    assert names([c, c]) == [f"{c} (1)", f"{c} (2)"]


def result(protocol="full", paper=None, way=None, rsum=120.0, skipped=3):
    way = way or {"R@1": 10.0, "R@5": 20.0, "R@10": 30.0, "medr": 4.5}
    mean, chance = (None, None) if rsum is None else (rsum / 6, 0.9)
    return Result("test", protocol, 5000, 25000, 5.0, skipped, "mean", way, way, rsum, mean, paper, None, chance)


def tables(**results):
    return evaluation_tables([(name, Evaluation((name,), ("s",), (1,), found)) for name, found in results.items()])


def test_few_images_are_called_too_few():
    captions = [tables(a=(replace(result(), images=images),))[0].caption for images in (40, 5000)]
    assert ["40 images are too few" in caption for caption in captions] == [True, False]


def test_the_papers_row_and_chance_are_beside_ours():
    (table,) = tables(a=(result(paper=125.5),), b=(result(),))
    assert table.header[-4:] == ["RSUM", "mean recall", "paper's RSUM", "difference"]
    assert [row[-4:] for row in table.rows[:2]] == [[120.0, 20.0, 125.5, -5.5], [120.0, 20.0, None, None]]
    assert (table.rows[2][0], table.rows[2][-4:]) == ("chance", [0.9, pytest.approx(0.15), None, None])
    assert "5,000 images, 25,000 captions (5.00 an image), 3 skipped, ties mean" in table.caption


def test_trained_encoders_of_a_paper_are_told_from_frozen_ones():
    frozen = replace(result(paper=125.5), frozen=True)
    (table,) = tables(a=(frozen,), b=(result(paper=125.5),), c=(replace(frozen, paper_rsum=None),))
    assert table.caption.endswith(" The papers of a train their encoders, which are frozen here.")


def test_other_protocols_and_other_samples_have_their_own_table():
    way = {"mAP@R": 1.0, "R-P": 2.0, "R@1": 3.0}
    full, eccv, other = tables(a=(result(), result("eccv", way=way, rsum=None)), b=(result(skipped=5),))
    assert full.header[1] == "i→t R@1"
    assert eccv.header == ["run", *(f"{short} {name}" for short in ("i→t", "t→i") for name in way)]
    assert eccv.rows == [["a", 1.0, 2.0, 3.0, 1.0, 2.0, 3.0]]
    assert [row[0] for row in other.rows] == ["b", "chance"]


def test_training_with_gaps():
    lines = [
        {"epoch": 1, "loss": 2.0, "rsum": 50.0},
        {"epoch": 2, "loss": 0.0, "rsum": None},
    ]
    ranker = SimpleNamespace(run=SimpleNamespace(metrics=lambda: lines))
    run = SimpleNamespace(name="a", seen=SimpleNamespace(ranker=ranker))
    rsum, loss = training_charts([run])
    assert (rsum.lines, loss.lines) == ({"a": [(0, 1)]}, {"a": [(0, 0), (1, 1)]})
    lines.clear()
    assert training_charts([run]) == []


@pytest.mark.parametrize(
    ("ys", "values"),
    [([0.0, 30.0], ["0", "10", "20", "30"]), ([3.0, 3.0], ["3", "3.2", "3.4", "3.6", "3.8", "4"])],
)
def test_a_chart_has_round_numbers_and_its_points_in_place(ys, values):
    chart = line_chart("loss", {"a": ([1.0, 5.0], ys)})
    assert [number for _, number in chart.values] == values
    assert chart.epochs == [(0, "1"), (0.25, "2"), (0.5, "3"), (0.75, "4"), (1, "5")]
    assert chart.lines["a"] == [(0, 1), (1, 0 if ys[1] > ys[0] else 1)]
    assert all(0 <= at <= 1 for at, _ in chart.values)
