"""Steps as CUDA graphs have the bits of steps that are launched operation by operation."""

from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import islice
from types import SimpleNamespace

import pytest
import torch
from bundled_recipes import small_settings, text_kind
from small_store import make_store
from small_trainings import assert_equal, learner, numbers
from small_trainings import recipe_of as small_recipe

from xret.heads.recipes.names import recipe_names
from xret.heads.recipes.recipe import load_recipe
from xret.heads.training.gradients import Gradients
from xret.heads.training.objective import Objective
from xret.heads.training.optimisation import build_optimizer
from xret.heads.training.train import train
from xret.pipeline.device import deterministic, drawing
from xret.pipeline.store import FeatureCache

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
CUDA = torch.device("cuda")


def trained(recipe, cache, steps):
    """Take some steps on a GPU; return each one's loss with its terms and gradients, the weights, and the graphs."""
    model, losses, split = learner(cache, recipe, CUDA)
    optimizer = build_optimizer(model.train(), losses, recipe.optimizer)
    gradients = Gradients(
        Objective(recipe, model, losses, split), optimizer, torch.amp.GradScaler("cuda", enabled=False)
    )
    data, found = recipe.data, []
    order = {"unit": data.unit, "batch_size": data.batch_size, "captions": data.captions}
    epochs = (batch for epoch in range(steps) for batch in split.epoch(**order, seed=0, epoch=epoch))
    for number, batch in enumerate(islice(epochs, steps)):
        with drawing(CUDA, 1, number), deterministic(CUDA):
            values = gradients(batch, number / 6)().clone()
            found.append([values, *(p.grad.clone() for p in gradients.weights if p.grad is not None)])
            optimizer.step()
    return found, {**model.state_dict(), **losses.state_dict()}, gradients


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("name", recipe_names())
def test_a_graph_gives_the_bits_of_its_operations(name, stores):
    recipe = load_recipe(name, small_settings(name))
    cache = FeatureCache.open(stores(recipe.data.image_kind or "grid", text_kind(recipe)))
    launched, recorded = (
        trained(replace(recipe, runtime=replace(recipe.runtime, capture=capture)), cache, 12)
        for capture in ("off", "auto")
    )
    assert not launched[2].graphs
    assert recorded[2].refused or recorded[2].graphs, "no shape came twice"
    assert (recorded[2].refused is None) == (recipe.data.chunk is None and "vsrn" not in name)
    for number, both in enumerate(zip(launched[0], recorded[0], strict=True)):
        assert_equal(*both, f"step {number}")
    assert_equal(launched[1], recorded[1])


@pytest.mark.gpu
@GPU
def test_a_training_with_graphs_goes_on_where_it_stopped(tmp_path):
    url = make_store(tmp_path / "small.zarr")
    for name, settings in {"auto": [], "off": ["runtime.capture=off"]}.items():
        train(url, small_recipe("vsepp", 4, *settings), tmp_path / name, device="cuda", seed=3)
    train(url, small_recipe("vsepp", 2), tmp_path / "parts", device="cuda", seed=3)
    train(url, small_recipe("vsepp", 4), tmp_path / "parts", device="cuda", seed=3, resume=True)
    for other in ("off", "parts"):
        assert_equal(numbers(tmp_path / "auto"), numbers(tmp_path / other))


def gradients_on_cpu(stores, name, *settings, **changes):
    """Return what computes the gradients of a recipe on a CPU, and a batch."""
    recipe = replace(load_recipe(name, [*small_settings(name), *settings]), **changes)
    model, losses, split = learner(FeatureCache.open(stores(recipe.data.image_kind or "grid")), recipe)
    optimizer, scaler = build_optimizer(model, losses, recipe.optimizer), torch.amp.GradScaler("cpu", enabled=False)
    batch = next(split.epoch(unit=recipe.data.unit, batch_size=recipe.data.batch_size, seed=0, epoch=0))
    return Gradients(Objective(recipe, model, losses), optimizer, scaler), batch


@pytest.fixture
def recorder(monkeypatch):
    """Record steps on a CPU; what is returned has the arguments of the last recording."""
    used = {}

    @contextmanager
    def recording(graph, **how):
        used.update(how)
        yield

    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr("xret.heads.training.gradients.start_reading", lambda values: lambda: values)
    monkeypatch.setattr("xret.heads.training.gradients._side", lambda device: f"a stream of {device}")
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    graph = SimpleNamespace(replay=lambda: None, pool=lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(torch.cuda, "graph", recording)
    return used


def test_steps_are_recorded_on_the_gpu_of_their_weights(stores, recorder):
    """Else a graph on ``cuda:1`` would hold nothing, and leave the gradients of one batch at every step."""
    gradients, batch = gradients_on_cpu(stores, "vsepp")
    for _ in range(2):
        gradients(batch, 0.0)
    assert len(gradients.graphs) == 1
    assert recorder.get("stream") == f"a stream of {gradients.weights[0].device}"


def test_weights_that_learn_later_have_gradients_in_later_graphs(stores, recorder):
    gradients, batch = gradients_on_cpu(stores, "vsepp")
    group = gradients.optimizer.param_groups[0]
    group["frozen"] = 1
    for now, learns in ((0.0, False), (0.5, False), (1.0, True), (1.5, True), (2.0, True)):
        gradients(batch, now)
        assert all((weight.grad is not None) is learns for weight in group["params"])
    assert len(gradients.graphs) == 2


def test_what_no_graph_can_hold_is_named(stores):
    def refused(*recipe, **changes):
        return gradients_on_cpu(stores, *recipe, **changes)[0].refused

    assert refused("vsepp") is None
    assert "runtime.capture" in refused("vsepp", "runtime.capture=off")
    assert "data.chunk" in refused("vsepp", "data.chunk=4")
    assert "loss.caption-generation" in refused("vsrn")
    assert "mine" in refused("vsepp", code={"mine": "0" * 64})
