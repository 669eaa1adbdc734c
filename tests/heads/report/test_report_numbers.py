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
    page = diagnosis("run", found(reasons={"gpo": "there is none", "uncertainty": "no Gaussians"}), NoPictures())
    assert page.reasons == ["coefficients of GPO: there is none", "uncertainty: no Gaussians"]
    assert not (page.heat_maps or page.plots or page.tables or page.uncertain)


def test_elements_and_their_numbers():
    rsum = AblatedRsum(400.0, Ablated([100.0, 300.0], [310.0, 120.0]), Ablated([200.0], None), pairs=[[100.0], [250.0]])
    wins = Wins([[0.25], [0.75]], [0.25, 0.75], [1.0])
    cosines = Cosines([[1.0, 0.2], [0.2, 1.0]], [[1.0]], matching=[[0.3], [0.4]], any=[[-0.1], [0.0]])
    page = diagnosis("run", found(elements=Elements(rsum, wins, cosines)), NoPictures())
    heat = {table.caption: table for table in page.heat_maps}
    assert len(heat) == 6
    (shares,) = (table for caption, table in heat.items() if "how often (%)" in caption)
    assert (shares.rows, shares.heat) == ([["1", "25.0"], ["2", "75.0"]], [[0.25], [0.75]])
    (pairs,) = (table for caption, table in heat.items() if "all elements give 400.00" in caption)
    assert (pairs.rows, pairs.heat) == ([["1", "100.0"], ["2", "250.0"]], [[0.25], [0.625]])
    (within,) = (table for caption, table in heat.items() if "within the sets of images" in caption)
    assert [name.split() for name in within.header] == [["image", "↓", "image", "→"], ["1"], ["2"]]
    images, captions = page.plots
    assert images.table.rows == [["1", "100.00", "310.00"], ["2", "300.00", "120.00"]]
    assert captions.table.header == ["caption element", "only this element"]


def test_coefficients_of_the_most_frequent_lengths():
    lengths = [Length(n, samples=n % 5, coefficients=[1 / n] * n) for n in range(1, 9)]
    page = diagnosis("run", found(gpo=Coefficients([Part("pool", lengths)], [])), NoPictures())
    (plot,) = page.plots
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
    thresholds = [Threshold(area, 1200, uncertainty, accuracy, example) for area in (0.1, 0.5)]
    page = diagnosis("run", found(crops=Crops(7, thresholds)), NoPictures())
    (table,) = page.tables
    assert table.header[2:] == ["crop A asks", "crop C asks", "caption A asks", "caption C asks"]
    assert table.rows == [[area, "1,200", "80.00", "60.00", "75.00", "55.50"] for area in ("10", "50")]
    assert len(page.plots) == 2 * gaussians
    for plot, what in zip(page.plots, ("crop", "caption"), strict=False):
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


def test_the_most_and_the_least_uncertain():
    image = UncertainImage("7", "7.jpg", ["a cat"], -3.0)
    caption = UncertainCaption(1, "a dog", "8.jpg", 2.0)
    deciles = [float(k) for k in range(11)]
    sides = [Distribution(0.5, deciles, highest=[one] * 9, lowest=[one]) for one in (image, caption)]
    page = diagnosis("run", found(uncertainty=Uncertainty(*sides)), NoPictures())
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
