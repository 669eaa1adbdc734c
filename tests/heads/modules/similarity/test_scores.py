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


OPTIONS = [
    *((name, {}) for name in SIMILARITIES),
    ("smooth-chamfer", {"alpha": 1.0}),
    ("wasserstein", {"form": "printed"}),
    ("kl", {"direction": "caption-image"}),
]


@pytest.mark.parametrize(("name", "options"), OPTIONS)
def test_scores_lie_where_the_line_says(name, options):
    similarity = SIMILARITIES[name](**options).eval()
    ones = embeddings(similarity.embedding)
    with torch.no_grad():
        scores = similarity(ones, ones)
    said = similarity.score
    assert said.startswith("the ")  # it follows "A score is"
    if found := re.search(r"from (\S+) to (\S+)( \+ ln\(K\) / alpha)?$", said):
        beyond = math.log(3) / similarity.alpha if found[3] else 0
        assert float(found[1]) - ROUNDING <= scores.min() < scores.max() <= float(found[2]) + beyond + ROUNDING
    elif said.endswith("at most 0"):
        assert scores.max() <= ROUNDING


def test_lines_are_true_of_every_option():
    alike = torch.ones(1, 4, 2)  # ends reached: every cosine is 1
    assert SIMILARITIES["smooth-chamfer"](alpha=1.0)(alike, alike).item() == pytest.approx(1 + math.log(4))
    assert "1 + ln(K) / alpha" in SIMILARITIES["smooth-chamfer"].score
    assert SIMILARITIES["assignment"]()(alike[:, :2], alike).item() == pytest.approx(math.e - 1)


def test_a_similarity_of_ones_own_says_itself_that_it_normalises():
    class Product(SIMILARITIES["cosine"]):
        def forward(self, images, captions):
            return images @ captions.T

    rows = torch.tensor([[3.0, 4.0]])
    assert torch.equal(Product().normalised(rows), rows) and not Product.dot_product
    assert torch.allclose(SIMILARITIES["cosine"]().normalised(rows), rows / 5)
