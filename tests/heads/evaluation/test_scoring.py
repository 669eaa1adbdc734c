"""The unit elements that stand for a sample of each kind of embedding."""

import pytest
import torch
from torch.nn.functional import normalize

from xret.heads.evaluation.scoring import Side
from xret.heads.modules.embedding import Gaussian, Joint, Sequence

VECTOR, SET, ROWS = torch.randn(2, 3), torch.randn(2, 4, 3), torch.randn(2, 5, 3)
LENGTH = torch.tensor([2, 5])
MEANS = torch.stack([normalize(rows[:length], dim=1).mean(0) for rows, length in zip(ROWS, LENGTH, strict=True)])


@pytest.mark.parametrize(
    ("embedding", "expected"),
    [
        (VECTOR, VECTOR[:, None]),
        (SET, SET),
        (Gaussian(VECTOR, SET[:, 0]), VECTOR[:, None]),
        (Sequence(ROWS, LENGTH), MEANS[:, None]),
        (Joint([VECTOR, SET]), torch.cat([normalize(VECTOR, dim=1), normalize(SET, dim=2).mean(1)], 1)[:, None]),
    ],
    ids=["vector", "set", "gaussian", "sequence", "joint"],
)
def test_elements_are_of_unit_length(embedding, expected):
    torch.testing.assert_close(Side(embedding, None, LENGTH).elements, normalize(expected, dim=2))
