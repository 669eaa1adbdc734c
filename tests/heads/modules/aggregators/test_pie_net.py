"""PIE-Net against recorded values and a loop over heads and rows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded import assert_near, near

from xret.heads.modules.aggregators.pie_net import PIENet

NAMES = {"hidden": "attn1", "score": "attn2", "residual": "fc", "norm": "ln"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("variant", ["nomask", "masked"])
@pytest.mark.parametrize("case", ["image", "text", "one_slot"])
def test_recorded_values(golden, case, variant, dtype):
    data = golden("pie_head")
    local = torch.tensor(data[f"{case}/in_local"]).to(dtype).requires_grad_()
    global_ = torch.tensor(data[f"{case}/in_global"]).to(dtype).requires_grad_()
    length = torch.tensor(data[f"{case}/in_lengths"])
    if variant == "nomask":
        length = torch.full_like(length, local.shape[1])
    slots = len(data[f"{case}/w_attn2.weight"])
    module = PIENet(local.shape[2], global_.shape[1], slots=slots)
    owners = {name: NAMES[name.rpartition(".")[0]] for name in module.state_dict()}
    module.load_state_dict(
        {name: torch.tensor(data[f"{case}/w_{owner}.{name.rpartition('.')[2]}"]) for name, owner in owners.items()}
    )
    module.to(dtype)

    aggregated = module(local, length, global_)
    cotangent = torch.tensor(data[f"{case}/in_cotangent"]).view_as(aggregated.embedding)
    (aggregated.embedding * cotangent).sum().backward()

    bits = "64" if dtype is torch.float64 else "32"
    assert aggregated.embedding.shape == (len(local), slots, global_.shape[1])
    for name, actual in {
        "set": aggregated.embedding,
        "residual": aggregated.slots,
        "attn": aggregated.attention[0, :, 0].transpose(1, 2),
    }.items():
        expected = torch.tensor(data[f"{case}/out{bits}_{variant}_{name}"])  # one slot has no axis of its own there
        assert_near(actual, expected.view_as(actual), near(dtype))
    assert_near(local.grad, data[f"{case}/grad{bits}_{variant}_local"], near(dtype))
    assert_near(global_.grad, data[f"{case}/grad{bits}_{variant}_global"], near(dtype))


def make(slots=3):
    torch.manual_seed(0)
    return PIENet(6, 8, slots=slots).double()


@settings(max_examples=30)
@given(
    seed=st.integers(0, 1000),
    length=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    slots=st.integers(1, 3),
)
def test_is_a_loop_over_samples_and_heads(seed, length, slots):
    module = make(slots)
    generator = torch.Generator().manual_seed(seed)
    local = torch.randn(len(length), 6, 6, generator=generator, dtype=torch.float64)
    global_ = torch.randn(len(length), 8, generator=generator, dtype=torch.float64)
    aggregated = module(local, torch.tensor(length), global_)
    assert aggregated.attention.shape == (1, len(length), 1, slots, 6)
    for b, rows in enumerate(length):
        for k in range(slots):
            hidden = [(module.hidden.weight @ row).tanh() for row in local[b, :rows]]
            weights = torch.stack([module.score.weight[k] @ h for h in hidden]).exp()
            weights = weights / weights.sum()
            pooled = sum(weight * row for weight, row in zip(weights, local[b], strict=False))
            residual = 1 / (1 + (-(module.residual.weight @ pooled + module.residual.bias)).exp())
            torch.testing.assert_close(aggregated.attention[0, b, 0, k, :rows], weights)
            torch.testing.assert_close(aggregated.slots[b, k], residual)
            fused = global_[b] + residual
            unit = (fused - fused.mean()) / (fused.var(correction=0) + 1e-5).sqrt()
            torch.testing.assert_close(aggregated.embedding[b, k], unit)
