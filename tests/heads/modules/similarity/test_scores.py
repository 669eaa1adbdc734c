"""What a similarity says of its scores, against its scores."""

import math
import re

import pytest
import torch

from xret.heads.modules.embedding import Gaussian, Sequence
from xret.heads.modules.similarity import SIMILARITIES

ROUNDING = 0.005  # of the line's numbers


def embeddings(kind):
    """Return eight embeddings, of which the last two are opposite."""
    torch.manual_seed(0)
    rows = torch.randn(8, 3, 4)
    rows[6], rows[7] = rows[0, 0], -rows[0, 0]
    if kind == "gaussian":
        return Gaussian(rows[:, 0], rows[:, 1] - 3)
    return {"vector": rows[:, 0], "set": rows, "sequence": Sequence(rows, torch.full((8,), 3))}[kind]


@pytest.mark.parametrize("name", SIMILARITIES)
def test_scores_lie_where_the_line_says(name):
    similarity = SIMILARITIES[name]().eval()
    ones = embeddings(similarity.embedding)
    with torch.no_grad():
        scores = similarity(ones, ones)
    said = similarity.score
    assert said.startswith("the ")  # it follows "A score is"
    if found := re.search(r"from (about )?(\S+) to (\S+)$", said):
        beyond = math.log(3) / similarity.alpha if found[1] else ROUNDING
        assert float(found[2]) - beyond <= scores.min() < scores.max() <= float(found[3]) + beyond
    elif said.endswith("at most 0"):
        assert scores.max() <= ROUNDING
    else:
        assert name in ("monte-carlo-match", "cross-attention")  # without bounds
