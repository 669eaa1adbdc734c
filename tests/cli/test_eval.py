"""`xret eval`: what it prints, and that what it offers is what there is."""

import json

import pytest
import torch
from click.testing import CliRunner
from small_store import make_store

from xret.cli import main
from xret.heads.diagnostics import diagnose
from xret.heads.evaluation.evaluation import evaluate
from xret.heads.recipes.recipe import load_recipe
from xret.heads.training.train import train

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
    return CliRunner().invoke(main, ["eval", *arguments, "--device", "cpu"], catch_exceptions=False).stdout


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


def test_diagnostics_below_the_table(run):
    found = diagnose(run, device="cpu")
    lines = printed(run, "--diagnostics").splitlines()
    assert lines[lines.index("") + 1 :] == str(found).splitlines()
    assert json.loads(printed(run, "--diagnostics", "--json"))["diagnostics"] == found.to_dict()
    assert "diagnostics" not in json.loads(printed(run, "--json"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{run}", "{run}", "--diagnostics"], "--diagnostics takes one run, and no store"),
        (["{run}", "--diagnostics", "--data-root", "nope"], "Directory 'nope' does not exist."),
    ],
)
def test_options_that_do_not_go_together_are_wrong_usage(run, arguments, message):
    result = CliRunner().invoke(main, ["eval", *(word.format(run=run) for word in arguments)])
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].endswith(message)
