"""Several feature sets as one: rows one after the other, whatever the padding, and the mean of the global features."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from xret.heads.modules.adapters import RowsAdapter, WordsAdapter
from xret.heads.modules.joined_adapter import JoinedAdapter
from xret.heads.modules.padding import rows_of_all
from xret.pipeline.reading.features import Features

LENGTH, LETTERS = torch.tensor([4, 1, 0]), torch.tensor([2, 3, 1])
TOKEN = torch.tensor([[3, 1, 0], [2, 5, 6], [4, 0, 0]])


@given(st.data())
def test_ragged_rows_are_packed_as_a_loop_packs_them(data):
    samples, width = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
    parts, expected = [], [[] for _ in range(samples)]
    for _ in range(data.draw(st.integers(2, 4))):
        padded = data.draw(st.integers(1, 5))
        lengths = data.draw(st.lists(st.integers(0, padded), min_size=samples, max_size=samples))
        rows = torch.randn(samples, padded, width)
        parts.append((rows, torch.tensor(lengths)))
        for sample, length in enumerate(lengths):
            for row in range(length):
                expected[sample].append(rows[sample, row])
    packed, number = rows_of_all(parts)
    assert packed.shape == (samples, sum(rows.shape[1] for rows, _ in parts), width)
    assert number.tolist() == [len(own) for own in expected]
    for sample, own in enumerate(expected):
        assert torch.equal(packed[sample, : len(own)], torch.stack(own) if own else packed[sample, :0])
        assert not packed[sample, len(own) :].any()


def joined(**words):
    """Two sets of rows, of 6 and 5 channels, and words of 4, joined to a width of 8."""
    torch.manual_seed(0)
    rows = RowsAdapter(6, 6, 8), RowsAdapter(5, 5, 8, layers="mlp", batch_norm=False)
    return JoinedAdapter([*rows, WordsAdapter(7, 8, word_dim=4, **words)], 8).double().eval()


def cached(garbage=0.0):
    draw = torch.Generator().manual_seed(1)
    one, other = (torch.randn(3, 4, width, generator=draw, dtype=torch.float64) for width in (6, 5))
    padding = torch.arange(4) >= LENGTH[:, None]
    one[padding] = garbage
    token = TOKEN.masked_fill(torch.arange(3) >= LETTERS[:, None], int(garbage) % 7)
    return (
        Features(LENGTH, one),
        Features(torch.full((3,), 4), other),
        Features(LETTERS, token=token),
    )


def test_rows_and_global_feature_are_those_of_each_set():
    adapter, parts = joined(), cached()
    made = adapter(parts)
    alone = [own(part.length, part.local, None, part.token) for own, part in zip(adapter.sets, parts, strict=True)]
    assert made.length.tolist() == [4 + 4 + 2, 1 + 4 + 3, 0 + 4 + 1]
    for sample in range(3):
        rows = [alone[0].local[sample, : LENGTH[sample]], alone[1].local[sample]]
        rows.append(alone[2].local[sample, : LETTERS[sample]] @ adapter.widen[2].weight.T + adapter.widen[2].bias)
        torch.testing.assert_close(made.local[sample, : made.length[sample]], torch.cat(rows))
    torch.testing.assert_close(made.global_, sum(one.global_ for one in alone) / 3)


def test_only_rows_of_another_width_go_through_a_layer():
    widths = [[name for name, _ in layer.named_parameters()] for layer in joined().widen]
    assert widths == [[], [], ["weight", "bias"]]
    assert not list(joined(local="gru").widen.parameters())


@pytest.mark.parametrize("garbage", [3.0, -1e30])
def test_what_stands_on_padding_changes_nothing(garbage):
    adapter = joined()
    clean, dirty = adapter(cached()), adapter(cached(garbage))
    torch.testing.assert_close(dirty.local, clean.local)
    torch.testing.assert_close(dirty.global_, clean.global_)
    assert not any(own[length:].any() for own, length in zip(dirty.local, dirty.length, strict=True))


def test_without_rows_the_global_feature_is_the_same():
    adapter = joined()
    made = adapter(cached(), uses_local=False)
    assert made.local is None and torch.equal(made.length, adapter(cached()).length)
    torch.testing.assert_close(made.global_, adapter(cached()).global_)
