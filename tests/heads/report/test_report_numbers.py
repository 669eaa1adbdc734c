"""What the report makes of numbers that are known: diagnostics, evaluations and the lines of a training."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from xret.heads.evaluation.evaluation import Evaluation, Result
from xret.heads.report.diagnostics import Diagnosis
from xret.heads.report.diagnostics.coefficients import Coefficients, Length, Part
from xret.heads.report.diagnostics.cost import Cost
from xret.heads.report.diagnostics.crops import Accuracy, Crop, Crops, Example, Threshold
from xret.heads.report.diagnostics.elements import Ablated, AblatedRsum, Cosines, Elements, Wins
from xret.heads.report.diagnostics.uncertainty import Distribution, UncertainCaption, UncertainImage, Uncertainty
from xret.heads.report.figures import by_kind, heat_map, side_by_side
from xret.heads.report.page import absent
from xret.heads.report.sections.crops import together
from xret.heads.report.sections.diagnoses import diagnosis
from xret.heads.report.sections.tables import evaluation_tables, rsum_plot, training_plots

NOTHING = Diagnosis(None, None, None, None, None, Cost(1, [1], [1]), {})


class NoPictures:
    def show(self, *_):
        return None

    hold = show


def found(**known):
    return replace(NOTHING, **known)


def test_reasons_say_what_is_missing():
    page = diagnosis(found(reasons={"gpo": "there is none", "uncertainty": "no Gaussians"}), NoPictures())
    assert page.reasons == {"coefficients of GPO": "there is none", "uncertainty": "no Gaussians"}
    assert not (page.heat_maps or page.plots or page.tables or page.uncertain)


def test_elements_and_their_numbers():
    rsum = AblatedRsum(400.0, Ablated([100.0, 300.0], [310.0, 120.0]), Ablated([200.0], None), pairs=[[100.0], [250.0]])
    wins = Wins([[0.25], [0.75]], [0.25, 0.75], [1.0])
    cosines = Cosines([[1.0, 0.2], [0.2, 1.0]], [[1.0]], matching=[[0.3], [0.4]], any=[[-0.1], [0.0]])
    page = diagnosis(found(elements=Elements(rsum, wins, cosines)), NoPictures())
    assert list(page.heat_maps) == ["matching", "any", "image", "text", "wins", "rsum"]
    shares, pairs, within = (page.heat_maps[kind] for kind in ("wins", "rsum", "image"))
    assert (shares.rows, shares.heat) == ([["1", "25.0"], ["2", "75.0"]], [[0.0], [1.0]])
    assert (pairs.rows, pairs.heat) == ([["1", "100.0"], ["2", "250.0"]], [[0.0], [1.0]])
    assert "all elements give 400.00" in pairs.caption
    assert [name.split() for name in within.header] == [["image", "↓", "image", "→"], ["1"], ["2"]]
    assert within.heat == [[1.0, 0.2], [0.2, 1.0]]
    images, captions = page.plots.values()
    assert images.table.rows == [["1", "100.00", "310.00"], ["2", "300.00", "120.00"]]
    assert captions.table.header == ["caption element", "only this element"]


def test_coefficients_of_the_most_frequent_lengths():
    lengths = [Length(n, samples=n % 5, coefficients=[1 / n] * n) for n in range(1, 9)]
    page = diagnosis(found(gpo=Coefficients([Part("pool", lengths)], [])), NoPictures())
    (plot,) = page.plots.values()
    assert "of the image branch (pool)" in plot.caption
    for length in range(1, 9):
        assert (f">{length} rows<" in plot.draw()) == (length in (3, 4, 8, 2))


@pytest.mark.parametrize("gaussians", [True, False])
def test_crops(gaussians):
    accuracy = Accuracy({"A": 80.0, "C": 60.0}, {"A": 75.0, "C": 55.5})
    uncertainty = {"image": {"A": 1.0, "C": 2.0}, "text": {"A": 0.5, "C": 0.75}} if gaussians else None
    cuts = [
        Crop(
            [2.5, 4.0, 10.0 + 10 * place, 12.0],
            f"phrase {letter}",
            {"image": -1.0 * place, "text": 2.0} if gaussians else None,
        )
        for place, letter in enumerate("ABC")
    ]
    single = Accuracy({"A": 100.0, "C": 0.0}, {"A": 50.0, "C": 100.0})
    example = Example("7.jpg", [40, 20], *cuts, single)
    thresholds = [Threshold(area, 1200, uncertainty, accuracy, example) for area in (0.1, 0.3, 0.5)]
    page = diagnosis(found(crops=Crops(7, thresholds)), NoPictures())
    table = page.tables["crops"]
    assert table.header[2:] == ["crop A asks", "crop C asks", "caption A asks", "caption C asks"]
    assert table.rows == [[area, "1,200", "80.00", "60.00", "75.00", "55.50"] for area in ("10", "30", "50")]
    assert len(page.plots) == 2 * gaussians
    for plot, what in zip(page.plots.values(), ("crop", "caption"), strict=False):
        assert re.findall(r">(\w+ [AC])<", plot.draw()) == [f"{what} A", f"{what} C"]
    assert [one.title for one in page.triplets] == [f"A and B below {area} % of the image" for area in (10, 50)]
    one = page.triplets[0]
    assert (one.picture, one.crops) == (None, dict.fromkeys("ABC"))
    assert one.phrases == ["phrase A", "phrase B", "phrase C"]
    values = [
        ("uncertainty of the crop", ["0.00", "−1.00", "−2.00"]),
        ("uncertainty of the caption", ["2.00", "2.00", "2.00"]),
    ]
    chosen = [("the crop's choice", ["✓ right", "–", "✗ wrong"]), ("the caption's choice", ["= tied", "–", "✓ right"])]
    assert one.rows == (values if gaussians else []) + chosen
    merged = together({"a": page.triplets, "b": [page.triplets[0]]})
    assert [triplet.title for triplet in merged] == [triplet.title for triplet in page.triplets]
    assert [name for name, _ in merged[0].rows] == [f"{run}: {name}" for run in "ab" for name, _ in one.rows]
    assert merged[0].rows[-1][1] == one.rows[-1][1]
    assert len(merged[1].rows) == len(page.triplets[1].rows)
    assert together({"a": page.triplets}) == page.triplets


def test_what_is_absent_is_said_once():
    reasons = {
        "a": {"circular variance": "no sets", "elements": "no sets", "attention": "no pictures"},
        "b": {"elements": "no sets", "circular variance": "no sets", "gpo": "none", "attention": "no pictures"},
        "c": {"gpo": "none", "attention": "no pictures"},
    }
    assert absent(reasons) == [
        ("circular variance, elements", "a, b", "no sets"),
        ("attention", "", "no pictures"),
        ("gpo", "b, c", "none"),
    ]
    assert absent({"a": {}}) == []


def test_runs_stand_side_by_side():
    tables = {run: heat_map("c", "x", [[value]]) for run, value in (("a", 1.0), ("b", 3.0), ("c", 2.0))}
    (both,) = side_by_side(tables, True)
    assert (both.header, both.rows) == (["run", "x", "1"], [[run, "1", cells] for run, cells in
                                                           (("a", "1.00"), ("b", "3.00"), ("c", "2.00"))])  # fmt: skip
    assert both.heat == [[None, 0.0], [None, 1.0], [None, 0.5]]
    assert side_by_side({"a": tables["a"]}, False) == [tables["a"]]
    (alone,) = side_by_side({"a": tables["a"]}, True)  # the page has another run, without such a table
    assert (alone.header, alone.rows) == (["run", "x", "1"], [["a", "1", "1.00"]])
    assert side_by_side({}, True) == []
    tables["b"] = replace(tables["b"], caption="of fewer images")
    found = side_by_side(tables, True)
    assert [(one.caption, [row[0] for row in one.rows]) for one in found] == [
        ("c", ["a", "c"]),
        ("of fewer images", ["b"]),
    ]
    found = by_kind({"a": {"x": 1, "z": 2}, "b": {"y": 3, "z": 4}, "c": {"x": 5}})
    assert found == [("a", "x", 1), ("c", "x", 5), ("a", "z", 2), ("b", "z", 4), ("b", "y", 3)]


def test_the_most_and_the_least_uncertain():
    image = UncertainImage("7", "7.jpg", ["a cat"], -3.0)
    caption = UncertainCaption(1, "a dog", "8.jpg", 2.0)
    deciles = [float(k) for k in range(11)]
    sides = [Distribution(0.5, deciles, highest=[one] * 9, lowest=[one]) for one in (image, caption)]
    page = diagnosis(found(uncertainty=Uncertainty(*sides)), NoPictures())
    assert {title: len(items) for title, items in page.uncertain.items()} == {
        "Least uncertain images": 1,
        "Least uncertain captions": 1,
        "Most uncertain images": 4,
        "Most uncertain captions": 4,
    }
    assert (page.uncertain["Least uncertain images"][0].text, page.uncertain["Least uncertain images"][0].note) == (
        "a cat",
        "−3.00",
    )


def result(protocol="full", paper=None, **more):
    recalls = {"R@1": 10.0, "R@5": 20.0, "R@10": 30.0, "medr": 4.5}
    table = Result("test", protocol, 5000, 25000, 5.0, 3, "mean", recalls, recalls, 120.0, 20.0, paper, None)
    return replace(table, **more)


def evaluations(*results):
    """Evaluations of one result each, or of several."""
    return [Evaluation(("run",), ("store",), (1,), one if isinstance(one, tuple) else (one,)) for one in results]


def test_the_papers_row_stands_beside_ours():
    tables = evaluation_tables(["a", "b"], evaluations(result(paper=125.5), result()))
    (table,) = tables
    assert table.header[-4:] == ["RSUM", "mean recall", "paper's RSUM", "difference"]
    assert [row[-4:] for row in table.rows] == [
        ["120.00", "20.00", "125.50", "−5.50"],
        ["120.00", "20.00", "–", "–"],
    ]
    assert "5,000 images, 25,000 captions (5.00 an image), 3 skipped, ties mean" in table.caption
    (table,) = evaluation_tables(["a"], evaluations(result()))
    assert table.header[-2:] == ["RSUM", "mean recall"]


def test_recalls_are_shaded_from_the_lowest_to_the_highest():
    (table,) = evaluation_tables(["a"], evaluations(result(paper=125.5)))
    half = [0.0, 0.5, 1.0, None]  # of a median rank there is no shade
    assert table.heat == [[*half, *half, None, None, None, None]]


def test_protocols_of_r_precision_have_their_own_columns():
    way = {"mAP@R": 1.0, "R-P": 2.0, "R@1": 3.0}
    eccv = result("eccv", image_to_text=way, text_to_image=way, rsum=None, mean_recall=None)
    full, other = evaluation_tables(["a"], evaluations((result(), eccv)))
    assert full.header[1] == "i→t R@1"
    assert other.header == ["run", *(f"{short} {name}" for short in ("i→t", "t→i") for name in way)]
    assert other.rows == [["a", "1.00", "2.00", "3.00", "1.00", "2.00", "3.00"]]
    assert rsum_plot(["a"], evaluations(eccv)) is None
    assert rsum_plot(["a"], evaluations((eccv, result()))) is not None


def test_runs_on_other_samples_have_their_own_table():
    fewer = result(images=4998, captions=24990, skipped=5)
    results = evaluations(result(), fewer, result())
    first, second = evaluation_tables(["a", "b", "c"], results)
    assert [row[0] for row in first.rows] == ["a", "c"]
    assert [row[0] for row in second.rows] == ["b"]
    assert "5,000 images, 25,000 captions" in first.caption
    assert "4,998 images, 24,990 captions (5.00 an image), 5 skipped" in second.caption
    assert rsum_plot(["a", "b"], results[:2]) is None


def test_training_with_gaps():
    lines = [
        {"epoch": 1, "loss": 2.0, "parts": {"triplet": 2.0}, "lr": 0.1, "rsum": 50.0, "seconds": 1.0},
        {"epoch": 2, "loss": 0.0, "parts": {"triplet": 0.0}, "lr": 0.0, "rsum": None, "seconds": 1.0},
    ]
    view = SimpleNamespace(name="a", run=SimpleNamespace(metrics=lambda: lines))
    rsum, loss = training_plots([view])
    assert "best 50.00 at epoch 1" in rsum.caption
    assert loss.table.rows == [["1", "2.0000", "50.00", "1.0"], ["2", "0.0000", "–", "1.0"]]
    assert ">loss<" in loss.draw()  # no logarithm of 0
    lines.clear()
    assert training_plots([view]) == []
