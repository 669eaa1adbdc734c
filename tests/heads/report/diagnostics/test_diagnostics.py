"""Uncertainty, coefficients and cost against numbers by hand, and all of a run's diagnostics on a small store."""

import json

import numpy as np
import pytest
import torch
from small_store import make_store

from xret.heads.evaluation.evaluation import evaluate
from xret.heads.evaluation.scoring import Scores
from xret.heads.modules.aggregators import AGGREGATORS
from xret.heads.modules.embedding import Gaussian, Sequence
from xret.heads.modules.similarity import SIMILARITIES
from xret.heads.recipes.recipe import load_recipe
from xret.heads.report.diagnostics import diagnose, diagnose_view
from xret.heads.report.diagnostics.coefficients import gpo_coefficients
from xret.heads.report.diagnostics.cost import Cost, cost
from xret.heads.report.diagnostics.uncertainty import UncertainCaption, UncertainImage, uncertainty
from xret.heads.report.views import open_views
from xret.heads.retrieval.retriever import Retriever
from xret.heads.runs.run import Run
from xret.heads.training.training import train

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = ["model.dim=16", "data.batch_size=16", "adapter.words.word_dim=8", "schedule.epochs=1", "optimizer.lr=0.01"]
HEADS = [f"aggregator.{side}.head_dim=16" for side in ("image", "text")]
FOUND = {  # what each recipe has something to say of
    "setdiv": {"circular_variance", "elements"},
    "pcme": {"circular_variance", "elements", "uncertainty"},
    "gaussian-vsepp": {"uncertainty"},
    "pcmepp": {"uncertainty", "gpo"},
    "vse-infty": {"gpo"},
    "vsepp": set(),
    "scan": set(),
}
KEYS = ("circular_variance", "elements", "uncertainty", "crops", "gpo", "cost")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("diagnostics")


@pytest.fixture(scope="module")
def store(folder):
    return make_store(folder / "small.zarr")


@pytest.fixture(scope="module")
def run_of(store, folder):
    def run(name):
        if not (folder / name).exists():
            settings = [*SMALL, *(HEADS if name == "setdiv" else [])]
            train(store, load_recipe(name, settings), folder / name, device="cpu")
        return folder / name

    return run


@pytest.mark.parametrize("name", FOUND)
def test_a_run_has_what_its_embeddings_allow_and_a_reason_for_the_rest(run_of, name):
    found = diagnose(run_of(name), device="cpu")
    written = found.to_dict()
    assert tuple(written) == (*KEYS, "reasons")
    there = {key for key in KEYS if written[key] is not None}
    assert there == FOUND[name] | {"cost"}
    assert found.reasons.keys() == set(KEYS) - there
    assert json.loads(json.dumps(written, allow_nan=False)) == written


def test_what_is_embedded_already_is_not_embedded_again(run_of):
    (view,) = open_views([run_of("pcme")], None, "test", "cpu")
    view.model.embed_images = view.model.embed_captions = None
    assert diagnose_view(view) == diagnose(run_of("pcme"), device="cpu")


def test_sets_of_one_element_have_no_variance_to_read(store, folder):
    one = [f"aggregator.{side}.slots=1" for side in ("image", "text")]
    train(store, load_recipe("setdiv", [*SMALL, *HEADS, *one]), folder / "one", device="cpu")
    found = diagnose(folder / "one", device="cpu")
    assert found.circular_variance is found.elements is None
    assert found.reasons["circular_variance"] == "the embeddings are no sets of several elements"


@pytest.mark.parametrize("ties", ["pessimistic", "mean"])
def test_all_elements_have_the_rsum_and_the_variance_of_the_table(run_of, ties):
    run = run_of("setdiv")
    found = diagnose(run, device="cpu", ties=ties)
    (table,) = evaluate([run], device="cpu", ties=ties).results
    assert found.elements.rsum.all == table.rsum
    assert found.circular_variance.log.both == pytest.approx(table.log_circular_variance)
    assert sum(found.elements.wins.image) == pytest.approx(1)


def test_another_split_and_another_store(run_of, folder):
    run, other = run_of("setdiv"), make_store(folder / "other.zarr", broken=(61,))
    whole = diagnose(run, device="cpu")
    assert diagnose(run, device="cpu", split="val").elements != whole.elements
    found = diagnose(run, device="cpu", store=other)
    (table,) = evaluate([run], device="cpu", store=other).results
    assert (table.images, found.elements.rsum.all) == (11, table.rsum)


def test_uncertainty_by_hand():
    split = Scores(
        similarity=torch.zeros(3, 5),
        caption_image=torch.tensor([0, 0, 1, 2, 2]),
        ids=["a", "b", "c"],
        cocoid=np.arange(3),
        sentid=np.arange(10, 15),
        file_names=["a.jpg", "b.jpg", "c.jpg"],
        texts=["a dog", "a cat", "a cat", "a hat", "a cup"],
        skipped=0,
        log_circular_variance=None,
    )
    images, captions = torch.tensor([0.5, -1.0, 2.0]).double(), torch.tensor([4.0, 3.0, 3.0, 1.0, 2.0]).double()
    assert uncertainty(split, images, None) is None
    found = uncertainty(split, images, captions)
    assert found.image.mean == pytest.approx(0.5)
    assert found.image.deciles == pytest.approx([-1 + 0.3 * tenth for tenth in range(11)])
    highest = UncertainImage("c", "c.jpg", ["a hat", "a cup"], 2.0)
    assert found.image.highest[0] == found.image.lowest[-1] == highest
    assert [one.id for one in found.image.lowest] == ["b", "a", "c"]
    # The second "a cat" says nothing new.
    assert [one.sentid for one in found.text.highest] == [10, 11, 14, 13]
    assert found.text.lowest[0] == UncertainCaption(13, "a hat", "c.jpg", 1.0)


def test_uncertainty_is_the_log_determinant_of_what_the_run_gives(run_of):
    run = run_of("gaussian-vsepp")
    found = diagnose(run, device="cpu").uncertainty
    gallery = Retriever(run, device="cpu").gallery
    determinants = [torch.diag(row.double().exp()).logdet().item() for row in gallery.images.log_variance]
    assert found.image.mean == pytest.approx(sum(determinants) / len(determinants))
    best = max(range(len(determinants)), key=determinants.__getitem__)
    assert found.image.highest[0].file_name == gallery.file_names[best]
    assert found.image.highest[0].uncertainty == pytest.approx(determinants[best])
    assert len(found.image.lowest) == 10


@pytest.mark.parametrize("per_dimension", [False, True])
def test_coefficients_of_every_length_that_occurs(per_dimension):
    torch.manual_seed(0)
    branch = torch.nn.Sequential(torch.nn.Linear(4, 4), AGGREGATORS["gpo"](4, 4, per_dimension=per_dimension))
    (found,) = gpo_coefficients(branch, torch.tensor([3, 5, 3, 0, 1]))
    assert found.part == "1"
    assert [(one.length, one.samples) for one in found.lengths] == [(1, 2), (3, 2), (5, 1)]
    for one in found.lengths:
        assert len(one.coefficients) == one.length
        assert sum(one.coefficients) == pytest.approx(1)
        # What GPO makes of sorted rows that are 1 at one rank and 0 below is the sum of the weights up to there.
        rows = torch.tril(torch.ones(one.length, one.length)).flip(0)
        for rank, row in enumerate(rows.flip(0), 1):
            local = row[None, :, None].expand(-1, -1, 4)
            pooled = branch[1](local, torch.tensor([one.length]), torch.zeros(1, 4)).embedding
            assert pooled.mean().item() == pytest.approx(sum(one.coefficients[:rank]), abs=1e-5)


def test_coefficients_that_depend_on_the_sample_are_left_out():
    assert gpo_coefficients(AGGREGATORS["gpo"](4, 4, feature_input=True), torch.tensor([3])) == []
    assert gpo_coefficients(AGGREGATORS["max"](4, 4), torch.tensor([3])) == []


def test_a_gaussian_has_the_coefficients_of_mean_and_variance(run_of):
    run = run_of("pcmepp")
    found = diagnose(run, device="cpu").gpo
    assert [part.part for part in found.image] == ["aggregator.mean", "aggregator.log_variance"]
    model = Run(run).model(torch.device("cpu"))
    (only,) = found.image[0].lengths
    weights = model.image.aggregator.mean.coefficients(torch.tensor([4]))[0]
    assert (only.length, only.samples) == (4, 12)
    assert only.coefficients == pytest.approx(weights.tolist())


@pytest.mark.parametrize(
    ("name", "embedding", "macs"),
    [
        ("smooth-chamfer", torch.randn(6, 4, 1024), 16_384),  # SetDiv section 4.4: 16.4 K
        ("mil", torch.randn(6, 4, 1024), 16_384),
        ("assignment", torch.randn(6, 4, 1024), 16_384),
        ("match-probability", torch.randn(6, 7, 64), 49 * 64),
        ("cosine", torch.randn(6, 1024), 1024),
        ("kl", Gaussian(torch.randn(6, 64), torch.randn(6, 64)), 128),
        ("min-kl", Gaussian(torch.randn(6, 64), torch.randn(6, 64)), 256),
        ("wasserstein", Gaussian(torch.randn(6, 64), torch.randn(6, 64)), 128),
        ("sampled-distance", Gaussian(torch.randn(6, 64), torch.randn(6, 64)), 64),
    ],
)
def test_cost_by_hand(name, embedding, macs):
    found = cost(embedding, embedding, SIMILARITIES[name]())
    shape = list((embedding if isinstance(embedding, torch.Tensor) else embedding.mean).shape[1:])
    assert found == Cost(macs, shape, shape)


def test_cost_of_cross_attention_is_that_of_a_pair_of_median_lengths():
    images = Sequence(torch.randn(3, 9, 16), torch.tensor([5, 9, 7]))
    captions = Sequence(torch.randn(4, 6, 16), torch.tensor([2, 3, 6, 6]))
    found = cost(images, captions, SIMILARITIES["cross-attention"]())
    # All cosines of 7 regions and 3 words; then w G w, where G, of the regions alone, is made once for all captions.
    assert found == Cost(7 * 3 * 16 + 7 * 7 * 3, [7, 16], [3, 16])
