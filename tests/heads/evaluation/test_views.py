"""Evaluation over all cached views of an image, against a mean that is taken by hand."""

import json

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from small_store import make_store
from torch.nn.functional import normalize

from xret.cli.eval import eval_
from xret.heads.evaluation.evaluation import evaluate
from xret.heads.evaluation.metrics import recalls
from xret.heads.evaluation.rankers import open_rankers
from xret.heads.evaluation.scoring import embed
from xret.heads.recipes.recipe import load_recipe
from xret.heads.runs.features import split_of_run
from xret.heads.runs.run import Run
from xret.heads.training.train import train
from xret.pipeline.errors import RunError
from xret.pipeline.reading.features import Features
from xret.pipeline.store import FeatureCache

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = ["model.dim=16", "data.batch_size=16", "adapter.words.word_dim=8", "optimizer.lr=0.01", "schedule.epochs=2"]
CPU = torch.device("cpu")
# A vector, a set, a Gaussian and a sequence.
KINDS = {
    "vsepp": [],
    "setdiv": [f"aggregator.{side}.head_dim=16" for side in ("image", "text")],
    "pcmepp": [],
    "scan": ["data.unit=image"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("views")


@pytest.fixture(scope="module")
def store(folder):
    return make_store(folder / "views.zarr", views=3)


@pytest.fixture(scope="module")
def run_of(store, folder):
    def run(name):
        if not (folder / name).exists():
            train(store, load_recipe(name, [*SMALL, *KINDS[name]]), folder / name, device="cpu")
        return Run(folder / name)

    return run


@torch.no_grad()
def similarity_of(run, cache, view):
    """Compare the test images in one view, read from the set itself, with the captions as evaluation embeds them."""
    model, images = run.model(CPU), cache.image_set()
    captions = embed(model, split_of_run(run, cache, "test", model, CPU))[1]
    rows = np.arange(*cache.splits["test"])
    local, global_ = (torch.from_numpy(read(rows, view)) for read in (images.local, images.global_))
    features = Features(torch.full((len(rows),), local.shape[1]), local, global_)
    return model.similarity(model.embed_images(features).embedding, captions)


@pytest.mark.parametrize("name", KINDS)
def test_it_is_the_mean_of_the_similarities(run_of, store, name):
    run, cache = run_of(name), FeatureCache.open(store)
    each = [similarity_of(run, cache, view) for view in range(3)]
    assert (each[0] - each[1]).abs().max() > 1e-3
    (ranker,) = open_rankers([run.path])
    scores = ranker.score("test", CPU, 3)
    torch.testing.assert_close(scores.similarity, sum(each) / 3, rtol=1e-4, atol=1e-5)
    table = recalls(sum(each) / 3, scores.caption_image, "full", "mean")
    (result,) = evaluate(run.path, views=True, ties="mean", device="cpu").results
    assert result.rsum == pytest.approx(table.rsum)
    first = ranker.score("test", CPU)
    torch.testing.assert_close(first.similarity, each[0], rtol=1e-4, atol=1e-5)
    assert scores.log_circular_variance == first.log_circular_variance


@torch.no_grad()
def test_of_vectors_it_is_the_mean_of_the_normalised_embeddings(run_of, store):
    run, cache = run_of("vsepp"), FeatureCache.open(store)
    model = run.model(CPU)
    embedded = [embed(model, split_of_run(run, cache, "test", model, CPU, view)) for view in range(3)]
    mean = torch.stack([normalize(images, dim=1) for images, _ in embedded]).mean(0)
    expected = mean @ normalize(embedded[0][1], dim=1).T
    scores = open_rankers([run.path])[0].score("test", CPU, 3)
    torch.testing.assert_close(scores.similarity, expected, rtol=1e-4, atol=1e-5)


def test_the_result_tells_the_views(run_of):
    run = str(run_of("vsepp").path)
    words = [run, "--device", "cpu"]
    for options, views, first in (([], 1, f"{run} on "), (["--views"], 3, ", mean over 3 views of each image")):
        found = evaluate(run, views=bool(options), device="cpu")
        assert found.views == (views,)
        assert json.loads(CliRunner().invoke(eval_, [*words, *options, "--json"]).stdout)["views"] == views
        line = CliRunner().invoke(eval_, [*words, *options]).stdout.splitlines()[0]
        assert first in line
        assert ("views of each image" in line) == bool(options)


def test_an_ensemble_takes_each_run_with_the_views_it_has(run_of, store, folder):
    single = make_store(folder / "single.zarr")
    train(single, load_recipe("vsepp", SMALL), folder / "single", device="cpu")
    runs = [run_of("vsepp").path, folder / "single"]
    found = evaluate(runs, views=True, device="cpu")
    assert found.views == (3, 1)
    assert found.to_dict()["views"] == [3, 1]
    scores = [ranker.score("test", CPU, views) for ranker, views in zip(open_rankers(runs), (3, 1), strict=True)]
    mean = (scores[0].similarity + scores[1].similarity) / 2
    assert found.results[0].rsum == pytest.approx(recalls(mean, scores[0].caption_image, "full", "pessimistic").rsum)


def test_a_set_of_one_view_is_refused(folder):
    url = make_store(folder / "one.zarr")
    train(url, load_recipe("vsepp", SMALL), folder / "one", device="cpu")
    with pytest.raises(RunError, match=r"'grid@.*has one view of each image.*leave --views out"):
        evaluate(folder / "one", views=True, device="cpu")
    result = CliRunner().invoke(eval_, [str(folder / "one"), "--views", "--device", "cpu"])
    assert result.exit_code != 0
