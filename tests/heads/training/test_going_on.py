"""A finished run that goes on with more epochs, and a run that begins with the weights of another."""

import json
from dataclasses import replace

import pytest
import torch
from command_line import refused
from safetensors.torch import load_file
from small_store import make_store

from xret.heads.recipes.recipe import load_recipe
from xret.heads.runs.run import Run
from xret.heads.training.train import train
from xret.pipeline.errors import RunError

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = ["data.unit=image", "model.dim=8", "adapter.words.word_dim=4", "data.batch_size=4", "optimizer.lr=0.01"]


def recipe_of(epochs, *settings):
    return load_recipe("vsepp", [*SMALL, f"schedule.epochs={epochs}", *settings])


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("store") / "s.zarr", train=12, val=4, test=4)


def outcome(folder):
    lines = [{key: value for key, value in line.items() if key != "seconds"} for line in Run(folder).metrics()]
    state = torch.load(folder / "checkpoint.pt", weights_only=True)["state"]
    return lines, Run(folder).info.best_epoch, load_file(folder / "model.safetensors"), state["model"]


def same(first, second):
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return torch.equal(first, second) if isinstance(first, torch.Tensor) else first == second


@pytest.mark.parametrize(
    "settings",
    [
        ["schedule.name=constant"],
        ["schedule=step", "schedule.step=1", "schedule.gamma=0.5", "optimizer.ema=0.9"],
        ["schedule.name=constant", "optimizer=sgd", "schedule.warmup_epochs=1"],
    ],
)
def test_a_longer_run_is_that_of_as_many_epochs_from_the_beginning(store, tmp_path, settings):
    train(store, recipe_of(4, *settings), tmp_path / "whole", device="cpu")
    train(store, recipe_of(2, *settings), tmp_path / "run", device="cpu")
    found = train(store, recipe_of(4, *settings), tmp_path / "run", device="cpu", resume=True)
    assert (found.epochs, found.trained) == (4, 2)
    assert same(outcome(tmp_path / "run"), outcome(tmp_path / "whole"))
    assert Run(tmp_path / "run").info == Run(tmp_path / "whole").info
    assert (tmp_path / "run" / "recipe.yaml").read_text() == (tmp_path / "whole" / "recipe.yaml").read_text()
    assert train(store, recipe_of(4, *settings), tmp_path / "run", device="cpu", resume=True).trained == 0
    with pytest.raises(RunError, match=r"begun otherwise: schedule\.epochs is 4 there and 3 now"):
        train(store, recipe_of(3, *settings), tmp_path / "run", device="cpu", resume=True)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (["schedule.name=cosine"], "the learning rate of schedule.name=cosine falls to 0 over all epochs"),
        (["schedule.name=linear"], "the learning rate of schedule.name=linear falls to 0 over all epochs"),
        (["schedule.name=constant", "schedule.warmup_ratio=0.1"], "schedule.warmup_ratio is a share of all epochs"),
        (["schedule=step", "optimizer.swa_epochs=1"], "optimizer.swa_epochs averages over the last epochs"),
    ],
)
def test_what_cannot_be_made_longer_says_why(store, tmp_path, settings, why):
    train(store, recipe_of(1, *settings), tmp_path / "run", device="cpu")
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    words = [word for setting in (*SMALL, "schedule.epochs=2", *settings) for word in ("--set", setting)]
    said = refused("train-head", store, "--recipe", "vsepp", "--out", tmp_path / "run", *words, "--resume")
    assert said.startswith(f"{tmp_path / 'run'} was begun for 1 epoch and cannot be made longer, because {why}; ")
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


def test_the_state_of_a_run_that_is_over_has_no_weights(store, tmp_path):
    kept = {}
    for name in ("cosine", "constant"):
        recipe = recipe_of(2, f"schedule.name={name}", "optimizer.ema=0.9")
        train(store, recipe, tmp_path / name, device="cpu")
        kept[name] = torch.load(tmp_path / name / "checkpoint.pt", weights_only=True)["state"]
        assert train(store, recipe, tmp_path / name, device="cpu", resume=True).trained == 0
    assert kept["constant"].keys() - kept["cosine"].keys() == {"model", "average"}
    sizes = {name: (tmp_path / name / "checkpoint.pt").stat().st_size for name in kept}
    weights = sum(value.nbytes for value in load_file(tmp_path / "cosine" / "model.safetensors").values())
    assert sizes["constant"] - sizes["cosine"] > 2 * weights


def test_a_run_that_stopped_early_is_over(store, tmp_path):
    recipe = recipe_of(9, "schedule.name=constant", "optimizer.lr=0", "schedule.patience=1")
    train(store, recipe, tmp_path / "run", device="cpu")
    assert "model" not in torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)["state"]
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    longer = replace(recipe, schedule=replace(recipe.schedule, epochs=12))
    said = r"cannot be made longer, because schedule\.patience=1 stopped it after epoch 2; .* --init-from .*run"
    with pytest.raises(RunError, match=said):
        train(store, longer, tmp_path / "run", device="cpu", resume=True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before
    assert train(store, recipe, tmp_path / "run", device="cpu", resume=True).epochs == 2


@pytest.fixture
def base(store, tmp_path):
    train(store, recipe_of(2, "adapter.grid.standardize=true"), tmp_path / "base", device="cpu")
    return tmp_path / "base"


def test_a_run_begins_with_the_weights_of_another(store, tmp_path, base):
    """At a learning rate of zero they stay what they were, also after a stop and with another seed."""
    still = ["adapter.grid.standardize=true", "optimizer.lr=0", "schedule.name=constant"]
    train(store, recipe_of(1, *still), tmp_path / "run", device="cpu", seed=5, init_from=base)
    assert same(load_file(tmp_path / "run" / "model.safetensors"), load_file(base / "model.safetensors"))
    told = json.loads((tmp_path / "run" / "run.json").read_text())["init_from"]
    assert told == str(base)
    for name in (None, base):  # with its own state it needs the other no longer
        epochs = 2 if name is None else 3
        how = {"device": "cpu", "seed": 5, "resume": True, "init_from": name}
        assert train(store, recipe_of(epochs, *still), tmp_path / "run", **how).trained == 1
    assert same(load_file(tmp_path / "run" / "model.safetensors"), load_file(base / "model.safetensors"))


def test_a_run_begins_with_what_the_losses_of_another_have_learned(store, tmp_path):
    """Where both have the same term with the same values; another value begins anew."""
    infonce = ["loss.infonce.weight=1", "loss.infonce.scale=5"]
    train(store, recipe_of(2, *infonce), tmp_path / "base", device="cpu")
    learned = torch.load(tmp_path / "base" / "checkpoint.pt", weights_only=True)["state"]["losses"][
        "infonce.scale"
    ].item()
    assert learned != 5
    still = ["optimizer.lr=0", "loss.infonce.weight=0.5", "loss.sigmoid.weight=1"]
    for name, settings, scale in (("same", infonce[1:], learned), ("other", ["loss.infonce.scale=7"], 7)):
        train(store, recipe_of(1, *still, *settings), tmp_path / name, device="cpu", init_from=tmp_path / "base")
        losses = torch.load(tmp_path / name / "checkpoint.pt", weights_only=True)["state"]["losses"]
        assert losses["infonce.scale"].item() == pytest.approx(scale)
    (tmp_path / "base" / "checkpoint.pt").unlink()  # as of a run that was handed on without it
    told = {"device": "cpu", "init_from": tmp_path / "base"}
    train(store, recipe_of(1, *still, *infonce[1:]), tmp_path / "without", **told)
    losses = torch.load(tmp_path / "without" / "checkpoint.pt", weights_only=True)["state"]["losses"]
    assert losses["infonce.scale"].item() == 5


def test_before_its_first_state_a_run_takes_the_weights_again(store, tmp_path, base, monkeypatch):
    recipe = recipe_of(1, "adapter.grid.standardize=true")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("xret.heads.training.trainer.Trainer.train", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        train(store, recipe, tmp_path / "run", device="cpu", init_from=base)
    train(store, recipe, tmp_path / "whole", device="cpu", init_from=base)
    train(store, recipe, tmp_path / "run", device="cpu", resume=True)
    assert same(load_file(tmp_path / "run" / "model.safetensors"), load_file(tmp_path / "whole" / "model.safetensors"))


def test_weights_that_do_not_fit_wholly_are_refused(store, tmp_path, base):
    words = [word for setting in (*SMALL, "schedule.epochs=1") for word in ("--set", setting)]
    words = ["train-head", store, "--recipe", "vsepp", "--out", tmp_path / "run", *words, "--init-from", base]
    said = refused(*words, "--set", "model.dim=6")
    assert said.startswith(f"the weights of {base} do not fit: ")
    assert "is [8, " in said and " there and [6, " in said
    said = refused(*words)  # without the statistics that the other run standardises by
    assert " there and absent now" in said
    assert not (tmp_path / "run").exists()
    assert "has no run.json" in refused(*words[:-1], tmp_path / "nothing")


def test_words_of_another_vocabulary_are_refused(tmp_path, base):
    other = make_store(tmp_path / "other.zarr", train=12, val=4, test=4, words="unheard")
    with pytest.raises(RunError, match=r"base knows other words than the captions of .*other\.zarr; --init-from takes"):
        train(other, recipe_of(1, "adapter.grid.standardize=true"), tmp_path / "run", device="cpu", init_from=base)


def test_other_features_are_named_and_another_beginning_is_refused(store, tmp_path, base, caplog):
    other = make_store(tmp_path / "other.zarr", train=12, val=4, test=4, weights="b")
    recipe = recipe_of(1, "adapter.grid.standardize=true")
    train(other, recipe, tmp_path / "run", device="cpu", init_from=base)
    assert f"--init-from: {base} has learnt from other features (grid@" in caplog.text
    train(store, recipe, tmp_path / "plain", device="cpu", seed=3)
    with pytest.raises(RunError, match=r"run was begun with --init-from .*base; resume it so"):
        train(other, recipe, tmp_path / "run", device="cpu", resume=True, init_from=tmp_path / "plain")
    with pytest.raises(RunError, match=r"plain was begun without --init-from; resume it so"):
        train(store, recipe, tmp_path / "plain", device="cpu", resume=True, init_from=base)
