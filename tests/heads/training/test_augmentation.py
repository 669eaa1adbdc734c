"""Size augmentation: which rows stay, in what order, and how many."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from xret.heads.modules.padding import mean_rows, zero_padding
from xret.heads.training.augmentation import averaged, blend, drop_rows, mask_words
from xret.pipeline.reading.features import Features, side_by_side


def sample(lengths, width=2):
    """Rows numbered from 1, so that a row can be told after it has moved; padding is zero."""
    longest = max(lengths)
    inside = torch.arange(longest) < torch.tensor(lengths)[:, None]
    token = (torch.arange(1, longest + 1).expand(len(lengths), -1)) * inside
    local = token[..., None].float().expand(-1, -1, width).contiguous()
    return Features(torch.tensor(lengths), local, torch.ones(len(lengths), 3), token)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.sampled_from([0.1, 0.5, 0.9, 1.0]), st.integers(0, 99))
def test_what_stays_is_a_part_of_the_rows_in_their_order(lengths, share, seed):
    torch.manual_seed(seed)
    features = sample(lengths)
    left = drop_rows(features, share)
    assert left.global_ is features.global_
    for row, before in enumerate(lengths):
        count = int(left.length[row])
        assert 1 <= count <= before
        kept = left.token[row, :count].tolist()
        assert kept == sorted(set(kept))
        assert set(kept) <= set(range(1, before + 1))
        assert left.local[row, :count, 0].tolist() == kept
        assert not left.token[row, count:].any()
        assert not left.local[row, count:].any()
    assert left.token.shape[1] == left.local.shape[1] == int(left.length.max())


def test_the_share_is_that_of_the_rows():
    torch.manual_seed(0)
    left = drop_rows(sample([50] * 400), 0.2)
    # 20,000 rows, each kept with chance 0.8: the standard deviation of their number is 57
    assert abs(int(left.length.sum()) - 16_000) < 250
    kept = torch.bincount(left.token.flatten(), minlength=51)[1:]
    assert kept.min() > 280  # of 400, no place is dropped more often


def test_cells_that_stay_have_the_places_of_their_map():
    torch.manual_seed(0)
    features = sample([6] * 20)
    features.grid = (2, 3)
    left = drop_rows(features, 0.5)
    assert left.grid == (2, 3)
    cells = left.token - 1  # a row's number
    for row, length in enumerate(left.length.tolist()):
        assert torch.equal(left.place[row, :length], cells[row, :length])


def test_both_modalities_are_blended_by_the_same_share_with_the_same_partners():
    torch.manual_seed(0)
    images = Features(torch.tensor([3, 1, 2]), torch.rand(3, 3, 4), torch.eye(3))
    captions = Features(torch.ones(3, dtype=torch.long), torch.eye(3)[:, None], torch.rand(3, 5))
    one, other = blend(images, captions, torch.arange(3), 1.0)
    weights = one.global_  # the global features were unit vectors: these are the shares
    torch.testing.assert_close(weights.sum(1), torch.ones(3))
    torch.testing.assert_close(other.local[:, 0], weights)
    torch.testing.assert_close(one.local, torch.einsum("ab,bnc->anc", weights, images.local))
    torch.testing.assert_close(other.global_, weights @ captions.global_)
    partner = weights.fill_diagonal_(0).argmax(1)
    assert one.length.tolist() == [max(a, images.length[b]) for a, b in zip([3, 1, 2], partner, strict=True)]


def test_an_image_without_a_caption_stays_as_it_is():
    torch.manual_seed(1)
    images = Features(torch.zeros(4, dtype=torch.long), None, torch.eye(4))
    captions = Features(torch.zeros(3, dtype=torch.long), None, torch.eye(4)[[0, 1, 3]])  # each that of its image
    one, other = blend(images, captions, torch.tensor([0, 1, 3]), 1.0)
    assert one.global_[2].tolist() == [0, 0, 1, 0]
    assert torch.equal(other.global_, one.global_[[0, 1, 3]])  # pairs are blended with pairs
    assert one.global_.count_nonzero() > 4


def test_blended_averages_are_averages_blended():
    """Captions of 5, 1 and 3 rows: without `averaged` the shorter one of a pair would count by its share of rows."""
    torch.manual_seed(0)
    captions = Features(torch.tensor([5, 1, 3]), torch.rand(3, 5, 4).half(), torch.eye(3))
    captions.local = zero_padding(captions.local, captions.length)
    means = [captions.local[number, :length].float().mean(0) for number, length in enumerate([5, 1, 3])]
    other = Features(torch.tensor([2, 0, 1]), torch.rand(3, 2, 4), None)
    both = averaged(side_by_side([captions, other]), [True, False])
    assert both.others == (other,)
    torch.testing.assert_close(both.local[:, 0], torch.stack(means))
    assert averaged(other, [True]).length.tolist() == [1, 0, 1]
    one, two = blend(Features(torch.ones(3), None, torch.eye(3)), averaged(captions, [True]), torch.arange(3), 1.0)
    torch.testing.assert_close(mean_rows(two.local, two.length), one.global_ @ torch.stack(means))
    assert one.global_.count_nonzero() > 3


def test_a_share_that_varies_draws_the_same_chances_first():
    features = sample([40] * 20)
    torch.manual_seed(0)
    chance, strength = torch.rand(20, 40), torch.rand(20)
    torch.manual_seed(0)
    left = drop_rows(features, 0.3, varies=True)
    for row, (own, drawn) in enumerate(zip(chance, strength, strict=True)):
        share = 0.3 * drawn if drawn > 0.3 else 0
        kept = [place + 1 for place in range(40) if own[place] >= share]
        assert left.token[row, : left.length[row]].tolist() == kept


MASK = 30


def captions_of(lengths):
    token = torch.randint(1, MASK, (len(lengths), max(lengths)))
    inside = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return Features(torch.tensor(lengths), token=token * inside)


def test_masked_words_follow_their_lots():
    torch.manual_seed(0)
    captions = captions_of([9, 1, 5, 12])
    torch.manual_seed(1)
    lots, others = torch.rand(4, 12) / 0.7, torch.randint(1, MASK, (4, 12))
    torch.manual_seed(1)
    changed = mask_words(captions, 0.7, MASK)
    for row, length in enumerate(captions.length.tolist()):
        expected = []
        for place in range(length):
            lot = lots[row, place]
            if lot >= 1:
                expected.append(int(captions.token[row, place]))
            elif lot < 0.5:
                expected.append(MASK)
            elif lot < 0.6:
                expected.append(int(others[row, place]))
        expected = expected or [MASK]
        assert changed.length[row] == len(expected)
        assert changed.token[row, : len(expected)].tolist() == expected
        assert not changed.token[row, len(expected) :].any()
    assert changed.token.shape[1] == int(changed.length.max())


def test_a_word_always_stays():
    torch.manual_seed(0)
    changed = mask_words(Features(torch.ones(500, dtype=torch.long), token=torch.ones(500, 1).long()), 1.0, 2)
    assert changed.length.tolist() == [1] * 500
    assert set(changed.token.flatten().tolist()) == {1, 2}
    assert mask_words(Features(torch.tensor([1]), token=torch.zeros(1, 1).long()), 1.0, 1).token.tolist() == [[1]]
