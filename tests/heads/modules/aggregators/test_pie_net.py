"""PIE-Net against recorded values."""

import pytest
import torch
from recorded import DTYPES, assert_gradients, assert_near, bits, leaf, near

from xret.heads.modules.aggregators.pie_net import PIENet

NAMES = {"hidden": "attn1", "score": "attn2", "residual": "fc", "norm": "ln"}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", ["nomask", "masked"])
@pytest.mark.parametrize("case", ["image", "text", "one_slot"])
def test_recorded_values(golden, case, variant, dtype):
    data = golden("pie_head")
    leaves = {name: leaf(data, f"{case}/in_{name}", dtype) for name in ("local", "global")}
    local, global_ = leaves.values()
    length = torch.tensor(data[f"{case}/in_lengths"])
    if variant == "nomask":
        length = torch.full_like(length, local.shape[1])
    slots = len(data[f"{case}/w_attn2.weight"])
    module = PIENet(local.shape[2], global_.shape[1], slots=slots)
    owners = {name: NAMES[name.rpartition(".")[0]] for name in module.state_dict()}
    module.load_state_dict(
        {name: torch.tensor(data[f"{case}/w_{owner}.{name.rpartition('.')[2]}"]) for name, owner in owners.items()}
    )
    aggregated = module.to(dtype)(local, length, global_)

    assert aggregated.embedding.shape == (len(local), slots, global_.shape[1])
    weights = torch.tensor(data[f"{case}/in_cotangent"]).view_as(aggregated.embedding)
    for name, actual in {
        "set": aggregated.embedding,
        "residual": aggregated.slots,
        "attn": aggregated.attention[0, :, 0].transpose(1, 2),
    }.items():
        expected = torch.tensor(data[f"{case}/out{bits(dtype)}_{variant}_{name}"])  # one slot has no axis of its own
        assert_near(actual, expected.view_as(actual), near(dtype))
    assert_gradients(data, variant, aggregated.embedding, leaves, dtype, f"{case}/", weights=weights)
