"""Heads that differ in numbers alone, trained together: each is what its own training would have made of it."""

import time
from functools import partial

import pytest
import torch
from bundled_recipes import ALL, small_settings
from small_ablations import Stores
from torch.utils._python_dispatch import TorchDispatchMode

from xret.heads.recipes.recipe import load_recipe
from xret.heads.runs.run import Run
from xret.heads.training.callbacks import Callback
from xret.heads.training.gradients import Gradients
from xret.heads.training.stacked import Stack
from xret.heads.training.stacking import refusal, structure
from xret.heads.training.train import train
from xret.pipeline.errors import NotFinite

WORDS = {"linear", "lit", "mlp", "sail"}  # stacked where captions are words, which the others read by a GRU
TOKENS = {"cca", "fusemix", "linear", "lit", "mlp", "pvse", "sail", "scan", "setdiv", "vsepp"}
ASSIGNED = "maxmatch"  # whose matching shows only as it is stacked
NUMBERS = [{"optimizer.lr": 0.003, "optimizer.clip": 0.5}, {"optimizer.weight_decay": 0.1}]  # of each cell


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    return Stores(tmp_path_factory, train=24)


def cells(name, epochs, *own, **settings):
    """The recipes of cells with these settings of their own."""
    small = [one for one in small_settings(name) if not one.startswith("schedule")]
    common = {**dict(one.split("=") for one in small), "schedule.epochs": epochs, **settings}
    return [load_recipe(name, common | numbers) for numbers in own]


def trained(store, recipes, out, seeds=(0,), together=True, **options):
    """Train each recipe with each seed; return the runs, or the errors."""
    options = {"device": "cpu", "title": None, **options}
    jobs = [(recipe, seed, out / f"{number}-{seed}") for number, recipe in enumerate(recipes) for seed in seeds]
    if not together:
        return [Run(train(store, recipe, run, seed=seed, **options).run) for recipe, seed, run in jobs]

    def of(recipe, seed, run, stack):
        return train(store, recipe, run, seed=seed, stack=stack, **options)

    ended = Stack().run([partial(of, *job) for job in jobs])
    return [Run(job[2]) if one.exception() is None else one.exception() for job, one in zip(jobs, ended, strict=True)]


def assert_same(first, second):
    """The losses of every epoch, the best one, and what it reaches."""
    for one, other in zip(first, second, strict=True):
        for key in ("loss", "rsum", "lr"):
            found = [[line[key] for line in run.metrics()] for run in (one, other)]
            assert found[0] == pytest.approx(found[1], rel=1e-5, abs=1e-5), (key, one.path)
        assert one.info.best_epoch == other.info.best_epoch


QUICK = {("words", "linear"), ("tokens", "mlp"), ("tokens", "vsepp")}
EVERY = [("words", name) for name in sorted(WORDS)] + [("tokens", name) for name in ALL]


@pytest.mark.parametrize(
    ("text", "name"), [pytest.param(*one, marks=() if one in QUICK else pytest.mark.slow) for one in EVERY]
)
def test_each_cell_is_what_its_own_training_makes_of_it(name, text, stores, tmp_path, caplog):
    if text == "tokens" and name.endswith("vsrn"):
        pytest.skip("it writes words")
    store, recipes = stores("grid", text), cells(name, 5, *NUMBERS)
    stacked = name in (WORDS if text == "words" else TOKENS)
    assert (refusal(recipes[0], store) is None) == (stacked or name == ASSIGNED)
    if refusal(recipes[0], store):
        return
    assert len({structure(recipe) for recipe in recipes}) == 1
    caplog.set_level("INFO", "xret")
    together = trained(store, recipes, tmp_path / "together", seeds=(0, 3))
    assert ("at once" in caplog.text) == stacked
    assert_same(
        together,
        trained(store, recipes, tmp_path / "alone", seeds=(0, 3), together=False),
    )


def test_embeddings_that_see_the_batch_are_stacked_where_none_are_drawn(stores, tmp_path, caplog):
    store = stores("grid", "tokens")
    plain = {key: 0.0 for side in ("image", "text") for key in (f"augment.{side}", f"aggregator.{side}.dropout")}
    hardest = {f"loss.{term}.negatives": "hardest" for term in ("triplet", "embedding-graph")}
    own = [{"loss.embedding-graph.scale": 1.5}, {"loss.embedding-graph.divergence": 3.0}]
    recipes = cells("hrem", 6, *own, **plain, **hardest)
    drawn, later = {**hardest, "loss.triplet.negatives": "distance-weighted"}, {"loss.embedding-graph.warmup_epochs": 1}
    for settings, why in ((drawn, "negatives that are drawn"), (hardest | later, "a loss that begins later")):
        assert refusal(*cells("hrem", 6, settings, **plain), store) == f"{why} cannot be"
    with caplog.at_level("INFO", "xret"):
        together = trained(store, recipes, tmp_path / "together")
    assert "one by one" not in caplog.text
    assert_same(together, trained(store, recipes, tmp_path / "alone", together=False))


@pytest.mark.parametrize("name", ["linear", "mlp", "setdiv"])
def test_24_cells_are_launched_by_few_more_operations_than_one(name, stores, tmp_path, monkeypatch):
    """But for the optimisers'; each seed prepares a batch of its own on the host."""
    store, rates, counts = stores("grid", "tokens"), ({"optimizer.lr": 0.001 * (1 + i)} for i in range(24)), []
    recipes = cells(name, 1, *rates)
    original = Gradients.__call__

    def counted(self, *arguments):
        with Operations() as mode:
            found = original(self, *arguments)
        counts.append(mode.count)
        return found

    monkeypatch.setattr(Gradients, "__call__", counted)
    trained(store, recipes[:1], tmp_path / "one", together=False)
    alone = counts[-1]
    counts.clear()
    trained(store, recipes, tmp_path / "many")
    assert counts[-1] <= 1.5 * alone
    counts.clear()
    trained(store, recipes[:8], tmp_path / "seeds", seeds=(0, 1, 2))
    assert counts[-1] <= 1.6 * alone


class Operations(TorchDispatchMode):
    """Counts operations that are no views."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not func.is_view and func is not torch.ops.aten._unsafe_view.default
        return func(*args, **(kwargs or {}))


def test_each_cell_ends_by_itself(stores, tmp_path):
    """One has fewer epochs, one loses patience, one ends by an error, and one by what a hook raises."""

    class Hook(Callback):
        def on_epoch(self, epoch, step, values):
            if epoch == 2:
                raise ValueError("enough")

    store = stores("grid", "tokens")
    own = [{"schedule.epochs": 2}, {"schedule.patience": 1, "optimizer.lr": 1.0}, {"loss.infonce.scale": 1e38}, {}]
    recipes = cells("mlp", 5, *own, **{"loss.infonce.logarithm": False})
    short, impatient, broken, whole = trained(store, recipes, tmp_path / "together")
    assert_same([short, whole], trained(store, [recipes[0], recipes[3]], tmp_path / "alone", together=False))
    assert [line["epoch"] for line in impatient.metrics()] == [*range(1, impatient.info.best_epoch + 2)]
    assert isinstance(broken, NotFinite)
    stopped, other = trained(store, recipes[2:], tmp_path / "hook", callbacks=[Hook()])
    assert isinstance(stopped, NotFinite) and str(other) == "enough"
    (resumed,) = trained(store, recipes[3:], tmp_path / "resumed")
    assert_same([resumed], [whole])


def test_an_interruption_ends_all_and_each_goes_on(stores, tmp_path):
    store, recipes = stores("grid", "words"), cells("linear", 4, *NUMBERS)

    class Stop(Callback):
        def on_epoch(self, epoch, step, values):
            if epoch == 2:
                raise KeyboardInterrupt

    def stopped(stack):
        return train(store, recipes[0], tmp_path / "out/0-0", device="cpu", title=None, callbacks=[Stop()], stack=stack)

    def other(stack):
        return train(store, recipes[1], tmp_path / "out/1-0", device="cpu", title=None, stack=stack)

    with pytest.raises(KeyboardInterrupt):
        Stack().run([stopped, other])
    assert max(len(Run(tmp_path / f"out/{number}-0").metrics()) for number in (0, 1)) < 4
    resumed = trained(store, recipes, tmp_path / "out", resume=True)
    assert_same(resumed, trained(store, recipes, tmp_path / "alone", together=False))


def test_what_an_operation_refuses_is_trained_one_by_one(stores, tmp_path, caplog):
    caplog.set_level("INFO", "xret")
    store, recipes = stores("grid", "tokens"), cells(ASSIGNED, 2, *NUMBERS)
    began = time.perf_counter()
    together = trained(store, recipes, tmp_path / "together")
    spent = time.perf_counter() - began
    assert "trained one by one" in caplog.text
    assert sum(line["seconds"] for run in together for line in run.metrics()) <= spent  # none counts another's
    for one, other in zip(together, trained(store, recipes, tmp_path / "alone", together=False), strict=True):
        assert one.weights.read_bytes() == other.weights.read_bytes()


@pytest.mark.parametrize(
    ("key", "same"),
    [
        ("optimizer.lr=0.5", True),
        ("schedule.epochs=7", True),
        ("adapter.roi.dropout=0.2", True),
        ("model.dim=32", False),
        ("adapter.roi.dropout=0", False),
        ("data.share=0.5", False),
        ("augment.image=0.1", False),
    ],
)
def test_numbers_may_differ_and_shapes_may_not(key, same):
    assert (structure(load_recipe("mlp", [key])) == structure(load_recipe("mlp"))) == same
