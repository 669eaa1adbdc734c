"""Elements of embedding sets against sets made by hand, and against loops over everything."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_evaluation import plain_rsum

from xret.heads.diagnostics.elements import element_tables, rsum_tables, wins
from xret.heads.modules.similarity.matching import Assignment
from xret.heads.modules.similarity.sets import MIL, Chamfer, SmoothChamfer

OWNER = torch.tensor([0, 0, 1, 2, 2, 3])


def angles(*degrees):
    """Return unit vectors of the plane at these angles, of lengths that must not matter."""
    radians = torch.tensor(degrees).deg2rad()
    vectors = torch.stack([radians.cos(), radians.sin()], -1)
    return vectors * torch.arange(1, vectors[..., 0].numel() + 1).view(*vectors.shape[:-1], 1)


def random_sets(seed, count, elements, dim=5):
    return torch.randn(count, elements, dim, generator=torch.Generator().manual_seed(seed))


def table(found, name):
    return [row[1:] for row in found[name].rows]


def test_circular_variance_of_known_angles():
    # A right angle: the mean has the norm sqrt(1/2). Opposite: 0. The same twice: 1.
    images, captions = angles([0.0, 90.0], [0.0, 180.0]), angles([30.0, 30.0], [0.0, 90.0])
    found = element_tables(images, captions, torch.arange(2), MIL(), "mean")
    right = 1 - math.sqrt(0.5)
    expected = [[(right + 1) / 2, right / 2, (2 * right + 1) / 4], [(0.5 + 1) / 2, 0.5 / 2, (0.5 + 1 + 0.5) / 4]]
    for row, values in zip(table(found, "circular variance"), expected, strict=True):
        assert row == pytest.approx([math.log(value) for value in values])
    same = random_sets(2, 6, 1).expand(-1, 4, -1)
    collapsed = element_tables(same, same, torch.arange(6), MIL(), "mean")
    assert all(value < -30 for row in table(collapsed, "circular variance") for value in row)


@pytest.mark.parametrize("compare", [MIL(), Chamfer(), SmoothChamfer(), Assignment()])
def test_rsum_of_some_elements_is_a_plain_count_over_what_is_left(compare):
    images, captions = random_sets(3, 4, 3), random_sets(4, 6, 2)
    found = rsum_tables(images, captions, OWNER, compare, "pessimistic")

    def plain(image_elements, text_elements):
        return plain_rsum(compare(images[:, image_elements], captions[:, text_elements]), OWNER.tolist())

    assert f"all elements give {plain([0, 1, 2], [0, 1]):.2f}" in found["rsum pairs"].caption
    rest = [[1, 2], [0, 2], [0, 1]]
    for k, row in enumerate(table(found, "rsum image")):
        assert row == pytest.approx([plain([k], [0, 1]), plain(rest[k], [0, 1])])
    for k, row in enumerate(table(found, "rsum caption")):
        assert row == pytest.approx([plain([0, 1, 2], [k]), plain([0, 1, 2], [1 - k])])
    for k, row in enumerate(table(found, "rsum pairs")):
        assert row == pytest.approx([plain([k], [other]) for other in range(2)])


def test_sets_of_one_lack_nothing_that_could_be_left_out():
    images, captions = random_sets(5, 4, 1), random_sets(6, 6, 2)
    found = rsum_tables(images, captions, OWNER, MIL(), "pessimistic")
    assert [row[1] for row in table(found, "rsum image")] == [None]
    assert None not in [row[1] for row in table(found, "rsum caption")]


def test_ties_are_counted_as_asked():
    same = torch.ones(4, 2, 3), torch.ones(6, 2, 3)
    rsum = [
        table(rsum_tables(*same, OWNER, MIL(), ties), "rsum image")[0][0]
        for ties in ("pessimistic", "mean", "optimistic")
    ]
    assert rsum[0] < rsum[1] < rsum[2] == 600


def test_collapsed_sets_have_no_winner():
    images, captions = torch.eye(3)[:, None].expand(-1, 4, -1), torch.eye(3)[:, None].expand(-1, 2, -1)
    assert wins(images, captions, torch.arange(3)).flatten().tolist() == pytest.approx([1 / 8] * 8)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1000), k1=st.integers(1, 4), k2=st.integers(1, 4), block=st.sampled_from([1, 4, 4096]))
def test_winners_and_cosines_are_those_of_loops(seed, k1, k2, block, monkeypatch_module):
    monkeypatch_module.setattr("xret.heads.diagnostics.elements.PAIRS", block)
    images, captions = random_sets(seed, 4, k1), random_sets(seed + 1, 6, k2)
    cosine = torch.nn.functional.cosine_similarity
    share = torch.zeros(k1, k2)
    matching, every = torch.zeros(k1, k2), torch.zeros(k1, k2)
    for c, owner in enumerate(OWNER.tolist()):
        cosines = torch.stack([torch.stack([cosine(a, b, 0) for b in captions[c]]) for a in images[owner]])
        share.view(-1)[cosines.argmax()] += 1 / 6
        matching += cosines / 6
    for a in range(k1):
        for b in range(k2):
            every[a, b] = sum(cosine(image[a], caption[b], 0) for image in images for caption in captions) / 24
    found = {
        name: torch.tensor(table(element_tables(images, captions, OWNER, MIL(), "mean"), name))
        for name in ("wins", "cosines matching", "cosines any", "cosines image", "cosines caption")
    }
    torch.testing.assert_close(found["wins"], 100 * share)
    torch.testing.assert_close(found["cosines matching"], matching)
    torch.testing.assert_close(found["cosines any"], every)
    for side, sets in (("image", images), ("caption", captions)):
        within = [[sum(cosine(s[a], s[b], 0) for s in sets) / len(sets) for b in range(s.shape[0])]
                  for s in sets[:1] for a in range(s.shape[0])]  # fmt: skip
        torch.testing.assert_close(found[f"cosines {side}"], torch.tensor(within))


@pytest.fixture(scope="module")
def monkeypatch_module():
    with pytest.MonkeyPatch.context() as patch:
        yield patch
