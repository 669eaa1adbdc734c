"""Embeddings of each kind: joined batch by batch, taken apart by name and put together again."""

import pytest
import torch
from torch.testing import assert_close

from xret.heads.modules.embedding import Gaussian, Joint, Sequence, concatenate, embedding_of, kind_of, tensors_of
from xret.heads.modules.padding import zero_padding

LENGTH = torch.tensor([2, 1, 4, 3, 4])
WHOLE = {
    "vector": torch.randn(5, 3),
    "set": torch.randn(5, 2, 3),
    "gaussian": Gaussian(*torch.randn(2, 5, 3)),
    "sequence": Sequence(zero_padding(torch.randn(5, 4, 3), LENGTH), LENGTH),
}
WHOLE["joint"] = Joint(WHOLE.values())


def part(embedding, rows):
    """The samples of a slice, sequences no longer than the longest of them."""
    if isinstance(embedding, Sequence):
        return Sequence(embedding.rows[rows, : embedding.length[rows].max()], embedding.length[rows])
    if isinstance(embedding, Joint):
        return Joint(part(one, rows) for one in embedding)
    return embedding[rows] if isinstance(embedding, torch.Tensor) else Gaussian(*(t[rows] for t in embedding))


@pytest.mark.parametrize("kind", WHOLE)
def test_what_is_joined_or_named_is_the_embedding(kind):
    whole = WHOLE[kind]
    named = tensors_of(whole)
    beside = named if kind == "joint" else named | {"other": torch.zeros(1)}
    joined = concatenate([part(whole, slice(0, 2)), part(whole, slice(2, 5))])
    for found in (joined, embedding_of(named), embedding_of(beside)):
        assert kind_of(found) == kind
        assert_close(tensors_of(found), named)


def test_the_log_determinant_is_that_of_the_covariance():
    gaussian = WHOLE["gaussian"]
    covariances = torch.diag_embed(gaussian.log_variance.double().exp())
    assert_close(gaussian.log_determinant(), torch.linalg.slogdet(covariances).logabsdet)
