"""The row transformer against torch's own layer and a loop over samples."""

import pytest
import torch
from torch import nn

from xret.heads.modules.aggregators.row_transformer import RowTransformer

LENGTHS = 5, 1, 3


@pytest.mark.parametrize("head_dim", [2, 64])
def test_against_the_library(head_dim):
    torch.manual_seed(0)
    ours = RowTransformer(8, 8, head_dim=head_dim, residual=0.7).double().eval()
    heads = max(1, 8 // head_dim)
    theirs = nn.TransformerEncoderLayer(8, heads, dim_feedforward=8, batch_first=True).double().eval()
    theirs.load_state_dict(
        dict(zip(ORDER, (ours.state_dict()[f"layer.{name}"] for name in ORDER.values()), strict=True))
    )
    local = torch.randn(3, 5, 8).double()
    made = ours(local, torch.tensor(LENGTHS), torch.zeros(3, 8)).embedding
    for vector, rows, length in zip(made, local, LENGTHS, strict=True):
        rows = rows[:length]
        largest = rows.sort(0, descending=True).values[:2].mean(0)
        torch.testing.assert_close(vector, 0.7 * largest + 0.3 * theirs(rows[None])[0].mean(0))


ORDER = {
    "self_attn.in_proj_weight": "project.weight",
    "self_attn.in_proj_bias": "project.bias",
    "self_attn.out_proj.weight": "out.weight",
    "self_attn.out_proj.bias": "out.bias",
    "linear1.weight": "mlp.0.weight",
    "linear1.bias": "mlp.0.bias",
    "linear2.weight": "mlp.3.weight",
    "linear2.bias": "mlp.3.bias",
    "norm1.weight": "norms.0.weight",
    "norm1.bias": "norms.0.bias",
    "norm2.weight": "norms.1.weight",
    "norm2.bias": "norms.1.bias",
}


def test_heads_that_do_not_divide_the_width_are_refused():
    with pytest.raises(ValueError, match="heads of width 64 do not divide rows of width 100: set head_dim"):
        RowTransformer(100, 100)
