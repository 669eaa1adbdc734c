"""`xret eval`: what it prints, and that what it offers is what there is."""

import json

import pytest
import torch
from captioned_store import make_captioned_store
from click.testing import CliRunner
from small_store import make_store

from xret.cli.diagnostics import format_diagnostics
from xret.cli.eval import eval_
from xret.heads.evaluation.evaluation import evaluate
from xret.heads.evaluation.protocols import PROTOCOLS
from xret.heads.recipes.recipe import load_recipe
from xret.heads.report.diagnostics import diagnose
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
    assert lines[5] == f"RSUM {expected.rsum:.2f}, mean recall {expected.rsum / 6:.2f}"
    assert json.loads(printed(run, "--json")) == found.to_dict()


def test_plausible_matches_on_a_small_file_in_the_published_form(run, tmp_path):
    store = make_captioned_store(tmp_path / "coco.zarr", captions=2)
    images = [{"id": 500 + 7 * number} for number in range(12)]
    shown = [{"image_id": image["id"], "category_id": 1 + image["id"] % 3, "segmentation": []} for image in images]
    content = {"images": images, "categories": [{"id": 1}, {"id": 2}, {"id": 3}], "annotations": shown}
    (tmp_path / "instances_val2014.json").write_text(json.dumps(content))
    options = ["--store", store, "--protocol", "pmrp", "--annotations", str(tmp_path / "instances_val2014.json")]
    lines = printed(run, *options).splitlines()
    assert lines[2].split() == ["PMRP", *["zeta", "0", "zeta", "1", "zeta", "2"]]
    # Two classes of one image each differ in two places: with zeta 2 everything matches everything.
    for line in lines[3:5]:
        pmrp, *zetas = (float(number) for number in line.split()[3:])
        assert zetas[2] == 100
        assert zetas[0] == zetas[1] < 100
        assert pmrp == pytest.approx(sum(zetas) / 3, abs=0.01)
    assert len(lines) == 5


def test_the_protocols_are_those_there_are():
    (option,) = (parameter for parameter in eval_.params if parameter.name == "protocol")
    assert option.type.choices == ("auto", *PROTOCOLS)


SHOWN = {  # first words of what is printed, by recipe; the rest has a reason
    "setdiv": [
        "circular variance, natural log",
        "element  ",
        "RSUM, image: only this one",
        "RSUM of the whole split with all elements",
    ],
    "pcmepp": [
        "uncertainty, log-determinant",
        "lowest of captions",
        "learned pooling coefficients",
        "image aggregator.mean",
    ],
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
    below = lines[lines.index("") :]
    assert below == format_diagnostics(found).splitlines()
    for start in SHOWN[name]:
        assert any(line.startswith(start) for line in below)
    for key, reason in found["reasons"].items():
        assert f"{key.replace('_', ' ')}: none, {reason}" in below
    assert json.loads(printed(run, "--diagnostics", "--json"))["diagnostics"] == found
    assert "diagnostics" not in json.loads(printed(run, "--json"))


def test_numbers_stand_in_the_columns_that_name_them():
    found = {
        "circular_variance": {
            "log": {"image": -1.5, "text": -2.5, "both": -2.0},
            "log_squared": {"image": -0.5, "text": -1.25, "both": -1.0},
        },
        "elements": {
            "rsum": {
                "all": 300.04,
                "image": {"only": [100.0, 200.0], "without": [201.0, 101.0]},
                "text": {"only": [150.0], "without": None},
                "pairs": [[1.0], [2.0]],
            },
            "wins": {"pairs": [[0.25], [0.75]], "image": [0.25, 0.75], "text": [1.0]},
            "similarity": {
                "image": [[1.0, 0.5], [0.5, 1.0]],
                "text": [[1.0]],
                "matching": [[0.1], [0.2]],
                "any": [[0.0], [-0.1]],
            },
        },
        "uncertainty": None,
        "crops": {
            "images": 1200,
            "thresholds": [
                {
                    "area": 0.1,
                    "triplets": 7,
                    "uncertainty": {"image": {"A": 1.0, "C": 2.0}, "text": {"A": 4.0, "C": 3.0}},
                    "accuracy": {"image_to_text": {"A": 51.0, "C": 52.0}, "text_to_image": {"A": 53.0, "C": 54.0}},
                }
            ],
        },
        "gpo": {
            "image": [
                {
                    "part": "aggregator",
                    "lengths": [{"length": 12, "samples": 3, "coefficients": [0.5, *[0.0] * 10, 0.5]}],
                }
            ],
            "text": [],
        },
        "cost": {"macs_a_pair": 16384, "image": [4, 1024], "text": [4, 1024]},
        "reasons": {"uncertainty": "the embeddings are no Gaussians"},
    }
    lines = format_diagnostics(found).splitlines()
    words = {line[:46].strip(): line[46:].split() for line in lines}
    assert words["of 1 - |mean| (SetDiv)"] == ["-1.50", "-2.50", "-2.00"]
    assert words["RSUM, image: only this one"] == ["100.0", "200.0"]
    assert words["RSUM, image: without this one"] == ["201.0", "101.0"]
    assert "RSUM, text: without this one" not in words
    assert words["nearest in a match, image, %"] == ["25.0", "75.0"]
    assert "RSUM of the whole split with all elements 300.0" in lines
    assert words["crops of 1,200 images, below"] == ["triplets", "crop", "A", "crop", "C", "text", "A", "text", "C"]
    assert words["10%: uncertainty"] == ["7", "1.00", "2.00", "4.00", "3.00"]
    assert words["10%: chosen rightly, %"] == ["7", "51.0", "52.0", "53.0", "54.0"]
    assert words["image aggregator, 12 rows"] == ["0.500", *["0.000"] * 9, "…", "0.500"]
    assert "uncertainty: none, the embeddings are no Gaussians" in lines
    assert lines[-1].startswith("a pair costs 16,384 multiply-accumulates")
    assert lines[-1].endswith("an image is 4 x 1,024, a caption 4 x 1,024")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a", "b", "--diagnostics"], "--diagnostics looks into one run, and here are 2; name one of them"),
        (
            ["a", "--diagnostics", "--data-root", "nope"],
            "Invalid value for '--data-root': Directory 'nope' does not exist.",
        ),
        (["a", "--data-root", "."], "--data-root is for --diagnostics; add that, or leave it out"),
        (["a", "--visual-weights", "x"], "--visual-weights is for --diagnostics; add that, or leave it out"),
    ],
)
def test_options_that_do_not_go_together_are_wrong_usage(arguments, message):
    result = CliRunner().invoke(eval_, arguments)
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1] == f"Error: {message}"
