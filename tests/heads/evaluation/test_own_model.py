"""A user-defined model in the place of a run, against its own matrix of all pairs."""

import re

import numpy as np
import pytest
import torch
from plain_evaluation import globals_of
from small_store import make_store
from torch import nn
from torch.nn.functional import normalize

import xret
from xret.errors import RunError
from xret.heads.evaluation.comparison import compare_runs
from xret.heads.evaluation.own_model import METHODS, digest_of
from xret.heads.evaluation.scoring import Ranker
from xret.heads.report import write_report
from xret.pipeline.encoders.origin import Origin
from xret.pipeline.store import FeatureCache


class Linear(nn.Module):
    """Two maps of global features, compared by cosine; the dropout would change every score."""

    def __init__(self, image, text):
        super().__init__()
        torch.manual_seed(0)
        self.image, self.text, self.dropout = nn.Linear(image, 6), nn.Linear(text, 6), nn.Dropout(0.5)
        self.similarity = xret.similarities.Cosine()

    def embed_images(self, features):
        return self.dropout(self.image(features.global_.float()))

    def embed_captions(self, features):
        return self.text(features.global_.float())


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("own") / "s.zarr", text="tokens", space="one")


@pytest.fixture
def model(store):
    cache = FeatureCache.open(store)
    return Linear(cache.image_set().global_channels, cache.caption_set().global_channels)


@torch.no_grad()
def matrix(model, store, split):
    """Return the similarities of a split and the image of each caption, from features read at once."""
    images, captions, owner = map(torch.from_numpy, globals_of(store, split))
    return normalize(model.image(images.float())) @ normalize(model.text(captions.float())).T, owner


def test_it_has_the_table_of_its_own_similarities_and_stays_as_it_was(model, store):
    model.text.eval()  # one part is at rest, the others are not
    (result,) = (found := xret.evaluate(model, store=store, device="cpu")).results
    assert result.rsum == pytest.approx(xret.metrics.recalls(*matrix(model, store, "test")).rsum)
    assert (found.runs, found.stores) == (("Linear",), (store,))
    ranker, sets = Ranker(model, store=store), FeatureCache.open(store)
    assert ranker.origins("image") == (Origin.of(sets.image_set()),)
    assert ranker.origins("text") == (Origin.of(sets.caption_set()),)
    assert (model.training, model.dropout.training, model.text.training) == (True, True, False)
    corrected = xret.evaluate(model, store=store, hubness=True).hubness
    assert corrected.val_rsum["none"] == pytest.approx(xret.metrics.recalls(*matrix(model, store, "val")).rsum)


def test_it_ranks_where_its_weights_are_unless_another_device_is_named(store, model):
    model.to("meta")
    assert [Ranker(model, store=store, device=name).device.type for name in ("auto", "cpu")] == ["meta", "cpu"]
    assert Ranker(Holder(**dict.fromkeys(METHODS, len)), store=store, device="cpu").device.type == "cpu"


def test_it_is_one_of_an_ensemble_and_is_compared(model, store, tmp_path):
    (alone,), (twice,) = (xret.evaluate(one, store=store).results for one in (model, [model, model]))
    assert twice.rsum == alone.rsum
    frozen = xret.evaluate(store).results[0].rsum
    rsum = compare_runs(store, model, store=store).differences[-1]
    assert (rsum.first, rsum.second) == pytest.approx((frozen, alone.rsum))
    write_report([store, model], tmp_path / "page.html", store=store)
    text = (tmp_path / "page.html").read_text()
    assert f"{frozen:.2f}" in text and f"{alone.rsum:.2f}" in text
    write_report(store, tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text().count('<th scope="row">untrained ') == 1


@pytest.mark.parametrize(
    ("method", "wrong", "message"),
    [
        ("embed_images", lambda features: features.global_[:1], r"embed_images gives \[1, \d+\] for 12 samples"),
        ("embed_captions", lambda features: features.global_[:, 0], r"embed_captions gives \[\d+\] for"),
        ("embed_images", lambda features: features.global_.numpy(), "embed_images gives ndarray for"),
        (
            "similarity",
            lambda images, captions: images[:, :1],
            r"similarity gives \[12, 1\] in the place of \[12, 29\]",
        ),
        ("similarity", lambda images, captions: (images @ captions.T).numpy(), "similarity gives ndarray"),
    ],
)
def test_what_has_another_shape_is_refused(model, store, method, wrong, message):
    vars(model)[method] = wrong
    with pytest.raises(RunError, match=message):
        xret.evaluate(model, store=store, device="cpu")


@pytest.mark.parametrize(
    ("method", "wrong", "note"),
    [
        (
            "embed_images",
            lambda features: nn.Linear(8, 6)(features.global_),
            r"Linear.embed_images, .* global_ \[12, \d+\] in torch.float16",
        ),
        ("similarity", lambda images, captions: images @ captions, r"of images \[12, 6\] and captions \[29, 6\]"),
    ],
)
def test_what_a_model_raises_is_kept_and_located(model, store, method, wrong, note):
    vars(model)[method] = wrong
    with pytest.raises(RuntimeError) as caught:
        xret.evaluate(model, store=store, device="cpu")
    assert re.search(note, "".join(caught.value.__notes__))


def test_a_direction_is_that_of_one_evaluation(model, store):
    model.embed_images = lambda features: model.image(features.local.float())
    model.embed_captions = lambda features: model.text(features.global_.float())[:, None]
    model.similarity = xret.similarities.Chamfer()
    ways = None, "caption", None
    both, caption, again = (xret.evaluate(model, store=store, direction=way).results[0].rsum for way in ways)
    assert both == again != caption


def test_what_is_no_model_and_a_model_without_a_store_are_refused(model, store):
    with pytest.raises(RunError, match=r"Linear is a model and needs store"):
        xret.evaluate(model)
    with pytest.raises(RunError, match="Linear is no run, no store and no model: it has no embed_images"):
        xret.evaluate(nn.Linear(2, 2), store=store)


class Holder:
    """Models and numbers that no module holds."""

    def __init__(self, **held):
        vars(self).update(held)


def test_a_digest_is_of_all_values_and_of_nothing_else(model):
    held = {"linear": model.image, "scale": 2.0, "name": "a", "table": np.ones(3), "pair": [torch.ones(2, 2)]}
    others = {"linear": model.text, "scale": 3.0, "name": "b", "table": np.arange(3), "pair": [torch.eye(2)]}
    first, again = (
        [digest_of(Holder(**held | change)) for change in ({}, *({name: other} for name, other in others.items()))]
        for _ in range(2)
    )
    assert first == again and len({*first}) == 6
    before, model.cache = digest_of(model), torch.ones(3)  # what a module keeps beside its weights
    assert digest_of(model) == before != digest_of(model.image)
    with torch.no_grad():
        model.image.weight[0, 0] += 1
    assert digest_of(model) != before
