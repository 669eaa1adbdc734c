"""The model that a recipe makes."""

import pytest
import torch

from xret.heads.model import FeatureFacts, build_model
from xret.heads.recipes.recipe import load_recipe
from xret.heads.training.optimisation import components_of
from xret.pipeline.errors import RecipeError
from xret.pipeline.reading.batches import Features

GRID, WORDS, TOKENS = (
    (FeatureFacts("grid", 5, 5),),
    (FeatureFacts("words", None, None, 9),),
    (FeatureFacts("tokens", 6, 6),),
)
POOLED = ["similarity=cosine", "loss.diversity.weight=0", "aggregator.image=average"]


def model_of(name, *settings, image=GRID, text=WORDS):
    torch.manual_seed(0)
    sets = [f"aggregator.{side}.head_dim=8" for side in ("image", "text") if name == "setdiv" and not settings]
    return build_model(load_recipe(name, ["model.dim=8", "adapter.words.word_dim=6", *sets, *settings]), image, text)


def test_only_what_is_needed_is_read():
    vsepp = model_of("vsepp")
    assert (vsepp.image_fields, vsepp.caption_fields) == ({"global"}, {"token"})
    setdiv = model_of("setdiv", text=TOKENS)
    assert (setdiv.image_fields, setdiv.caption_fields) == ({"local"}, {"local"})


def test_a_part_that_does_not_fit_the_features_is_named():
    with pytest.raises(RecipeError, match=r"aggregator\.text: .*keeps the width"):
        model_of("setdiv", *POOLED, "aggregator.text=average")


def test_rows_that_a_loss_compares_are_of_one_width():
    first, words = ["aggregator.text=seq2seq", "model.dim=16"], ["adapter.words.local=embedding"]
    with pytest.raises(RecipeError, match=r"which are 16 \(image\) and 6 \(text\) wide: .*adapter.words.local=gru"):
        model_of("hrem", *first, *words)
    assert model_of("hrem", *first)
    with pytest.raises(RecipeError, match=r"another width than model\.dim, which loss\.embedding-graph needs; or set"):
        model_of("hrem", "model.residual=cca", text=TOKENS)


def test_a_kind_without_an_adapter():
    with pytest.raises(RecipeError, match="no adapter for image features of kind 'sound': grid"):
        model_of("vsepp", image=(FeatureFacts("sound", 5, 5),))


@pytest.mark.parametrize(("of", "image"), [("global", "grid"), ("average", "roi"), ("max", "roi")])
def test_a_variance_has_a_projection_of_the_cached_feature_of_its_own(of, image):
    settings = [f"aggregator.image.of={of}", "adapter.roi.layers=linear"]
    model = build_model(load_recipe("gaussian-vsepp", settings), (FeatureFacts(image, 2048, 2048),), WORDS)
    assert sum(p.numel() for p in model.image.parameters()) == 2 * 2_098_176  # eq. 1: 2048 to 1024, with biases
    made = model.embed_images(Features(torch.tensor([4]), torch.rand(1, 4, 2048), torch.rand(1, 2048)))
    made.embedding.log_variance.sum().backward()
    assert all(p.grad is None for p in model.image.adapter.parameters())
    assert all(p.grad.abs().sum() > 0 for p in model.image.twin.parameters())
    # Both learn at the adapter's rate.
    image_adapter = components_of(model, torch.nn.ModuleDict())["image_adapter"]
    assert {id(p) for p in image_adapter.parameters()} == {id(p) for p in model.image.parameters()}
