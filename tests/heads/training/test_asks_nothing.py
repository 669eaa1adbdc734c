"""A training step asks nothing of its device: its host may launch all of it without waiting for a value."""

import copy
import sys
from contextlib import nullcontext
from itertools import islice

import pytest
import torch
from asked_device import META, Asked, one_dropout, one_operation
from bundled_recipes import ALL, KINDS, small_settings, text_kind
from small_extraction import OPTIONS
from small_trainings import learner
from torch import nn
from torch.utils._pytree import tree_map_only

from xret.heads.model import build_losses, build_model, feature_facts
from xret.heads.modules.embedding import tensors_of
from xret.heads.recipes.recipe import load_recipe
from xret.heads.runs.features import batches_of
from xret.heads.training.finetuning.end_to_end import end_to_end_batches
from xret.heads.training.finetuning.reattached import EndToEndModel, EndToEndObjective
from xret.heads.training.gradients import Gradients
from xret.heads.training.objective import Objective
from xret.heads.training.optimisation import average_of, build_optimizer, drop_frozen, weights_of
from xret.pipeline.data.manifest import load_manifest
from xret.pipeline.encoders.origin import Origin
from xret.pipeline.extraction.extraction import extract
from xret.pipeline.extraction.options import build_options
from xret.pipeline.reading.pictures import find_pictures
from xret.pipeline.store import FeatureCache

MOST = {"linear": 110, "mlp": 140, "setdiv": 720, "setdiv-small": 740, "maxmatch": 970}  # operations a step


@pytest.fixture
def asked(monkeypatch):
    """Let `meta` stand for a GPU."""
    monkeypatch.setattr(torch._VF, "gru", one_operation)
    monkeypatch.setattr(nn.functional, "dropout", one_dropout)
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    for module, what in (("optim.optimizer", "fused"), ("utils._foreach_utils", "foreach")):
        name = f"_get_{what}_kernels_supported_devices"
        monkeypatch.setattr(sys.modules[f"torch.{module}"], name, lambda: ["meta"])
    return Asked()


@pytest.mark.parametrize("name", KINDS)
def test_a_step_of_every_recipe(name, stores, asked):
    recipe, model, losses, split = small_learner(name, stores, META)
    objective, optimizer = Objective(recipe, model, losses, split), build_optimizer(model, losses, recipe.optimizer)
    operations = operations_of_a_step(asked, objective, split, optimizer)
    print(f"{name}: {operations} operations")  # shown by pytest -s
    assert operations <= MOST.get(name, 2000)
    if Gradients(objective, optimizer, torch.amp.GradScaler("cpu", enabled=False)).refused:
        return
    # A graph can hold the step: a prepared batch is all that it needs, and lengths are values of the device.
    with asked:
        given = tree_map_only(torch.Tensor, torch.clone, objective.prepare(first_batch(recipe, split), 0.0))
        asked.copies = 0
        objective.loss(given)[0].backward()
        assert asked.copies == 0


def small_learner(name, stores, device="cpu"):
    """Return a recipe, a small model of it and its losses, and what they learn from."""
    recipe = load_recipe(name, small_settings(name))
    cache = FeatureCache.open(stores(recipe.data.image_kind or "grid", text_kind(recipe)))
    return recipe, *learner(cache, recipe, device)


def first_batch(recipe, split):
    data = recipe.data
    return next(split.epoch(unit=data.unit, batch_size=data.batch_size, captions=data.captions, seed=0, epoch=0))


@pytest.mark.parametrize("name", [*ALL, "vse-infty/f30k-butd-bert", "vse-infty/f30k-butd-bigru"])
def test_embeddings_and_gradients_are_those_of_a_cpu(name, stores, monkeypatch):
    """What a GPU computes without asking, computed by a CPU."""
    recipe, model, _, split = small_learner(name, stores)
    model.double()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(module, nn.BatchNorm1d):
            nn.init.normal_(module.weight)  # that of a region graph begins at zero
    batch, state, found = first_batch(recipe, split), copy.deepcopy(model.state_dict()), []
    for is_cpu in (True, False):
        monkeypatch.setattr(torch.Tensor, "is_cpu", is_cpu)
        model.load_state_dict(state)
        model.zero_grad()
        torch.manual_seed(0)
        images, captions = model.embed_images(batch.images), model.embed_captions(batch.captions)
        made = [*tensors_of(images.embedding).values(), *tensors_of(captions.embedding).values()]
        sum((one * torch.linspace(-1, 2, one.numel()).view_as(one)).sum() for one in made).backward()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        found.append([*made, *gradients, *(value.clone() for value in model.buffers())])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("frozen", [0, 9])
def test_a_step_with_an_image_backbone(frozen, tiny_dataset, tmp_path, request):
    """Text backbones are left out: transformers asks once a batch whether any token is padding."""
    url, manifest = str(tmp_path / "features.zarr"), load_manifest(tiny_dataset(train=8, val=0, test=0))
    extract(manifest, url, build_options(**{**OPTIONS, "visual": "mobilenet_v3_small"}))
    cache = FeatureCache.open(url)
    sets = cache.image_set(), cache.caption_set()
    encoder = Origin.of(sets[0]).load_images(None, "cpu")
    asked = request.getfixturevalue("asked")  # once all is extracted and loaded
    encoder.device = "meta"
    for name, value in vars(encoder).items():
        if isinstance(value, (torch.Tensor, nn.Module)):
            setattr(encoder, name, value.to(META))
    recipe = load_recipe("vse-infty", ["finetune.image_lr=0.1", f"finetune.image_frozen={frozen}"])
    facts = [feature_facts(one) for one in sets]
    model = EndToEndModel(build_model(recipe, *facts), {"image": encoder}, recipe).to(META).train()
    losses = build_losses(recipe, facts[1]).to(META)
    stored, pictures = batches_of(sets, model, "train", META), find_pictures(cache, manifest.images)
    split = end_to_end_batches(stored, {"image": encoder}, pictures, "sides", 0.0)
    objective = EndToEndObjective(recipe, model, losses, split)
    assert operations_of_a_step(asked, objective, split, build_optimizer(model, losses, recipe.optimizer))


def operations_of_a_step(asked, objective, split, optimizer):
    """Return how many operations of the device the second step has; the first one makes the optimiser's state."""
    recipe, model, losses = objective.recipe, objective.model, objective.losses
    data, average = recipe.data, average_of(model, recipe.optimizer)
    order = {"unit": data.unit, "batch_size": data.batch_size, "captions": data.captions}
    with asked:
        for batch in islice(split.epoch(**order, seed=0, epoch=0), 2):
            asked.operations.clear()
            optimizer.zero_grad()
            objective(batch, 0.0)[0].backward()
            drop_frozen(optimizer, 0.0)
            weights = [p for p in weights_of(model, losses) if p.grad is not None]
            if recipe.optimizer.clip is not None:
                nn.utils.clip_grad_norm_(weights, recipe.optimizer.clip)
            optimizer.step()
            if average is not None and recipe.optimizer.ema is not None:
                average.update_parameters(model)
    return asked.operations.total()
