"""`xret eval`: what it prints, and that what it offers is what there is."""

import json
from dataclasses import replace

import pytest
import torch
from captioned_store import make_captioned_store
from click.testing import CliRunner
from small_store import make_store

from xret.cli.eval import eval_, format_diagnostics
from xret.heads.evaluation.evaluation import evaluate
from xret.heads.recipes.recipe import load_recipe
from xret.heads.report.diagnostics import Diagnosis, diagnose
from xret.heads.report.diagnostics.circular_variance import CircularVariance, OfSets
from xret.heads.report.diagnostics.coefficients import Coefficients, Length, Part
from xret.heads.report.diagnostics.cost import Cost
from xret.heads.report.diagnostics.crops import Accuracy, Crop, Crops, Example, Threshold
from xret.heads.report.diagnostics.elements import Ablated, AblatedRsum, Cosines, Elements, Wins
from xret.heads.training.training import train

SETTINGS = ["model.dim=16", "data.batch_size=16", "adapter.words.word_dim=8", "schedule.epochs=1"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors this small are slower on several threads
    folder = tmp_path_factory.mktemp("eval")
    train(make_store(folder / "small.zarr"), load_recipe("vsepp", SETTINGS), folder / "run", device="cpu")
    yield str(folder / "run")
    torch.set_num_threads(threads)


def printed(*arguments):
    return CliRunner().invoke(eval_, [*arguments, "--device", "cpu"], catch_exceptions=False).stdout


def test_the_command_prints_the_table(run):
    found = evaluate(run, device="cpu")
    lines = printed(run).splitlines()
    assert lines[0] == f"{run} on {found.stores[0]}"
    assert lines == str(found).splitlines()
    assert lines[1] == (
        "split test, protocol full: 12 images, 30 captions (2.50 an image), 0 skipped, ties pessimistic"
    )
    (expected,) = found.results
    for line, way in zip(lines[3:5], ("image_to_text", "text_to_image"), strict=True):
        numbers = [float(number) for number in line.split()[3:]]
        assert numbers == pytest.approx(
            [getattr(expected, way)[name] for name in ("R@1", "R@5", "R@10", "medr")], abs=0.05
        )
    chance = f"chance RSUM {expected.chance_rsum:.2f}"
    assert lines[5] == f"RSUM {expected.rsum:.2f}, mean recall {expected.rsum / 6:.2f}, {chance}"
    assert lines[6] == "12 images are too few to tell how good this is; take 100 or more"
    assert json.loads(printed(run, "--json")) == found.to_dict()


def test_one_image_is_too_few(run):
    (result,) = evaluate(run, device="cpu").results
    assert str(replace(result, images=1)).endswith("\n1 image is too few to tell how good this is; take 100 or more")


def test_plausible_matches_on_a_small_file_in_the_published_form(run, tmp_path):
    store = make_captioned_store(tmp_path / "coco.zarr", captions=2)
    images = [{"id": 500 + 7 * number} for number in range(12)]
    shown = [{"image_id": image["id"], "category_id": 1 + image["id"] % 3, "segmentation": []} for image in images]
    content = {"images": images, "categories": [{"id": 1}, {"id": 2}, {"id": 3}], "annotations": shown}
    (tmp_path / "instances_val2014.json").write_text(json.dumps(content))
    options = ["--store", store, "--protocol", f"pmrp:{tmp_path / 'instances_val2014.json'}"]
    lines = printed(run, *options).splitlines()
    assert lines[2].split() == ["PMRP", *["zeta", "0", "zeta", "1", "zeta", "2"]]
    # Two classes of one image each differ in two places: with zeta 2 everything matches everything.
    for line in lines[3:5]:
        pmrp, *zetas = (float(number) for number in line.split()[3:])
        assert zetas[2] == 100
        assert zetas[0] == zetas[1] < 100
        assert pmrp == pytest.approx(sum(zetas) / 3, abs=0.01)
    assert lines[5:] == ["12 images are too few to tell how good this is; take 100 or more"]


SHOWN = {  # what is printed, by recipe; the rest has a reason
    "setdiv": ["Circular variance within the sets", "RSUM with a single image element", "Mean cosine of elements, "],
    "pcmepp": ["the log-determinant of the covariance, of images", "What GPO of the image branch (aggregator.mean)"],
}


@pytest.mark.parametrize("name", SHOWN)
def test_diagnostics_below_the_table(tmp_path, name):
    settings = [
        *SETTINGS,
        *([f"aggregator.{side}.head_dim=16" for side in ("image", "text")] if name == "setdiv" else []),
    ]
    train(make_store(tmp_path / "small.zarr"), load_recipe(name, settings), tmp_path / "run", device="cpu")
    run = str(tmp_path / "run")
    found = diagnose(run, device="cpu")
    lines = printed(run, "--diagnostics").splitlines()
    below = lines[lines.index("") + 1 :]
    assert below == format_diagnostics(found).splitlines()
    for words in SHOWN[name]:
        assert any(words in line for line in below), words
    assert sum(line.startswith("not shown: ") for line in below) == len(found.reasons)
    assert below[0] == f"multiply-accumulates a pair: {found.cost.macs_a_pair:,}"
    assert json.loads(printed(run, "--diagnostics", "--json"))["diagnostics"] == found.to_dict()
    assert "diagnostics" not in json.loads(printed(run, "--json"))


def test_numbers_stand_in_the_columns_that_name_them():
    rsum = AblatedRsum(300.04, Ablated([100.0, 200.0], [201.0, 101.0]), Ablated([150.0], None), [[1.0], [2.0]])
    cosines = Cosines([[1.0, 0.5], [0.5, 1.0]], [[1.0]], [[0.1], [0.2]], [[0.0], [-0.1]])
    accuracy = Accuracy({"A": 51.0, "C": 52.0}, {"A": 53.0, "C": 54.0})
    crop = Crop([0.0, 0.0, 1.0, 1.0], "a dog", {"image": 1.0, "text": 2.0})
    uncertainty = {"image": {"A": 1.0, "C": 2.0}, "text": {"A": 4.0, "C": 3.0}}
    found = Diagnosis(
        circular_variance=CircularVariance(OfSets(-1.5, -2.5, -2.0), OfSets(-0.5, -1.25, -1.0)),
        elements=Elements(rsum, Wins([[0.25], [0.75]], [0.25, 0.75], [1.0]), cosines),
        uncertainty=None,
        crops=Crops(
            1200,
            [Threshold(0.1, 7, uncertainty, accuracy, Example("1.jpg", [9, 9], crop, crop, crop, accuracy))],
        ),
        gpo=Coefficients([Part("aggregator", [Length(12, 3, [0.5, *[0.0] * 10, 0.5])])], []),
        cost=Cost(16384, [4, 1024], [4, 1024]),
        reasons={"uncertainty": "the embeddings are no Gaussians"},
    )
    facts, *tables, missing = (part.splitlines() for part in format_diagnostics(found).split("\n\n"))
    assert facts[1:] == ["shape of an image: 4 × 1,024", "shape of a caption: 4 × 1,024"]

    def table(words):
        (lines,) = (lines for lines in tables if words in lines[0])
        return [line.split() for line in lines[1:]]

    assert [row[-3:] for row in table("Circular variance")[1:]] == [
        ["−1.50", "−2.50", "−2.00"], ["−0.50", "−1.25", "−1.00"],
    ]  # fmt: skip
    assert table("single image element")[1:] == [["1", "100.00", "201.00"], ["2", "200.00", "101.00"]]
    assert table("single caption element")[1:] == [["1", "150.00"]]
    assert table("How often (%)")[1:] == [["1", "25.0"], ["2", "75.0"]]
    assert "all elements give 300.04." in next(lines[0] for lines in tables if "one element of the image" in lines[0])
    assert table("Uncertainty of crops against ambiguity")[1:] == [["10", "1.00", "2.00"]]
    assert table("Uncertainty of captions against ambiguity")[1:] == [["10", "4.00", "3.00"]]
    assert table("Binary selection")[1:] == [["10", "7", "51.00", "52.00", "53.00", "54.00"]]
    assert table("What GPO of the image branch")[1:] == [["12", "rows", "0.500", *["0.000"] * 9, "0.500"]]
    assert missing == ["not shown: uncertainty: the embeddings are no Gaussians"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{run}", "{run}", "--diagnostics"], "--diagnostics takes one run, and no store"),
        (["{run}", "--diagnostics", "--data-root", "nope"], "Directory 'nope' does not exist."),
    ],
)
def test_options_that_do_not_go_together_are_wrong_usage(run, arguments, message):
    result = CliRunner().invoke(eval_, [word.format(run=run) for word in arguments])
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].endswith(message)
