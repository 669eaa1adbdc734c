"""The reference that benchmarks measure against computes what ours does, by other means: each checks the other."""

import pytest
import torch
from benchmarks.training_reference import REFERENCES, make_reference

from xret.heads.model import FeatureFacts, build_model
from xret.heads.modules.similarity import SIMILARITIES
from xret.heads.recipes.recipe import load_recipe
from xret.pipeline.reading.features import Features


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", REFERENCES)
def test_values_and_gradients_are_ours(name, size):
    draw = torch.Generator().manual_seed(size)
    images, captions = (
        torch.randn(count, size, 6, generator=draw, dtype=torch.float64, requires_grad=True) for count in (3, 5)
    )
    weight = torch.randn(3, 5, generator=draw, dtype=torch.float64)
    both = []
    for similarity in (SIMILARITIES[name](), REFERENCES[name](size)):
        values = similarity(images, captions)
        both.append((values, *torch.autograd.grad(values, (images, captions), weight)))
    for ours, theirs in zip(*both, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("positions", ["none", "circle"])
@pytest.mark.parametrize("name", ["setdiv", "setdiv/f30k-butd-bigru", "maxmatch/f30k-butd-bigru"])
def test_a_model_with_the_parts_of_the_reference_computes_what_ours_does_in_training(name, positions):
    changes = ["model.dim=8", *(f"aggregator.{side}.positions={positions}" for side in ("image", "text"))]
    recipe = load_recipe(name, [*changes, *(["similarity.alpha=8"] if name == "setdiv" else [])])
    facts = (FeatureFacts("roi", 6, 6),), (FeatureFacts("words", None, None, 20),)
    draw = torch.Generator().manual_seed(0)
    regions = Features(torch.tensor([3, 5, 2]), local=torch.randn(3, 5, 6, generator=draw))
    words = Features(torch.tensor([4, 1, 2, 3]), token=torch.randint(1, 20, (4, 4), generator=draw))
    found = []
    for replaced in (False, True):
        torch.manual_seed(0)
        model = build_model(recipe, *facts).double().train()
        if replaced:
            make_reference(model, recipe)
        torch.manual_seed(1)  # of what dropout draws
        similarity = model.similarity(model.embed_images(regions).embedding, model.embed_captions(words).embedding)
        weights = {key.replace(".ours", ""): value for key, value in model.named_parameters() if value.requires_grad}
        gradients = torch.autograd.grad(similarity.sum(), [*weights.values()], allow_unused=True)
        found.append({"": similarity} | dict(zip(weights, gradients, strict=True)))
    assert found[0].keys() == found[1].keys()
    for key, ours in found[0].items():
        torch.testing.assert_close(found[1][key], ours, rtol=1e-9, atol=1e-12, msg=key)


def test_a_model_of_which_the_reference_lacks_a_part_is_refused():
    recipe = load_recipe("vsepp")
    with pytest.raises(ValueError, match="the reference has no cosine: smooth-chamfer, assignment"):
        make_reference(
            build_model(recipe, (FeatureFacts("roi", 6, 6),), (FeatureFacts("words", None, None, 20),)), recipe
        )
