"""Losses on embeddings alone, against recorded values, torch's own divergence and loops; and what a side lacks."""

import math

import pytest
import torch
from recorded import DTYPES, assert_gradients, assert_near, assert_recorded, bits, leaf, near
from torch.distributions import Normal, kl_divergence
from torch.nn.functional import normalize

from xret.heads.modules.aggregators import Aggregated
from xret.heads.modules.embedding import Gaussian, Sequence
from xret.heads.modules.losses import regularisers
from xret.losses import (
    MMD,
    CaptionGeneration,
    Diversity,
    GlobalDiscriminative,
    InfoNCE,
    InformationBottleneck,
    IntraSetDivergence,
    Sigmoid,
    Uniformity,
)


def diversity(slots, form="exponential"):
    return Diversity(form=form).of("image", Aggregated(None, slots))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("form", "case", "key", "inputs"),
    [("exponential", "", "div_slots_mean", "slots"), ("gram", "single/", "gram_diversity", "set")],
)
def test_recorded_diversity(golden, form, case, key, inputs, dtype):
    data = golden("triplet_and_regularisers")
    leaves = {side: leaf(data, f"{case}in_{side}_{inputs}", dtype) for side in ("img", "txt")}
    loss = Diversity(form=form)(None, None, *(Aggregated(None, slots) for slots in leaves.values()))
    named = {f"{side}_slots" if form == "exponential" else side: slots for side, slots in leaves.items()}
    assert_recorded(data, key, loss, named, dtype, case)
    if form == "exponential":
        pairs = diversity(leaves["img"]) * math.comb(leaves["img"].shape[1], 2)
        assert_near(pairs, data[f"out{bits(dtype)}_div_img_slots_pairsum"], near(dtype))


def test_gram_diversity_where_nothing_is_alike_has_no_gradient():
    slots = torch.eye(4)[None, :3].clone().requires_grad_()
    loss = diversity(slots, "gram")
    loss.backward()
    assert loss.item() == 0
    assert (slots.grad == 0).all()


def mmd(images, captions):
    return MMD()(None, None, Aggregated(images), Aggregated(captions))


@pytest.mark.parametrize("dtype", DTYPES)
def test_recorded_mmd(golden, dtype):
    data = golden("triplet_and_regularisers")
    leaves = {side: leaf(data, f"in_{side}", dtype) for side in ("img", "txt")}
    loss, exact = mmd(*leaves.values()), dtype is torch.float64
    assert_near(loss, data[f"out{bits(dtype)}_mmd_root_exact"], 1e-9, 0 if exact else 1e-5)
    assert_gradients(data, "mmd_root_exact", loss, leaves, dtype, tolerance=1e-7 if exact else 1e-3)
    # The recorded distances of one caption an image come from a matrix product: a point is 1e-8 away from itself.
    single = mmd(*(leaf(data, f"single/in_{side}_set", dtype) for side in leaves))
    assert_near(single, data[f"single/out{bits(dtype)}_mmd_root"], 1e-7, 0 if exact else 1e-5)


def mmd_by_loop(x, y):
    x, y = (normalize(e, dim=-1).flatten(0, -2).tolist() for e in (x, y))

    def mean(a, b):
        return sum(math.exp(-0.5 * math.dist(p, q)) for p in a for q in b) / (len(a) * len(b))

    return mean(x, x) - 2 * mean(x, y) + mean(y, y)


@pytest.mark.parametrize("shape", [(3, 5), (3, 1, 5), (2, 3, 5)])
def test_mmd_is_the_loop(shape):
    images, captions = torch.randn(shape, dtype=torch.float64), torch.randn(7, *shape[1:], dtype=torch.float64)
    assert mmd(images, captions).item() == pytest.approx(mmd_by_loop(images, captions), rel=1e-9)


@pytest.mark.parametrize("dtype", DTYPES)
def test_mmd_of_coinciding_elements_has_no_gradient(dtype):
    # Collapsed sets and repeated captions: every distance is zero up to rounding.
    images = torch.randn(1, 1, 512, dtype=dtype).expand(4, 4, 512).clone().requires_grad_()
    captions = (3 * images.detach()[:2]).requires_grad_()
    loss = mmd(images, captions)
    loss.backward()
    assert abs(loss.item()) < 1e-5
    assert images.grad.norm() < 1e-5
    assert captions.grad.norm() < 1e-5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("scale", "margin"), [(1, 0), (4, 0.2), (16, 0.5)])
@pytest.mark.parametrize("name", ["gd", "isd"])
def test_recorded_regularisers_of_sets(golden, monkeypatch, name, scale, margin, dtype):
    monkeypatch.setattr(regularisers, "SCALE", scale)
    data = golden("set_regularisers")
    leaves = {"set": leaf(data, "in_set", dtype)}
    if name == "gd":
        leaves["global"] = leaf(data, "in_global", dtype)
        loss = 2 * GlobalDiscriminative(margin=margin).of("image", Aggregated(leaves["set"], global_=leaves["global"]))
    else:
        loss = IntraSetDivergence(margin=margin).of("image", Aggregated(leaves["set"]))
    assert_recorded(data, f"{name}_s{scale}_m{margin}", loss, leaves, dtype)


def information_bottleneck(mean, log_variance):
    """The loss of one side."""
    return InformationBottleneck().of("image", Aggregated(Gaussian(mean, log_variance)))


def uniformity(vectors):
    """The loss of vectors that are all of images."""
    return Uniformity()(None, None, Aggregated(vectors), Aggregated(vectors[:0]))


def sides(data, dtype):
    leaves = {
        f"{side}_{part}": leaf(data, f"soft/in_{side}_{part}", dtype)
        for side in ("img", "txt")
        for part in ("samples", "logsigma")
    }
    images, captions = (
        Aggregated(
            leaves[f"{side}_samples"],
            # The mean is not what the samples have: the code must take theirs.
            gaussian=Gaussian(torch.full((6, 12), 99.0, dtype=dtype), 2 * leaves[f"{side}_logsigma"]),
        )
        for side in ("img", "txt")
    )
    return images, captions, leaves


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("key", ["vib", "uniformity"])
def test_recorded_losses_of_samples(golden, key, dtype):
    data = golden("probabilistic_losses")
    images, captions, leaves = sides(data, dtype)
    loss = (InformationBottleneck(form="pcme") if key == "vib" else Uniformity())(None, None, images, captions)
    if key == "uniformity":  # which reads no more
        leaves = {side: leaves[f"{side}_samples"] for side in ("img", "txt")}
    assert_recorded(data, key, loss, leaves, dtype, "soft/")


@pytest.mark.parametrize("dtype", DTYPES)
def test_recorded_bottleneck_of_gaussians(golden, dtype):
    data = golden("probabilistic_losses")
    images, captions = (
        Aggregated(
            Gaussian(normalize(leaf(data, f"csd/in_{s}_mean", dtype), dim=1), leaf(data, f"csd/in_{s}_logvar", dtype))
        )
        for s in ("img", "txt")
    )
    loss = InformationBottleneck()(None, None, images, captions)
    assert_near(loss, data[f"csd/out{bits(dtype)}_vib1e-4_vib"], near(dtype))


def test_bottleneck_is_the_divergence_from_the_standard_normal():
    mean, log_variance = torch.randn(3, 4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    divergence = kl_divergence(Normal(mean, (log_variance / 2).exp()), Normal(0.0, 1.0))
    expected = divergence.mean().item()
    assert information_bottleneck(mean, log_variance).item() == pytest.approx(expected, rel=1e-12)
    mean.requires_grad_()
    assert torch.autograd.gradcheck(lambda m: information_bottleneck(m, log_variance), mean)
    assert information_bottleneck(torch.zeros(2, 3), torch.zeros(2, 3)) == 0


def test_uniformity_of_vectors_far_apart_and_of_one():
    far = torch.tensor([[100.0, 0.0], [0.0, 100.0]], requires_grad=True)
    loss = uniformity(far)
    loss.backward()
    assert loss.item() == pytest.approx(-2 * 20_000)
    assert far.grad.isfinite().all()
    single = torch.ones(1, 3, requires_grad=True)
    uniformity(single).backward()
    assert (single.grad == 0).all()


def test_vectors_and_sets_count_alike():
    images, captions = torch.randn(2, 3), torch.randn(2, 2, 3)
    expected = uniformity(torch.cat([images, captions.flatten(0, 1)]))
    assert Uniformity()(None, None, Aggregated(images), Aggregated(captions)) == expected


GRAM, PCME = Diversity(form="gram"), InformationBottleneck(form="pcme")


def side(count, elements=3, width=16, dtype=torch.float64):
    """Return all that an aggregator can give of one side."""
    torch.manual_seed(count)
    sets, slots = torch.randn(2, count, elements, width).to(dtype)
    global_, mean, spread = torch.randn(3, count, width).to(dtype)
    gaussian = Gaussian(mean, spread + 4)
    return Aggregated(sets, slots=slots, global_=global_, gaussian=gaussian)


@pytest.mark.parametrize("loss", [InfoNCE(), Sigmoid()])
def test_half_similarities_are_compared_in_float32(loss):
    similarity, positives = torch.randn(4, 6).half(), torch.arange(4)[:, None] == torch.tensor([0, 0, 1, 2, 3, 3])
    similarity = similarity.masked_fill(torch.arange(24).view(4, 6) == 2, -torch.inf)
    found = loss(similarity, positives)
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(loss(similarity.double(), positives).item(), rel=1e-5)


GAUSSIAN = Gaussian(torch.ones(2, 4), torch.ones(2, 4))
ROWS = Sequence(torch.ones(2, 3, 5), torch.tensor([3, 3]))


@pytest.mark.parametrize(
    ("loss", "missing", "changes"),
    [
        (MMD(), "vectors or sets", {"embedding": GAUSSIAN}),
        (Uniformity(), "vectors or sets", {"embedding": GAUSSIAN}),
        (Diversity(), "slots", {"slots": None}),
        (InformationBottleneck(), "a Gaussian", {"gaussian": None}),
        (PCME, "samples", {"embedding": GAUSSIAN}),
        (GlobalDiscriminative(), "embedding sets", {"embedding": torch.ones(2, 4)}),
        (GlobalDiscriminative(), "the global feature", {"global_": None}),
        (IntraSetDivergence(), "embedding sets", {"embedding": torch.ones(2, 4)}),
        (CaptionGeneration(5, 7), "local rows", {"rows": None}),
        (CaptionGeneration(5, 7), "word ids", {"token": None}),
    ],
)
def test_what_a_side_does_not_give_is_named(loss, missing, changes):
    whole = side(2)._replace(rows=ROWS, token=ROWS)
    for given, name in (((whole._replace(**changes), whole), "image"), ((whole, whole._replace(**changes)), "text")):
        if {"rows": "text", "token": "image"}.get(*changes) != name:  # which this loss does not read there
            with pytest.raises(ValueError, match=f"needs {missing}, which the {name} side does not give"):
                loss(None, torch.eye(2) > 0, *given)


@pytest.mark.parametrize("loss", [Diversity(), GRAM, IntraSetDivergence()])
def test_sets_of_one_element_are_an_attached_zero(loss):
    sides = side(2, 1), side(3, 1)
    leaves = [one.slots if isinstance(loss, Diversity) else one.embedding for one in sides]
    for values in leaves:
        values.requires_grad_()
    value = loss(None, None, *sides)
    value.backward()
    assert value.item() == 0
    assert not any(values.grad.any() for values in leaves)
