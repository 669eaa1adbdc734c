"""Evaluation over all cached views of an image, against a mean that is taken by hand."""

import json

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from plain_evaluation import recipe_of
from scores import score
from small_store import make_store
from torch.nn.functional import normalize

from xret.cli import main
from xret.heads.evaluation.evaluation import evaluate
from xret.heads.evaluation.metrics import recalls
from xret.heads.evaluation.scoring import embed
from xret.heads.runs.features import batches_of, sets_of_run
from xret.heads.runs.run import Run
from xret.heads.training.train import train
from xret.pipeline.errors import RunError
from xret.pipeline.reading.features import Features
from xret.pipeline.store import FeatureCache

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
# A vector, a set, a Gaussian and a sequence.
KINDS = {"vsepp": [], "setdiv": [], "pcmepp": [], "scan": ["data.unit=image"]}


@pytest.fixture(scope="module")
def several(folder):
    return make_store(folder / "views.zarr", views=3)


@pytest.fixture(scope="module")
def run_of(several, folder):
    def run(name):
        path = folder / f"{name}-of-views"
        if not path.exists():
            train(several, recipe_of(name, *KINDS[name]), path, device="cpu")
        return Run(path)

    return run


@torch.no_grad()
def similarity_of(run, cache, view):
    """Compare the test images in one view, read from the set itself, with the captions as evaluation embeds them."""
    model, images = run.model(CPU), cache.image_set()
    captions = embed(model, batches_of(sets_of_run(run, cache), model, "test", CPU))[1]
    rows = np.arange(*cache.splits["test"])
    local, global_ = (torch.from_numpy(read(rows, view)) for read in (images.local, images.global_))
    features = Features(torch.full((len(rows),), local.shape[1]), local, global_)
    return model.similarity(model.embed_images(features).embedding, captions)


@pytest.mark.parametrize("name", KINDS)
def test_it_is_the_mean_of_the_similarities(run_of, several, name):
    run, cache = run_of(name), FeatureCache.open(several)
    each = [similarity_of(run, cache, view) for view in range(3)]
    assert (each[0] - each[1]).abs().max() > 1e-3
    scores, first = score(run.path, views=3), score(run.path)
    torch.testing.assert_close(scores.similarity, sum(each) / 3, rtol=1e-4, atol=1e-5)
    table = recalls(sum(each) / 3, scores.caption_image, "full", "mean")
    (result,) = evaluate(run.path, views=True, ties="mean", device="cpu").results
    assert result.rsum == pytest.approx(table.rsum)
    torch.testing.assert_close(first.similarity, each[0], rtol=1e-4, atol=1e-5)
    assert scores.log_circular_variance == first.log_circular_variance
    if name == "vsepp":  # of vectors it is the mean of the normalised embeddings
        model = run.model(CPU)
        sets = sets_of_run(run, cache)
        embedded = [embed(model, batches_of(sets, model, "test", CPU, views=(view,))) for view in range(3)]
        mean = torch.stack([normalize(images, dim=1) for images, _ in embedded]).mean(0)
        expected = mean @ normalize(embedded[0][1], dim=1).T
        torch.testing.assert_close(scores.similarity, expected, rtol=1e-4, atol=1e-5)


def test_the_result_tells_the_views(run_of):
    run = str(run_of("vsepp").path)
    for options, views, first in (([], 1, f"{run} on "), (["--views"], 3, ", mean over 3 views of each image")):
        assert evaluate(run, views=bool(options), device="cpu").views == (views,)
        told = [
            CliRunner().invoke(main, ["eval", run, "--device", "cpu", *options, *more]).stdout
            for more in ([], ["--json"])
        ]
        assert json.loads(told[1])["views"] == views
        line = told[0].splitlines()[0]
        assert first in line
        assert ("views of each image" in line) == bool(options)


def test_an_ensemble_takes_each_run_with_the_views_it_has(run_of, vsepp):
    runs = [run_of("vsepp").path, vsepp]
    found = evaluate(runs, views=True, device="cpu")
    assert found.views == (3, 1)
    assert found.to_dict()["views"] == [3, 1]
    scores = [score(run, views=views) for run, views in zip(runs, (3, 1), strict=True)]
    mean = (scores[0].similarity + scores[1].similarity) / 2
    assert found.results[0].rsum == pytest.approx(recalls(mean, scores[0].caption_image, "full", "pessimistic").rsum)


def test_a_set_of_one_view_is_refused(vsepp):
    with pytest.raises(RunError, match=r"'grid@.*has one view of each image.*leave --views out"):
        evaluate(vsepp, views=True, device="cpu")
