"""A head in closed form, and heads that begin with it, against SciPy's canonical correlations."""

import logging
import re

import numpy as np
import pytest
from canonical_reference import canonical_maps
from plain_evaluation import plain_rsum
from small_store import make_store
from small_trainings import numbers

from xret.heads.evaluation.closed_form import RIDGES
from xret.heads.evaluation.evaluation import evaluate
from xret.heads.recipes.recipe import load_recipe
from xret.heads.runs.run import Run
from xret.heads.training.train import train
from xret.pipeline.errors import RecipeError, RunError
from xret.pipeline.store import FeatureCache

SMALL = ["data.batch_size=16", "schedule.epochs=3", "model.residual=cca"]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    url = tmp_path_factory.mktemp("closed") / "s.zarr"
    return make_store(url, train=120, val=30, test=30, image=("grid", "roi"), text=("tokens", "words"))


@pytest.fixture(scope="module")
def run(store, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "cca"
    train(store, load_recipe("cca", ["data.image=grid", "data.text=states"]), out, device="cpu")
    return out


def vectors(store, split):
    """Global features of images, means of the tokens' states, and the image of each caption."""
    cache = FeatureCache.open(store)
    images, captions = cache.image_set("grid"), cache.caption_set("states")
    rows = np.arange(*cache.splits[split])
    spoken = np.arange(*cache.captions_of(*cache.splits[split]))
    ends = np.cumsum(captions.length[spoken])[:-1]
    means = [one.mean(0) for one in np.split(captions.local(spoken).astype(float), ends)]
    return images.global_(rows).astype(float), np.array(means), cache.caption_image[spoken] - rows[0]


def unit(rows):
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def reference_rsum(store, split, ridge, power):
    images, captions, owner = vectors(store, "train")
    asked = vectors(store, split)
    maps = canonical_maps(unit(images)[owner], unit(captions), ridge, power)
    sides = [one(unit(side)) for one, side in zip(maps, asked, strict=False)]
    return plain_rsum(unit(sides[0]) @ unit(sides[1]).T, asked[2])


def rsum(run, split):
    return evaluate(run, split=split, device="cpu").results[0].rsum


def test_it_is_the_reference_and_validation_chooses(store, tmp_path, caplog):
    caplog.set_level(logging.INFO, "xret")
    recipe = load_recipe("cca", ["data.image=grid", "data.text=states"])
    found = train(store, recipe, tmp_path / "run", device="cpu")
    ridge, power, chosen = re.search(r"ridge (\S+), power (\S+), val RSUM (\S+)", caplog.text).groups()
    for split in ("val", "test"):
        assert rsum(tmp_path / "run", split) == pytest.approx(reference_rsum(store, split, float(ridge), float(power)))
    assert found.best_rsum == pytest.approx(rsum(tmp_path / "run", "val")) == pytest.approx(float(chosen), abs=0.05)
    assert found.best_rsum >= max(reference_rsum(store, "val", one, 0.5) for one in RIDGES) - 1e-9
    assert (found.epochs, found.trained, found.best_epoch) == (0, 0, 0)


def test_it_is_a_run_that_is_whole_and_the_same_again(store, run, tmp_path):
    assert Run(run).metrics() == []
    before = numbers(run)[2]
    train(store, Run(run).recipe, run, device="cpu", resume=True)
    assert all(np.array_equal(value, before[key]) for key, value in numbers(run)[2].items())
    with pytest.raises(RunError, match="begun for 0 epochs"):
        train(store, load_recipe("cca", ["data.image=grid", "data.text=states", "schedule.epochs=2"]), run, resume=True)


@pytest.mark.parametrize("name", ["mlp", "vse-infty", "setdiv"])
def test_a_head_begins_with_the_closed_form_and_is_never_below_it(store, run, name, tmp_path):
    heads = [f"aggregator.{side}.head_dim=16" for side in ("image", "text")] if name == "setdiv" else []
    settings = [*SMALL, *heads, "model.dim=16", "data.image=grid", "data.text=states"]
    began = train(store, load_recipe(name, [*settings, "optimizer.lr=0"]), tmp_path / "began", device="cpu")
    assert began.best_epoch == 0 and rsum(tmp_path / "began", "test") == pytest.approx(rsum(run, "test"))
    found = train(store, load_recipe(name, settings), tmp_path / "run", device="cpu")
    assert found.best_rsum >= began.best_rsum == pytest.approx(rsum(run, "val"))
    assert rsum(tmp_path / "run", "val") == pytest.approx(found.best_rsum)


def test_several_sets_stand_side_by_side(store, tmp_path):
    recipe = load_recipe("cca", ["data.image=[grid, roi]", "data.text=states"])
    found = train(store, recipe, tmp_path / "run", device="cpu")
    assert rsum(tmp_path / "run", "val") == pytest.approx(found.best_rsum)


def test_procrustes_turns_alone(store, tmp_path):
    recipe = load_recipe("cca", ["data.image=grid", "data.text=states", "model.residual=procrustes"])
    train(store, recipe, tmp_path / "run", device="cpu")
    matrix = Run(tmp_path / "run").model("cpu").text.residual.base.matrix
    turned = matrix.T @ matrix
    assert np.allclose(turned / turned[0, 0], np.eye(len(turned)), atol=1e-5)


def test_what_cannot_be_is_a_sentence(store, tmp_path):
    with pytest.raises(RecipeError, match="needs a vector of each caption, which words have not"):
        train(store, load_recipe("cca", ["data.image=grid", "data.text=words"]), tmp_path / "run", device="cpu")
    with pytest.raises(RecipeError, match=r"schedule\.epochs must be at least 1"):
        load_recipe("mlp", ["schedule.epochs=0"])
    assert not (tmp_path / "run").exists()
