"""What is recorded for TensorBoard and W&B, and what is said where they are not installed."""

import sys
from contextlib import contextmanager
from types import ModuleType

import pytest
import torch
from small_store import make_store

from xret.heads.recipes.recipe import load_recipe
from xret.heads.runs.run import Run
from xret.heads.training.log import require_log
from xret.heads.training.train import train
from xret.pipeline.errors import RunError

TABLE = {f"{name}{side}" for name in ("r1", "r5", "r10", "medr") for side in ("", "i")} | {"rsum", "epoch"}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("store") / "small.zarr", train=16, val=4)


def recipe_of(*settings):
    small = ["model.dim=8", "data.batch_size=8", "adapter.words.word_dim=8", "data.unit=image", "schedule.epochs=2"]
    return load_recipe("vsepp", [*small, *settings])


@pytest.mark.parametrize("kind", ["tensorboard", "wandb"])
def test_what_is_not_installed_is_said_before_anything_is_made(store, tmp_path, kind, monkeypatch):
    monkeypatch.setattr("xret.heads.training.log.find_spec", lambda name: None)
    with pytest.raises(RunError, match=f"^runtime.log={kind} needs the package {kind}: `pip install {kind}`, or take"):
        train(store, recipe_of(f"runtime.log={kind}"), tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()
    require_log("none")


def check(recorded, run):
    """Compare ``{tag: {step: value}}`` with the run's own metrics."""
    lines = Run(run).metrics()
    assert set(recorded) == {"Le", "Le/triplet", "lr", *TABLE}
    assert list(recorded["Le"]) == list(range(1, lines[-1]["step"] + 1))
    for line in lines:
        values = recorded["Le"]
        first = line["step"] - 2
        mean = sum(values[step] for step in (first + 1, first + 2)) / 2
        assert mean == pytest.approx(line["loss"], rel=1e-5)
        assert recorded["rsum"][line["step"]] == pytest.approx(line["rsum"], rel=1e-5)
        assert recorded["lr"][line["step"]] == pytest.approx(line["lr"], rel=1e-5)
        total = sum(recorded[f"r{k}{side}"][line["step"]] for k in (1, 5, 10) for side in ("", "i"))
        assert total == pytest.approx(line["rsum"], rel=1e-5)


def test_tensorboard(store, tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(store, recipe_of("runtime.log=tensorboard"), tmp_path / "run", device="cpu")
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    tags = events.Tags()["scalars"]
    check({tag: {event.step: event.value for event in events.Scalars(tag)} for tag in tags}, tmp_path / "run")


def test_wandb(store, tmp_path, monkeypatch):
    """Against a stand-in for the package, which needs an account."""
    recorded, begun = {}, {}

    class Session:
        def log(self, values, step):
            for tag, value in values.items():
                recorded.setdefault(tag, {})[step] = value

    @contextmanager
    def init(**options):
        begun.update(options)
        yield Session()

    module = ModuleType("wandb")
    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setattr("xret.heads.training.log.find_spec", lambda name: name)
    recipe = recipe_of("runtime.log=wandb")
    train(store, recipe, tmp_path / "run", device="cpu")
    check(recorded, tmp_path / "run")
    assert (begun["project"], begun["name"], begun["dir"]) == ("xret", "run", tmp_path / "run")
    assert begun["config"] == recipe.to_dict()


def test_nothing_is_imported_unless_asked_for(store, tmp_path):
    before = set(sys.modules)
    train(store, recipe_of(), tmp_path / "run", device="cpu")
    assert not {name.partition(".")[0] for name in set(sys.modules) - before} & {"tensorboard", "wandb"}
    assert torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)["state"]["epoch"] == 2
