"""Similarities by cosines against recorded values; and what holds of all beside the contract of `test_testing`."""

import itertools
import math
from functools import partial

import pytest
import torch
from recorded import DTYPES, assert_near, assert_recorded, bits, leaf, near

from xret.heads.modules.embedding import Gaussian, Sequence
from xret.heads.modules.similarity import SIMILARITIES, blocks, in_blocks
from xret.heads.modules.similarity.gaussian import KL, Wasserstein
from xret.heads.modules.similarity.samples import MonteCarloMatch, match_probability
from xret.heads.modules.similarity.sets import MIL, Cosine
from xret.similarities import Chamfer, CrossAttention, SmoothChamfer

mil, chamfer = MIL(), Chamfer()
CASES = ("main", "K2", "K3", "K5", "rect3x5", "rect5x3")


def sets(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def embeddings(kind, count, width=5, seed=0, dtype=torch.float64):
    """Return `count` embeddings of a kind, as a similarity of that kind takes them."""
    if kind == "vector":
        return sets(count, width, seed=seed, dtype=dtype)
    if kind == "set":
        return sets(count, 2, width, seed=seed, dtype=dtype)
    if kind == "gaussian":
        return Gaussian(*(sets(count, width, seed=seed + i, dtype=dtype) for i in (0, 100)))
    return Sequence(sets(count, 3, width, seed=seed, dtype=dtype), torch.arange(count) % 3 + 1)


def floats(embedding):
    """Return the tensors of an embedding that gradients are for."""
    return [embedding] if torch.is_tensor(embedding) else [x for x in embedding if x.is_floating_point()]


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
    images, captions = (embeddings(similarity.embedding, 4, 16, seed, dtype) for seed in (0, 1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = similarity(images, captions)
    assert actual.dtype == torch.float32
    assert torch.equal(actual, similarity(images, captions))


@pytest.mark.parametrize("name", SIMILARITIES)
def test_blocks_are_what_one_call_gives(name, monkeypatch):
    similarity = SIMILARITIES[name]()
    images, captions = embeddings(similarity.embedding, 7), embeddings(similarity.embedding, 11, seed=1)
    sizes = []

    def compare(some, others):
        sizes.append((len(floats(some)[0]), len(floats(others)[0])))
        return similarity(some, others)

    monkeypatch.setattr(blocks, "side", lambda *_: 4)
    torch.testing.assert_close(in_blocks(compare, images, captions), similarity(images, captions).detach())
    assert sizes == [(i, c) for c in (4, 4, 3) for i in (4, 3)]


def test_blocks_of_large_sets_are_smaller(monkeypatch):
    monkeypatch.setattr(blocks, "CELLS", 3 * 3 * 6 * 6 + 1)
    sizes = []

    def compare(some, others):
        sizes.append((len(some), len(others)))
        return mil(some, others)

    images, captions = sets(5, 6, 4), sets(4, 6, 4, seed=1)
    torch.testing.assert_close(in_blocks(compare, images, captions), mil(images, captions))
    assert sizes == [(3, 3), (2, 3), (3, 1), (2, 1)]
    assert blocks.side(sets(1, 6, 4), sets(1, 100, 4)) == 1
    assert blocks.side(images[:, 0], captions[:, 0]) == 18


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
    sides = [embeddings(side, 2) if isinstance(side, str) else torch.ones(side) for side in (images, captions)]
    with pytest.raises(ValueError, match=match):
        similarity(*sides)


@pytest.mark.parametrize("kind", ["gaussian", "sequence"])
def test_two_widths_are_named(kind):
    similarity = {"gaussian": Wasserstein(), "sequence": CrossAttention()}[kind]
    with pytest.raises(ValueError, match="one width"):
        similarity(embeddings(kind, 2, 3), embeddings(kind, 2, 4))
