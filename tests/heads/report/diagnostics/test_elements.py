"""Elements of embedding sets against sets made by hand, and against loops over everything."""

import math
from dataclasses import asdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xret.heads.evaluation.metrics import log_circular_variance
from xret.heads.modules.similarity.matching import matched
from xret.heads.modules.similarity.sets import Chamfer, Mil, SmoothChamfer
from xret.heads.report.diagnostics.circular_variance import circular_variance
from xret.heads.report.diagnostics.elements import ablated_rsum, mean_cosines, wins

OWNER = torch.tensor([0, 0, 1, 2, 2, 3])


def angles(*degrees):
    """Return unit vectors of the plane at these angles, of lengths that must not matter."""
    radians = torch.tensor(degrees).deg2rad()
    vectors = torch.stack([radians.cos(), radians.sin()], -1)
    return vectors * torch.arange(1, vectors[..., 0].numel() + 1).view(*vectors.shape[:-1], 1)


def random_sets(seed, count, elements, dim=5):
    return torch.randn(count, elements, dim, generator=torch.Generator().manual_seed(seed))


def plain_rsum(images, captions, owner, compare):
    """Count ranks in loops, ties pessimistic."""
    similarity = compare(images, captions)
    ranks_of_images, ranks_of_captions = [], []
    for i in range(len(images)):
        best = max(similarity[i, c] for c in range(len(captions)) if owner[c] == i)
        ranks_of_images.append(sum(bool(similarity[i, c] >= best) for c in range(len(captions)) if owner[c] != i))
    for c in range(len(captions)):
        own = similarity[owner[c], c]
        ranks_of_captions.append(sum(bool(similarity[i, c] >= own) for i in range(len(images)) if i != owner[c]))
    total = 0.0
    for k in (1, 5, 10):
        for found in (ranks_of_images, ranks_of_captions):
            total += 100 * sum(rank < k for rank in found) / len(found)
    return total


def test_circular_variance_of_known_angles():
    # A right angle: the mean has the norm sqrt(1/2). Opposite: 0. The same twice: 1.
    images, captions = angles([0.0, 90.0], [0.0, 180.0]), angles([30.0, 30.0], [0.0, 90.0])
    found = circular_variance(images, captions)
    right = 1 - math.sqrt(0.5)
    assert found.log.image == pytest.approx(math.log((right + 1) / 2))
    assert found.log.text == pytest.approx(math.log(right / 2))
    assert found.log.both == pytest.approx(math.log((2 * right + 1) / 4))
    assert found.log_squared.image == pytest.approx(math.log((0.5 + 1) / 2))
    assert found.log_squared.text == pytest.approx(math.log(0.5 / 2))
    assert found.log_squared.both == pytest.approx(math.log((0.5 + 1 + 0.5) / 4))


def test_circular_variance_is_the_metric_and_bounded_for_collapsed_sets():
    sets, others = random_sets(0, 30, 4), random_sets(1, 50, 3)
    found = circular_variance(sets, others)
    assert found.log.image == pytest.approx(log_circular_variance(sets))
    assert found.log.text == pytest.approx(log_circular_variance(others))
    same = random_sets(2, 6, 1).expand(-1, 4, -1)
    assert all(value < -30 for form in asdict(circular_variance(same, same)).values() for value in form.values())


@pytest.mark.parametrize("compare", [Mil(), Chamfer(), SmoothChamfer(), matched])
def test_rsum_of_some_elements_is_a_plain_count_over_what_is_left(compare):
    images, captions = random_sets(3, 4, 3), random_sets(4, 6, 2)
    found = ablated_rsum(images, captions, OWNER, compare, "pessimistic")

    def plain(image_elements, text_elements):
        return pytest.approx(plain_rsum(images[:, image_elements], captions[:, text_elements], OWNER.tolist(), compare))

    assert found.all == plain([0, 1, 2], [0, 1])
    assert found.image.only == [plain([k], [0, 1]) for k in range(3)]
    assert found.image.without == [plain([1, 2], [0, 1]), plain([0, 2], [0, 1]), plain([0, 1], [0, 1])]
    assert found.text.only == [plain([0, 1, 2], [k]) for k in range(2)]
    assert found.text.without == [plain([0, 1, 2], [1]), plain([0, 1, 2], [0])]
    assert found.pairs == [[plain([k], [other]) for other in range(2)] for k in range(3)]
    assert len({*found.image.only, *found.text.only, found.all}) > 1


def test_sets_of_one_lack_nothing_that_could_be_left_out():
    images, captions = random_sets(5, 4, 1), random_sets(6, 6, 2)
    found = ablated_rsum(images, captions, OWNER, Mil(), "pessimistic")
    assert found.image.without is None
    assert found.image.only == [found.all]
    assert len(found.text.without) == 2


def test_ties_are_counted_as_asked():
    same = torch.ones(4, 2, 3), torch.ones(6, 2, 3)
    rsum = {ties: ablated_rsum(*same, OWNER, Mil(), ties).all for ties in ("pessimistic", "mean", "optimistic")}
    assert rsum["pessimistic"] < rsum["mean"] < rsum["optimistic"] == 600


def test_the_winners_of_pairs_made_by_hand():
    images = angles([0.0, 90.0], [0.0, 90.0])
    # 10 is next to element 0 of the image, by the caption's element 0; 80 next to 1, by 1; 200 and 300 to 0 by 1.
    captions = angles([10.0, 150.0], [180.0, 80.0], [200.0, 300.0])
    found = wins(images, captions, torch.tensor([0, 1, 1]))
    assert found.pairs == [pytest.approx([1 / 3, 1 / 3]), pytest.approx([0, 1 / 3])]
    assert found.image == pytest.approx([2 / 3, 1 / 3])
    assert found.text == pytest.approx([1 / 3, 2 / 3])


def test_collapsed_sets_have_no_winner():
    images, captions = torch.eye(3)[:, None].expand(-1, 4, -1), torch.eye(3)[:, None].expand(-1, 2, -1)
    found = wins(images, captions, torch.arange(3))
    assert found.image == pytest.approx([0.25] * 4)
    assert found.text == pytest.approx([0.5] * 2)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1000), k1=st.integers(1, 4), k2=st.integers(1, 4), block=st.sampled_from([1, 4, 4096]))
def test_winners_and_cosines_are_those_of_loops(seed, k1, k2, block, monkeypatch_module):
    monkeypatch_module.setattr("xret.heads.report.diagnostics.elements.PAIRS", block)
    images, captions = random_sets(seed, 4, k1), random_sets(seed + 1, 6, k2)
    cosine = torch.nn.functional.cosine_similarity
    share = torch.zeros(k1, k2)
    matching, every = torch.zeros(k1, k2), torch.zeros(k1, k2)
    for c, owner in enumerate(OWNER.tolist()):
        table = torch.stack([torch.stack([cosine(a, b, 0) for b in captions[c]]) for a in images[owner]])
        share.view(-1)[table.argmax()] += 1 / 6
        matching += table / 6
    for a in range(k1):
        for b in range(k2):
            every[a, b] = sum(cosine(image[a], caption[b], 0) for image in images for caption in captions) / 24
    found, means = wins(images, captions, OWNER), mean_cosines(images, captions, OWNER)
    torch.testing.assert_close(torch.tensor(found.pairs), share)
    torch.testing.assert_close(torch.tensor(means.matching), matching)
    torch.testing.assert_close(torch.tensor(means.any), every)
    for side, sets in (("image", images), ("text", captions)):
        within = [[sum(cosine(s[a], s[b], 0) for s in sets) / len(sets) for b in range(s.shape[0])]
                  for s in sets[:1] for a in range(s.shape[0])]  # fmt: skip
        torch.testing.assert_close(torch.tensor(getattr(means, side)), torch.tensor(within))


@pytest.fixture(scope="module")
def monkeypatch_module():
    with pytest.MonkeyPatch.context() as patch:
        yield patch
