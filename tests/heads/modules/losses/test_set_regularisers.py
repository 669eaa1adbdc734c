"""Global discriminative and intra-set divergence loss against recorded values, by hand and by loop."""

import math

import pytest
import torch
from recorded import DTYPES, assert_near, bits, leaf, near

from xret.heads.modules.aggregators import Aggregated
from xret.heads.modules.losses import set_regularisers
from xret.heads.modules.losses.set_regularisers import GlobalDiscriminative, IntraSetDivergence

CASES = [(1, 0), (4, 0.2), (16, 0.5)]


@pytest.fixture(autouse=True)
def scale_of_a_test(monkeypatch):
    monkeypatch.setattr(set_regularisers, "SCALE", 2)


def global_discriminative(elements, global_, **parameters):
    """Eq. 7 of one side."""
    return 2 * GlobalDiscriminative(**parameters).of("image", Aggregated(elements, global_=global_))


def intra_set_divergence(elements, **parameters):
    """Eq. 8 of one side."""
    return IntraSetDivergence(**parameters).of("image", Aggregated(elements))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("scale", "margin"), CASES)
def test_recorded_global_discriminative(golden, monkeypatch, scale, margin, dtype):
    monkeypatch.setattr(set_regularisers, "SCALE", scale)
    data, key = golden("set_regularisers"), f"gd_s{scale}_m{margin}"
    elements, global_ = leaf(data, "in_set", dtype), leaf(data, "in_global", dtype)
    loss = global_discriminative(elements, global_, margin=margin)
    loss.backward()
    assert_near(loss, data[f"out{bits(dtype)}_{key}"], near(dtype))
    assert_near(elements.grad, data[f"grad{bits(dtype)}_{key}_set"], near(dtype))
    assert_near(global_.grad, data[f"grad{bits(dtype)}_{key}_global"], near(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("scale", "margin"), CASES)
def test_recorded_intra_set_divergence(golden, monkeypatch, scale, margin, dtype):
    monkeypatch.setattr(set_regularisers, "SCALE", scale)
    data, key = golden("set_regularisers"), f"isd_s{scale}_m{margin}"
    elements = leaf(data, "in_set", dtype)
    loss = intra_set_divergence(elements, margin=margin)
    loss.backward()
    assert_near(loss, data[f"out{bits(dtype)}_{key}"], near(dtype))
    assert_near(elements.grad, data[f"grad{bits(dtype)}_{key}_set"], near(dtype))


def cos(x, y):
    return (x @ y / (x.norm() * y.norm())).item()


def test_loops_over_elements_and_pairs():
    elements, global_ = torch.randn(3, 4, 5, dtype=torch.float64), torch.randn(3, 5, dtype=torch.float64)
    own = [math.exp(2 * (cos(x, g) - 0.3)) for row, g in zip(elements, global_, strict=True) for x in row]
    assert global_discriminative(elements, global_, margin=0.3).item() == pytest.approx(sum(own) / 12)
    pairs = [math.exp(2 * (cos(row[i], row[j]) - 0.3)) for row in elements for j in range(4) for i in range(j)]
    assert intra_set_divergence(elements, margin=0.3).item() == pytest.approx(sum(pairs) / 18)


def test_divergence_of_a_single_element_is_an_attached_zero():
    elements = torch.randn(2, 1, 4, requires_grad=True)
    loss = intra_set_divergence(elements)
    loss.backward()
    assert loss.item() == 0
    assert (elements.grad == 0).all()


def test_both_sides():
    torch.manual_seed(0)
    images = Aggregated(torch.randn(2, 3, 4), slots=torch.randn(2, 3, 4), global_=torch.randn(2, 4))
    captions = Aggregated(torch.randn(5, 2, 4), slots=torch.randn(5, 2, 4), global_=torch.randn(5, 4))
    sides = [(side.embedding, side.global_) for side in (images, captions)]
    # Eq. 7 halves the sum of both sides, eq. 8 does not.
    gd = sum(global_discriminative(elements, g, margin=0.1).item() for elements, g in sides) / 2
    isd = sum(intra_set_divergence(elements, margin=0.1).item() for elements, _ in sides)
    arguments = (None, None, images, captions)
    assert GlobalDiscriminative(margin=0.1)(*arguments).item() == pytest.approx(gd)
    assert IntraSetDivergence(margin=0.1)(*arguments).item() == pytest.approx(isd)


def test_what_is_missing_is_named():
    whole = Aggregated(torch.ones(2, 3, 4), slots=torch.ones(2, 3, 4), global_=torch.ones(2, 4))
    vector = Aggregated(torch.ones(2, 4), global_=torch.ones(2, 4))
    for loss in (GlobalDiscriminative, IntraSetDivergence):
        with pytest.raises(ValueError, match="needs embedding sets, which the text side does not give"):
            loss()(None, None, whole, vector)
    with pytest.raises(ValueError, match="needs the global feature, which the text side does not give"):
        GlobalDiscriminative()(None, None, whole, whole._replace(global_=None))


def test_half_embeddings_are_regularised_in_float32():
    elements, global_ = torch.randn(4, 3, 16).bfloat16(), torch.randn(4, 16).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = global_discriminative(elements, global_), intra_set_divergence(elements)
    expected = global_discriminative(elements.double(), global_.double()), intra_set_divergence(elements.double())
    for loss, reference in zip(losses, expected, strict=True):
        assert loss.dtype == torch.float32
        assert loss.item() == pytest.approx(reference.item(), rel=1e-5)
