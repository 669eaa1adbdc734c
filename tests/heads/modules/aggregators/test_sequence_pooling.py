"""Self-attention and Seq2Seq against torch's own, each sample alone, and their size against the paper's."""

import pytest
import torch
from torch import nn

from xret.heads.modules.aggregators.sequence_pooling import SelfAttention, Seq2Seq

LENGTH = torch.tensor([5, 3, 1])


def local_rows():
    torch.manual_seed(1)
    return torch.randn(3, 5, 8, dtype=torch.float64)


def test_self_attention_is_that_of_torch():
    module, local = SelfAttention(8, 8).double(), local_rows()
    reference = nn.MultiheadAttention(8, 1, bias=False, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        reference.in_proj_weight.copy_(torch.cat([module.query.weight, module.key.weight, module.value.weight]))
        reference.out_proj.weight.copy_(torch.eye(8))
    aggregated = module(local, LENGTH, None)
    for b, rows in enumerate(LENGTH.tolist()):
        sample = local[b : b + 1, :rows]
        expected = sample + reference(sample, sample, sample)[0]
        torch.testing.assert_close(aggregated.rows.rows[b, :rows], expected[0])
        torch.testing.assert_close(aggregated.embedding[b], expected[0].mean(0))
        assert (aggregated.rows.rows[b, rows:] == 0).all()


def test_seq2seq_is_the_last_state_of_a_gru():
    module, local = Seq2Seq(8, 4).double(), local_rows()
    embedding = module(local, LENGTH, None).embedding
    for b, rows in enumerate(LENGTH.tolist()):
        torch.testing.assert_close(embedding[b], module.gru(local[b, :rows])[1][0])


@pytest.mark.parametrize(("part", "millions"), [(SelfAttention, 3.15), (Seq2Seq, 6.30)])
def test_number_of_weights_is_that_of_the_paper(part, millions):
    with torch.device("meta"):
        module = part(1024, 1024)
    assert sum(weight.numel() for weight in module.parameters()) / 1e6 == pytest.approx(millions, abs=0.01)
