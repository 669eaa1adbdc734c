"""Similarities by cosines against recorded values; and what holds of all beside the contract of `test_testing`."""

import itertools
import math
import re
from functools import partial

import pytest
import torch
from recorded import DTYPES, assert_near, assert_recorded, bits, leaf, near
from torch.nn.functional import softplus

from xret.heads.modules.embedding import Gaussian, Sequence, each, shape_of
from xret.heads.modules.similarity import SIMILARITIES, in_blocks, shared
from xret.heads.modules.similarity.gaussian import KL, Wasserstein
from xret.heads.modules.similarity.sets import (
    MIL,
    Cosine,
    MatchProbability,
    MonteCarloMatch,
    match_probability,
    monte_carlo_log_odds,
)
from xret.similarities import Chamfer, CrossAttention, SmoothChamfer
from xret.testing import random_embeddings

mil, chamfer = MIL(), Chamfer()
CASES = ("main", "K2", "K3", "K5", "rect3x5", "rect5x3")


def sets(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("compare", [Chamfer, SmoothChamfer, partial(SmoothChamfer, 50.0)])
def test_a_direction_is_that_of_the_elements_that_look_for_their_nearest(compare):
    images, captions = sets(3, 2, 5), sets(4, 3, 5, seed=1)
    found = {way: compare(direction=way)(images, captions) for way in ("both", "image", "caption")}
    torch.testing.assert_close(found["both"], (found["image"] + found["caption"]) / 2)
    torch.testing.assert_close(found["caption"], compare(direction="image")(captions, images).T)
    if compare is Chamfer:
        for i, c in itertools.product(range(3), range(4)):
            nearest = [max(torch.cosine_similarity(x, y, dim=0) for x in images[i]) for y in captions[c]]
            assert float(found["caption"][i, c]) == pytest.approx(float(sum(nearest) / 3))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_recorded_values_and_gradients(golden, case, dtype):
    data, prefix = golden("similarity"), f"{case}/out{bits(dtype)}_"
    leaves = {side: leaf(data, f"{case}/in_{side}", dtype) for side in ("img", "txt")}
    for kind in (key.removeprefix(prefix) for key in data if key.startswith(prefix)):
        if kind in ("mil", "chamfer"):
            actual = {"mil": mil, "chamfer": chamfer}[kind](*leaves.values())
        elif kind.startswith("smooth_chamfer_a"):
            actual = SmoothChamfer(float(kind.removeprefix("smooth_chamfer_a")))(*leaves.values())
        elif kind.startswith("mp_a"):
            actual = match_probability(*leaves.values(), *map(float, kind.removeprefix("mp_a").split("_b")))
        else:
            continue
        assert actual.dtype == dtype
        assert_near(actual, data[f"{prefix}{kind}"], near(dtype))
    weights = data[f"{case}/in_cotangent"]
    assert_recorded(
        data, "smooth_chamfer_a16", SmoothChamfer()(*leaves.values()), leaves, dtype, f"{case}/", weights=weights
    )


def test_cosine_agrees_with_torch():
    images, captions = sets(3, 7), sets(5, 7, seed=1)
    expected = torch.nn.functional.cosine_similarity(images[:, None], captions[None], dim=-1)
    torch.testing.assert_close(Cosine()(images, captions), expected)


@pytest.mark.parametrize("alpha", [1e-3, 31.9, 32.0, 32.1, 100.0, 1e6])
def test_opposite_sets_are_finite_at_any_alpha(alpha):
    images = sets(1, 1, 8, dtype=torch.float32).expand(2, 3, 8).clone().requires_grad_()
    captions = torch.stack([images[0].detach(), -images[0].detach()])
    similarity = SmoothChamfer(alpha)(images, captions)
    similarity.sum().backward()
    assert similarity.isfinite().all()
    assert images.grad.isfinite().all()
    expected = torch.tensor([1.0, -1.0]).expand(2, 2) + math.log(3) / alpha
    torch.testing.assert_close(similarity, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SIMILARITIES)
def test_half_embeddings_are_compared_in_float32_inside_autocast(name, dtype):
    similarity = SIMILARITIES[name]()
    drawn = (random_embeddings(similarity.embedding, 4, 16) for _ in range(2))
    images, captions = (each(lambda t: t.to(dtype) if t.is_floating_point() else t, one) for one in drawn)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = similarity(images, captions)
    assert actual.dtype == torch.float32
    assert torch.equal(actual, similarity(images, captions))


@pytest.mark.parametrize("name", SIMILARITIES)
def test_blocks_are_what_one_call_gives(name, monkeypatch):
    similarity = SIMILARITIES[name]()
    images, captions = (random_embeddings(similarity.embedding, count) for count in (7, 11))
    sizes = []

    def compare(some, others):
        sizes.append((shape_of(some)[0], shape_of(others)[0]))
        return similarity(some, others)

    monkeypatch.setattr(shared, "block_side", lambda *_: 4)
    torch.testing.assert_close(in_blocks(compare, images, captions), similarity(images, captions).detach())
    assert sizes == [(i, c) for c in (4, 4, 3) for i in (4, 3)]


def test_blocks_of_large_sets_are_smaller(monkeypatch):
    monkeypatch.setattr(shared, "CELLS", 3 * 3 * 6 * 6 + 1)
    sizes = []

    def compare(some, others):
        sizes.append((len(some), len(others)))
        return mil(some, others)

    images, captions = sets(5, 6, 4), sets(4, 6, 4, seed=1)
    torch.testing.assert_close(in_blocks(compare, images, captions), mil(images, captions))
    assert sizes == [(3, 3), (2, 3), (3, 1), (2, 1)]
    assert shared.block_side(sets(1, 6, 4), sets(1, 100, 4)) == 1
    assert shared.block_side(images[:, 0], captions[:, 0]) == 18


def test_nothing_in_blocks():
    assert in_blocks(Cosine(), torch.ones(0, 4), torch.ones(3, 4)).shape == (0, 3)


@pytest.mark.parametrize(
    ("similarity", "images", "captions", "match"),
    [
        (Cosine(), (2, 3, 4), (2, 4), r"vectors .* not a set of shape \[2, 3, 4\] with a vector of shape \[2, 4\]"),
        (mil, (2, 4), (2, 3, 4), r"sets .* not a vector of shape \[2, 4\] with a set of shape \[2, 3, 4\]"),
        (MonteCarloMatch(), (2, 3), (2, 2, 3), "sets"),
        (chamfer, (2, 3, 4), (2, 3, 5), "one width"),
        (mil, "gaussian", "gaussian", "sets .* not a gaussian of .* with a gaussian of "),
        (KL(), (2, 5), "gaussian", "compares gaussians .* not a vector of .* with a gaussian of "),
        (CrossAttention(), (2, 3, 5), "sequence", "compares sequences .* not a set of .* with a sequence of "),
    ],
)
def test_wrong_shapes_are_named(similarity, images, captions, match):
    sides = [random_embeddings(side, 2) if isinstance(side, str) else torch.ones(side) for side in (images, captions)]
    with pytest.raises(ValueError, match=match):
        similarity(*sides)


@pytest.mark.parametrize("kind", ["gaussian", "sequence"])
def test_two_widths_are_named(kind):
    similarity = {"gaussian": Wasserstein(), "sequence": CrossAttention()}[kind]
    with pytest.raises(ValueError, match="one width"):
        similarity(*(random_embeddings(kind, 2, width) for width in (3, 4)))


def begun_at(module, scale, shift):
    with torch.no_grad():
        module.log_scale.fill_(math.log(scale))
        module.shift.fill_(shift)
    return module


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize(("k1", "k2"), [(1, 1), (2, 5), (5, 3)])
def test_agrees_with_a_loop_over_pairs(k1, k2):
    images, captions = sets(3, k1, 6), sets(4, k2, 6, seed=1)
    by_cosine, by_distance, logistic = (
        begun_at(module, 2.0, 1.5)(images, captions)
        for module in (MatchProbability(), MonteCarloMatch(), MonteCarloMatch(link="logistic"))
    )
    for i, image in enumerate(images):
        for c, caption in enumerate(captions):
            pairs = [(x, y) for x in image for y in caption]
            cosines = [torch.cosine_similarity(x, y, dim=0).item() for x, y in pairs]
            logits = [1.5 - 2 * math.sqrt(((x - y) ** 2).sum() + 1e-6) for x, y in pairs]
            for found, terms in (
                (by_cosine[i, c], [sigmoid(2 * cosine + 1.5) for cosine in cosines]),
                (by_distance[i, c].sigmoid(), [sigmoid(2 * logit) for logit in logits]),
                (logistic[i, c].sigmoid(), [sigmoid(logit) for logit in logits]),
            ):
                assert found.item() == pytest.approx(sum(terms) / len(pairs), rel=1e-6)


def test_near_samples_far_from_zero_are_told_apart_in_float32():
    near = torch.full((1, 1, 64), 10.0)
    others = near + torch.tensor([0.001, 0.002, 0.003])[:, None, None]
    distance = (1.0 - monte_carlo_log_odds(near, others, 1.0, 1.0, link="logistic"))[0]
    # 64 dimensions: 8 times the difference of each, which float32 itself holds to 1e-6 here.
    torch.testing.assert_close(distance, torch.tensor([0.008, 0.016, 0.024]), rtol=0.01, atol=1e-6)


def test_log_odds_rank_and_train_where_the_probability_is_rounded():
    images = torch.zeros(1, 2, 3, requires_grad=True)
    captions = torch.tensor([0.0, 20.0, 30.0])[:, None, None].expand(3, 2, 3)
    odds = monte_carlo_log_odds(images, captions, 15.0, 15.0)
    assert odds.sigmoid().tolist() == [[1, 0, 0]]
    assert odds[0, 0] > 25 > 0 > odds[0, 1] > odds[0, 2]
    softplus(-odds[0, 2]).backward()
    assert images.grad.isfinite().all()
    assert (images.grad < 0).all()


@pytest.mark.parametrize("part", [MatchProbability, MonteCarloMatch])
def test_scale_and_shift_train_and_the_scale_stays_positive(part):
    similarity = begun_at(part(), 2.0, 0.5)
    images, captions = sets(4, 2, 6).float(), sets(4, 2, 6, seed=1).float()
    optimizer = torch.optim.AdamW(similarity.parameters(), lr=0.5)

    def probability():
        found = similarity(images, captions)
        return found.sigmoid() if part is MonteCarloMatch else found

    before = probability().detach()
    for _ in range(20):
        optimizer.zero_grad()
        (probability().sum() + 3 * similarity.scale).backward()
        optimizer.step()
    assert 0 < similarity.scale.item() < 1
    assert similarity.shift.item() < 0
    assert probability().sum() < before.sum() / 2


# ---- what a similarity says of its scores, against its scores

ROUNDING = 0.005  # of the line's numbers


def with_opposites(kind):
    """Return eight embeddings, of which the last two are opposite."""
    torch.manual_seed(0)
    rows = torch.randn(8, 3, 4)
    rows[6], rows[7] = rows[0, 0], -rows[0, 0]
    if kind == "gaussian":
        return Gaussian(rows[:, 0], rows[:, 1] - 3)
    return {"vector": rows[:, 0], "set": rows, "sequence": Sequence(rows, torch.full((8,), 3))}[kind]


OPTIONS = [
    *((name, {}) for name in SIMILARITIES),
    ("smooth-chamfer", {"alpha": 1.0}),
    ("wasserstein", {"form": "printed"}),
    ("kl", {"direction": "caption-image"}),
]


@pytest.mark.parametrize(("name", "options"), OPTIONS)
def test_scores_lie_where_the_line_says(name, options):
    similarity = SIMILARITIES[name](**options).eval()
    ones = with_opposites(similarity.embedding)
    with torch.no_grad():
        scores = similarity(ones, ones)
    said = similarity.score
    assert said.startswith("the ")  # it follows "A score is"
    if found := re.search(r"from (\S+) to (\S+)( \+ ln\(K\) / alpha)?$", said):
        beyond = math.log(3) / similarity.alpha if found[3] else 0
        assert float(found[1]) - ROUNDING <= scores.min() < scores.max() <= float(found[2]) + beyond + ROUNDING
    elif said.endswith("at most 0"):
        assert scores.max() <= ROUNDING


def test_lines_are_true_of_every_option():
    alike = torch.ones(1, 4, 2)  # ends reached: every cosine is 1
    assert SIMILARITIES["smooth-chamfer"](alpha=1.0)(alike, alike).item() == pytest.approx(1 + math.log(4))
    assert "1 + ln(K) / alpha" in SIMILARITIES["smooth-chamfer"].score
    assert SIMILARITIES["assignment"]()(alike[:, :2], alike).item() == pytest.approx(math.e - 1)


def test_a_similarity_of_ones_own_says_itself_that_it_normalises():
    class Product(SIMILARITIES["cosine"]):
        def forward(self, images, captions):
            return images @ captions.T

    rows = torch.tensor([[3.0, 4.0]])
    assert torch.equal(Product().normalised(rows), rows) and not Product.dot_product
    assert torch.allclose(SIMILARITIES["cosine"]().normalised(rows), rows / 5)
