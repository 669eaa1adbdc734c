"""A head that adds to frozen features: before it has learnt, it is what they reach untrained."""

from types import SimpleNamespace

import pytest
import torch
from scores import score
from small_store import make_store
from torch.nn.functional import normalize

from xret.heads.evaluation.evaluation import evaluate
from xret.heads.evaluation.scoring import compare, embed
from xret.heads.model import build_model, feature_facts
from xret.heads.modules.residual import ClosedForm, Frozen, Residual
from xret.heads.recipes.recipe import load_recipe
from xret.heads.runs.features import batches_of
from xret.heads.training.train import train
from xret.pipeline.errors import RecipeError
from xret.pipeline.reading.features import Features
from xret.pipeline.store import FeatureCache

CPU = torch.device("cpu")
NARROW = ["aggregator.image.head_dim=16", "aggregator.text.head_dim=16"]
SMALL = ["model.dim=24", "model.residual=frozen", "data.batch_size=16", "schedule.epochs=2", "optimizer.lr=0.01"]
KINDS = {"mlp": [], "vse-infty": [], "pvse": [], "setdiv": NARROW, "maxmatch": NARROW}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("residual") / "joint.zarr", text="tokens", space="of one model")


@pytest.mark.parametrize("name", KINDS)
def test_at_step_0_it_ranks_as_the_frozen_encoders_do(store, name):
    cache = FeatureCache.open(store)
    sets = cache.image_set(), cache.caption_set()
    recipe = load_recipe(name, [*SMALL, *KINDS[name]])
    model = build_model(recipe, *map(feature_facts, sets))
    batches = batches_of(sets, model, "test", CPU)
    made = compare(model, *embed(model, batches), batches.texts())
    frozen = score(store).similarity
    order = frozen.flatten().argsort()
    assert (made.flatten()[order].diff() >= -1e-5).all()
    if recipe.similarity["name"] == "cosine":
        torch.testing.assert_close(made, frozen, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", KINDS)
def test_it_trains_and_is_read_again(store, name, tmp_path):
    found = train(store, load_recipe(name, [*SMALL, *KINDS[name]]), tmp_path / "run", device="cpu")
    assert found.untrained_rsum is not None
    assert found.best_rsum > found.untrained_rsum
    assert evaluate(tmp_path / "run", split="val", device="cpu").results[0].rsum == pytest.approx(found.best_rsum)


@pytest.mark.parametrize("elements", [(), (3,)])
def test_the_sum_is_that_of_the_formula(elements):
    torch.manual_seed(0)
    residual = Residual(4, 6, Frozen())
    torch.nn.init.normal_(residual.layer.weight)
    embedding, frozen = torch.randn(2, *elements, 4), torch.randn(2, 6)
    expected = torch.stack(
        [normalize(one, dim=0) + own @ residual.layer.weight.T / 2 for own, one in zip(embedding, frozen, strict=True)]
    )
    base, found = residual(embedding, Features(torch.ones(2), global_=frozen))
    torch.testing.assert_close(found, expected)
    assert torch.equal(base, frozen)


def test_the_closed_form_is_a_map_of_unit_vectors_side_by_side():
    torch.manual_seed(0)
    closed, length = ClosedForm([3, 2], [True, False], 4), torch.tensor([2, 1])
    closed.mean.normal_()
    closed.matrix.normal_()
    parts = Features(length, global_=torch.randn(2, 3)), Features(length, local=torch.randn(2, 2, 2))
    means = torch.stack([parts[1].local[0].mean(0), parts[1].local[1, 0]])
    side_by_side = torch.cat([one / one.norm(dim=1, keepdim=True) for one in (parts[0].global_, means)], 1)
    with torch.autocast("cpu", torch.bfloat16):  # whose eight bits would be too few
        found = closed(SimpleNamespace(parts=parts))
    torch.testing.assert_close(found, (side_by_side - closed.mean) @ closed.matrix)
    assert closed.fields == ({"global"}, {"local"})


def test_what_has_no_common_space_or_is_no_vector_is_refused(store, tmp_path):
    apart = make_store(tmp_path / "apart.zarr", text="tokens")
    with pytest.raises(RecipeError, match=r"model.residual=frozen adds to global features of one space: extract both"):
        train(apart, load_recipe("mlp", SMALL), tmp_path / "run", device="cpu")
    with pytest.raises(RecipeError, match=r"adds vectors or sets, which aggregator.image 'pcmepp' does not give"):
        train(store, load_recipe("pcmepp", SMALL), tmp_path / "run", device="cpu")
    with pytest.raises(RecipeError, match=r"would move the samples that aggregator.image 'pcme' draws"):
        train(store, load_recipe("pcme", SMALL), tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()
