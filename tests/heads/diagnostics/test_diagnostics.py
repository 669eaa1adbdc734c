"""Uncertainty, coefficients and cost against numbers by hand, and all of a run's diagnostics on a small store."""

import json
from types import SimpleNamespace

import pytest
import torch
from small_store import make_store

import xret
from xret.heads.diagnostics import diagnose
from xret.heads.diagnostics.embeddings import coefficient_tables, cost, cost_table, gpo_coefficients, uncertainty_tables
from xret.heads.evaluation.evaluation import evaluate
from xret.heads.evaluation.scoring import Ranker, embed_split
from xret.heads.modules.aggregators import AGGREGATORS
from xret.heads.modules.embedding import Gaussian, Sequence
from xret.heads.modules.similarity import SIMILARITIES
from xret.heads.runs.run import Run

FOUND = {  # what each recipe has tables of, beside the cost
    "setdiv": {"elements"}, "pcme": {"elements", "uncertainty"}, "gaussian-vsepp": {"uncertainty"},
    "pcmepp": {"uncertainty", "coefficients"}, "vse-infty": {"coefficients"}, "vsepp": set(), "scan": set(),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_a_run_has_what_its_embeddings_allow_and_a_reason_for_the_rest(trained, name):
    found = diagnose(trained(name), device="cpu")
    missing = {"elements", "uncertainty", "coefficients"} - FOUND[name]
    assert set(found.reasons) == missing | {"crops"}
    assert ("wins" in found.tables) == ("elements" in FOUND[name])
    assert ("uncertainty" in found.tables) == ("uncertainty" in FOUND[name])
    assert any(key.startswith("coefficients of") for key in found.tables) == ("coefficients" in FOUND[name])
    written = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert written["tables"]["cost"]["rows"][0] == ["multiply-accumulates", found.tables["cost"].rows[0][1]]
    assert any("SCAN" in row[0] for row in written["tables"]["cost"]["rows"]) == (name == "scan")
    printed = str(found)
    assert all(table.caption in printed for table in found.tables.values())
    assert all(f"not shown: {what}: {why}" in printed for what, why in found.reasons.items())


def test_sets_of_one_element_have_no_variance_to_read(trained):
    one = [f"aggregator.{side}.slots=1" for side in ("image", "text")]
    found = diagnose(trained("setdiv", *one), device="cpu").reasons["elements"]
    assert found == "the embeddings are no sets of several elements"


@pytest.mark.parametrize(("ties", "split", "broken"), [("pessimistic", "test", (61,)), ("mean", "val", ())])
def test_all_elements_have_the_rsum_and_the_variance_of_the_table(trained, tmp_path, ties, split, broken):
    where = {"store": make_store(tmp_path / "other.zarr", broken=broken), "ties": ties, "split": split, "device": "cpu"}
    found = diagnose(trained("setdiv"), **where).tables
    (table,) = evaluate(trained("setdiv"), **where).results
    assert table.images == 12 - len(broken)
    assert f"all elements give {table.rsum:.2f}" in found["rsum pairs"].caption
    assert found["circular variance"].rows[0][3] == pytest.approx(table.log_circular_variance)


def test_uncertainty_by_hand():
    scores = {
        "caption_image": torch.tensor([0, 0, 1, 2, 2]),
        "file_names": ["a.jpg", "b.jpg", "c.jpg"],
        "texts": ["a dog", "a cat", "a cat", "a hat", "a cup"],
    }
    images, captions = torch.tensor([0.5, -1.0, 2.0]), torch.tensor([4.0, 3.0, 3.0, 1.0, 2.0])

    def seen(one, other):
        sides = [SimpleNamespace(uncertainty=values) for values in (one, other)]
        return SimpleNamespace(image=sides[0], text=sides[1], **scores)

    assert uncertainty_tables(seen(images, None)) == {}
    found = uncertainty_tables(seen(images, captions))
    assert found["uncertainty"].rows[0][1:] == pytest.approx([0.5, *(-1 + 0.3 * tenth for tenth in range(11))])
    assert found["most uncertain images"].rows[0] == ["c.jpg", "a hat", 2.0]
    assert [row[0] for row in found["least uncertain images"].rows] == ["b.jpg", "a.jpg", "c.jpg"]
    # The second "a cat" says nothing new.
    assert [row[1] for row in found["most uncertain captions"].rows] == ["a dog", "a cat", "a cup", "a hat"]
    assert found["least uncertain captions"].rows[0] == ["c.jpg", "a hat", 1.0]


def test_uncertainty_is_the_log_determinant_of_what_the_run_gives(trained):
    run = trained("gaussian-vsepp")
    found = diagnose(run, device="cpu").tables
    seen = embed_split(Ranker(run, device="cpu"), "test")
    determinants = [torch.diag(row.double().exp()).logdet().item() for row in seen.image.embedding.log_variance]
    assert found["uncertainty"].rows[0][1] == pytest.approx(sum(determinants) / len(determinants))
    best = max(range(len(determinants)), key=determinants.__getitem__)
    name, _, value = found["most uncertain images"].rows[0]
    assert (name, value) == (seen.file_names[best], pytest.approx(determinants[best]))
    assert len(found["least uncertain images"].rows) == 10


@pytest.mark.parametrize("per_dimension", [False, True])
def test_coefficients_of_every_length_that_occurs(per_dimension):
    torch.manual_seed(0)
    branch = torch.nn.Sequential(torch.nn.Linear(4, 4), AGGREGATORS["gpo"](4, 4, per_dimension=per_dimension))
    found = gpo_coefficients(branch, torch.tensor([3, 5, 3, 0, 1]))["1"]
    assert {length: samples for length, (samples, _) in found.items()} == {1: 2, 3: 2, 5: 1}
    for length, (_, coefficients) in found.items():
        assert len(coefficients) == length
        assert sum(coefficients) == pytest.approx(1)
        # What GPO makes of sorted rows that are 1 at one rank and 0 below is the sum of the weights up to there.
        rows = torch.tril(torch.ones(length, length)).flip(0)
        for rank, row in enumerate(rows.flip(0), 1):
            local = row[None, :, None].expand(-1, -1, 4)
            pooled = branch[1](local, torch.tensor([length]), torch.zeros(1, 4)).embedding
            assert pooled.mean().item() == pytest.approx(sum(coefficients[:rank]), abs=1e-5)


def test_coefficients_that_depend_on_the_sample_are_left_out():
    assert gpo_coefficients(AGGREGATORS["gpo"](4, 4, feature_input=True), torch.tensor([3])) == {}
    assert gpo_coefficients(AGGREGATORS["max"](4, 4), torch.tensor([3])) == {}


def test_a_gaussian_has_the_coefficients_of_mean_and_variance(trained):
    run = trained("pcmepp")
    found = diagnose(run, device="cpu").tables
    model = Run(run).model(torch.device("cpu"))
    weights = model.image.aggregator.mean.coefficients(torch.tensor([4]), 4)[0]
    ((rows, *values),) = found["coefficients of image aggregator.mean"].rows
    assert (rows, values) == ("4 rows", pytest.approx(weights.tolist()))
    assert "coefficients of image aggregator.log_variance" in found


def test_the_heads_of_an_average_have_no_coefficients_of_its_rows(trained, tmp_path):
    xret.average([trained("vse-infty"), trained("vsepp")], out=tmp_path / "a", device="cpu")
    assert "coefficients" in diagnose(tmp_path / "a", device="cpu").reasons


@pytest.mark.parametrize(("ends", "rows"), [("false", [3, 5, 7]), ("true", [5, 7, 9])])
def test_the_ends_of_captions_are_rows(trained, ends, rows):
    found = diagnose(trained("vse-infty", f"adapter.words.ends={ends}"), device="cpu").tables
    assert [row[0] for row in found["coefficients of text aggregator"].rows] == [f"{number} rows" for number in rows]


def test_long_coefficients_are_shown_at_ten_ranks_of_the_most_frequent_lengths():
    branch, nothing = AGGREGATORS["gpo"](4, 4), torch.nn.Identity()
    sides = [
        SimpleNamespace(length=torch.tensor([31] * 3 + [4] * 2 + [5, 5, 6, 6, 7])),
        SimpleNamespace(length=torch.ones(1)),
    ]
    seen = SimpleNamespace(model=SimpleNamespace(image=branch, text=nothing), image=sides[0], text=sides[1])
    (table,) = coefficient_tables(seen).values()
    assert [row[0] for row in table.rows] == ["4 rows", "5 rows", "6 rows", "31 rows"]
    weights = branch.coefficients(torch.tensor([31]), 31)[0].tolist()
    assert table.rows[3][1:] == pytest.approx([weights[round(30 * k / 9)] for k in range(10)])
    assert table.rows[0][5:] == [None] * 6


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
    assert found == (macs, shape, shape)


def test_cost_of_cross_attention_is_that_of_a_pair_of_median_lengths():
    images = Sequence(torch.randn(3, 9, 16), torch.tensor([5, 9, 7]))
    captions = Sequence(torch.randn(4, 6, 16), torch.tensor([2, 3, 6, 6]))
    found = cost(images, captions, SIMILARITIES["cross-attention"]())
    # All cosines of 7 regions and 3 words; then w G w, where G, of the regions alone, is made once for all captions.
    assert found == (7 * 3 * 16 + 7 * 7 * 3, [7, 16], [3, 16])


@pytest.mark.parametrize(("direction", "queries"), [("t-i", 16), ("i-t", 36)])
def test_cost_of_cross_attention_stands_beside_that_of_its_equations(direction, queries):
    images, captions = Sequence(torch.randn(1, 36, 1024), torch.tensor([36])), torch.randn(1, 16, 1024)
    model = SimpleNamespace(compare=SIMILARITIES["cross-attention"](direction=direction))
    text = SimpleNamespace(embedding=Sequence(captions, torch.tensor([16])))
    seen = SimpleNamespace(model=model, image=SimpleNamespace(embedding=images), text=text)
    ours, theirs, *_ = cost_table(seen)["cost"].rows
    squares = 36 * 36 * 16 if direction == "t-i" else 16 * 16 * 36
    assert (ours[1], theirs[1]) == (36 * 16 * 1024 + squares, 2 * 36 * 16 * 1024 + queries * 1024)
    if direction == "t-i":
        assert theirs[1] == pytest.approx(1.24e6, rel=0.04)  # SetDiv section 4.4
