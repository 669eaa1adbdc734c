"""PIE-Net against recorded values."""

import pytest
import torch
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
