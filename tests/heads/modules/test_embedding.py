"""Embeddings of each kind: joined batch by batch, taken apart by name and put together again."""

import pytest
import torch

from xret.heads.modules.embedding import Gaussian, Joint, Sequence, concatenate, embedding_of, kind_of, tensors_of
from xret.heads.modules.padding import valid_rows

GENERATOR = torch.Generator().manual_seed(0)
WHOLE = {
    "vector": torch.randn(5, 3, generator=GENERATOR),
    "set": torch.randn(5, 2, 3, generator=GENERATOR),
    "gaussian": Gaussian(*torch.randn(2, 5, 3, generator=GENERATOR)),
    "sequence": Sequence(torch.randn(5, 4, 3, generator=GENERATOR), torch.tensor([2, 1, 4, 3, 4])),
}
WHOLE["joint"] = Joint(WHOLE.values())


def part(embedding, rows):
    """The samples of a slice, sequences no longer than the longest of them."""
    if isinstance(embedding, Joint):
        return Joint(part(one, rows) for one in embedding)
    if isinstance(embedding, Sequence):
        return Sequence(embedding.rows[rows, : embedding.length[rows].max()], embedding.length[rows])
    return embedding[rows] if isinstance(embedding, torch.Tensor) else Gaussian(*(t[rows] for t in embedding))


@pytest.mark.parametrize("kind", WHOLE)
def test_what_is_joined_or_named_is_the_embedding(kind):
    def assert_is(found, expected):
        assert kind_of(found) == kind_of(expected)
        for name, tensor in tensors_of(expected).items():
            torch.testing.assert_close(tensors_of(found)[name], tensor)

    whole = WHOLE[kind]
    named = {**tensors_of(whole), **({} if kind == "joint" else {"other": torch.zeros(1)})}
    assert len(named) == {"joint": 6, "gaussian": 3, "sequence": 3}.get(kind, 2)
    assert_is(embedding_of(named), whole)
    assert_is(embedding_of(tensors_of(whole)), whole)
    joined = concatenate([part(whole, slice(0, 2)), part(whole, slice(2, 5))])
    for number, one in enumerate(joined if kind == "joint" else [joined]):
        expected = [*WHOLE.values()][number] if kind == "joint" else whole
        if isinstance(one, Sequence):  # what stands after a sample's length means nothing
            assert one.rows.shape == expected.rows.shape and torch.equal(one.length, expected.length)
            one, expected = (side.rows[valid_rows(*side)] for side in (one, expected))
        assert_is(one, expected)


def test_the_log_determinant_is_that_of_the_covariance():
    gaussian = WHOLE["gaussian"]
    covariances = torch.diag_embed(gaussian.log_variance.double().exp())
    torch.testing.assert_close(gaussian.log_determinant(), torch.linalg.slogdet(covariances).logabsdet)
