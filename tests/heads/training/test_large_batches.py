"""A batch embedded in parts and compared in blocks has the gradients of the whole."""

import contextlib
from dataclasses import replace

import pytest
import torch
from bundled_recipes import small_settings
from small_store import make_store
from small_trainings import learner

from xret.heads.modules.aggregators import AGGREGATORS
from xret.heads.modules.aggregators.relations import RegionGraphLayer
from xret.heads.modules.losses import LOSSES
from xret.heads.recipes.names import recipe_names
from xret.heads.recipes.recipe import load_recipe
from xret.heads.training.objective import Objective, embed_in_parts, goes_in_blocks
from xret.pipeline.errors import RecipeError
from xret.pipeline.store import FeatureCache

SYSTEMS = [name for name in recipe_names() if "/" not in name and name != "cca"]  # which takes no step


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("store") / "small.zarr", train=8, val=4, test=4)


def recipe_of(name, *settings):
    blends = ["augment.mix=0"] if name == "fusemix" else []  # words cannot be blended
    return load_recipe(name, [*small_settings(name), "data.batch_size=100", *blends, *settings])


class Trial:
    """A head with its losses before one batch of the whole split."""

    def __init__(self, store, recipe, dtype=torch.float64):
        self.recipe, self.text_number = recipe, None
        self.model, self.losses, split = learner(FeatureCache.open(store), recipe)
        for module in self.model.modules():
            if isinstance(module, RegionGraphLayer):
                module.norm = torch.nn.Identity()
        for parameter in [*self.model.parameters(), *self.losses.parameters()]:
            parameter.data += 0.1 * torch.randn_like(parameter)  # none at zero, where a gradient may vanish
        self.model.to(dtype)
        self.losses.to(dtype)
        (self.batch,) = split.epoch(unit=recipe.data.unit, batch_size=100, seed=0, epoch=0)

    def gradients(self, chunk, precision=None, seed=1):
        """The loss with its terms, and the gradient of every weight."""
        self.model.zero_grad()
        self.losses.zero_grad()
        recipe = replace(self.recipe, data=replace(self.recipe.data, chunk=chunk))
        torch.manual_seed(seed)
        objective = Objective(recipe, self.model, self.losses)
        objective.text_number, objective.precision = self.text_number, precision
        values = objective(self.batch, 0.5)
        values[0].backward()
        named = [*self.model.named_parameters(), *self.losses.named_parameters()]
        found = {name: parameter.grad.clone() for name, parameter in named if parameter.grad is not None}
        return values.detach(), found


def assert_close(ours, reference, tolerance=1e-9):
    torch.testing.assert_close(ours[0], reference[0], rtol=tolerance, atol=tolerance)
    assert ours[1].keys() == reference[1].keys()
    assert len(ours[1]) > 3
    least = 3e-3 * max(gradient.abs().max().item() for gradient in reference[1].values())  # some vanish by symmetry
    for name, gradient in reference[1].items():
        allowed = tolerance * max(gradient.abs().max().item(), least)
        torch.testing.assert_close(ours[1][name], gradient, rtol=0, atol=allowed, msg=name)


@pytest.fixture
def no_dice(monkeypatch):
    """Let nothing be drawn: numbers drawn for a batch are others than those drawn part by part."""
    monkeypatch.setattr("xret.heads.modules.dropout.dropout", lambda x, *_, **__: x)
    monkeypatch.setattr("torch.randn_like", torch.ones_like)
    monkeypatch.setattr("torch.randn", lambda *size, **options: torch.ones(*size, **options))


@pytest.mark.parametrize("name", SYSTEMS)
def test_gradients_are_those_of_the_whole_batch(store, name, no_dice):
    trial = Trial(store, recipe_of(name))
    whole = trial.gradients(None)
    for chunk in (3, 7):  # of 8 images, or 20 captions
        assert_close(trial.gradients(chunk), whole)


BUNDLED = [load_recipe(name, ["model.dim=8"]) for name in SYSTEMS]
USED = {part["name"] for recipe in BUNDLED for part in recipe.aggregator.values()}
USED |= {term for recipe in BUNDLED for term in recipe.terms}
OTHERS = [f"aggregator.image={name}" for name in AGGREGATORS if name not in USED]
OTHERS += [f"loss.{name}.weight=1" for name in LOSSES if name not in USED]


def fitting(setting):
    """Return the first recipe that takes a part."""
    for name in ("vsepp", "setdiv", "pcme", "pcmepp", "scan"):
        with contextlib.suppress(RecipeError):
            return recipe_of(name, "adapter.words.word_dim=16", setting)
    raise AssertionError(f"no recipe takes {setting}")


@pytest.mark.parametrize("setting", OTHERS)
def test_parts_of_no_recipe_too(store, setting, no_dice):
    trial = Trial(store, fitting(setting))
    assert_close(trial.gradients(3), trial.gradients(None))


def test_both_passes_draw_the_same_numbers(store):
    """Against the parts with their graphs kept, drawn once."""
    settings = ["augment.image=0.3", "augment.text=0.3"]
    trial = Trial(store, recipe_of("pcme", *settings))  # dropout, and samples of Gaussians
    once = trial.gradients(3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("xret.heads.training.objective.checkpoint", lambda embed, values, **_: embed(values))
        kept = trial.gradients(3)
        other = trial.gradients(3, seed=2)
    assert_close(once, kept)
    with pytest.raises(AssertionError):
        assert_close(other, kept)  # they are drawn indeed


def test_in_bfloat16_it_is_as_close_as_rounding_allows(store):
    trial = Trial(store, recipe_of("setdiv"), torch.float32)
    assert_close(trial.gradients(3, torch.bfloat16), trial.gradients(None, torch.bfloat16), 0.03)


def test_nothing_but_a_part_is_kept(store):
    """What is kept for going back does not grow with the batch, embeddings apart."""
    trial, kept = Trial(store, recipe_of("setdiv")), {}
    for chunk in (None, 2):
        held = []
        features = trial.batch.captions
        parts = 1 if chunk is None else len(features.length) // chunk
        with torch.autograd.graph.saved_tensors_hooks(lambda t, held=held: held.append(t.numel()) or t, lambda t: t):
            embed_in_parts(trial.model.embed_captions, features, parts)
        kept[chunk] = sum(held)
    assert kept[2] < kept[None] / 10


@pytest.mark.parametrize("name", ["linear", "sail"])
@pytest.mark.parametrize("same", ["negative", "excluded", "positive"])
@pytest.mark.parametrize("unit", ["image", "caption"])
def test_pairs_are_compared_in_blocks(store, name, same, unit, no_dice, monkeypatch):
    settings = [f"loss.same_text={same}", f"data.unit={unit}", "data.captions=null"]
    settings += ["loss.infonce.weight=1"]
    trial = Trial(store, recipe_of(name, *settings))
    trial.text_number = (torch.arange(20) % 7).__getitem__
    whole = trial.gradients(None)
    monkeypatch.setattr("xret.heads.modules.losses.blocks.SIDE", 3)
    monkeypatch.setattr("xret.heads.model.Model.similarity", None)  # nobody asks for the matrix
    monkeypatch.setattr("xret.pipeline.reading.batches.Batch.positives", None)
    assert_close(trial.gradients(3), whole)


def test_other_losses_and_similarities_keep_the_matrix(store, no_dice):
    sets = [f"loss.{term}.weight=0" for term in ("triplet", "mmd", "diversity")]
    for name, settings in (("linear", ["loss.triplet.weight=1"]), ("setdiv", [*sets, "loss.infonce.weight=1"])):
        trial = Trial(store, recipe_of(name, *settings))
        assert not goes_in_blocks(trial.model.compare, trial.losses)
        assert_close(trial.gradients(3), trial.gradients(None))
