"""Cached features before the head: their statistics, and noise that evaluation never sees."""

from functools import partial

import pytest
import torch

from xret.heads.modules.adapters import RowsAdapter, WordsAdapter
from xret.heads.modules.cached_input import CachedInput

LENGTH = torch.tensor([4, 1, 3])
OFF = {"standardize": False, "dropout": 0.0}


class Part:
    def __init__(self, length, local, global_):
        self.length, self.local, self.global_ = length, local, global_


def rows():
    torch.manual_seed(0)
    return 3 + 2 * torch.randn(3, 4, 6)


def test_channels_are_standardised_by_the_valid_rows_alone():
    local = rows()
    local[1, 1:] = 1e4  # padding
    local[..., 5] = 0.25  # never changes
    adapter = RowsAdapter(6, 6, 8, standardize=True, global_="pooled")
    adapter.measure(lambda: [Part(LENGTH[:2], local[:2], None), Part(LENGTH[2:], local[2:], None)])
    valid = torch.cat([local[0], local[1, :1], local[2, :3]])
    expected = (valid - valid.mean(0)) / torch.cat([valid.std(0, correction=0)[:5], torch.ones(1)])
    torch.testing.assert_close(adapter.rows_input(local)[0], expected[:4])
    means = torch.stack([local[0].mean(0), local[1, 0], local[2, :3].mean(0)])
    standardised = adapter.global_input(means)
    torch.testing.assert_close(standardised.mean(0), torch.zeros(6), atol=1e-5, rtol=0)
    torch.testing.assert_close(standardised.std(0, correction=0), torch.tensor([1.0] * 5 + [0.0]), atol=1e-5, rtol=0)
    assert {"rows_input.mean", "rows_input.deviation"} <= adapter.state_dict().keys()  # kept with the weights


def cached_rows():
    return {"length": LENGTH, "local": rows()}


def tokens():
    return {"length": torch.tensor([3, 1]), "token": torch.tensor([[1, 2, 3], [4, 0, 0]])}


@pytest.mark.parametrize(
    ("make", "given", "noise"),
    [
        (partial(RowsAdapter, 6, 6, 8, global_="pooled"), cached_rows, {"dropout": 0.5}),
        (partial(RowsAdapter, 6, 6, 8, layers="mlp", batch_norm=False), cached_rows, {"hidden_dropout": 0.5}),
        (partial(WordsAdapter, 7, 8, local="gru"), tokens, {"dropout": 0.5}),
        (partial(WordsAdapter, 7, 8, local="gru"), tokens, {"state_dropout": 0.5}),
        (partial(WordsAdapter, 7, 8, encoder="bag"), tokens, {"dropout": 0.5}),
    ],
)
def test_evaluation_is_untouched_by_noise(make, given, noise):
    torch.manual_seed(1)
    plain, noisy = make(), make(**noise)
    noisy.load_state_dict(plain.state_dict())
    expected = plain(**given())
    assert not torch.equal(noisy(**given()).global_, expected.global_)
    evaluated = noisy.eval()(**given())
    assert torch.equal(evaluated.local, expected.local)
    assert torch.equal(evaluated.global_, expected.global_)


def test_nothing_is_drawn_where_nothing_is_asked_for():
    before, local = torch.get_rng_state(), torch.ones(2, 3, 6)
    assert CachedInput(6, **OFF)(local) is local
    assert torch.equal(torch.get_rng_state(), before)


def test_a_bag_of_words_is_their_mean_through_the_layers():
    torch.manual_seed(0)
    adapter = WordsAdapter(7, 8, encoder="bag", word_dim=4)
    token = torch.tensor([[1, 2, 3], [4, 0, 0]])
    adapted = adapter(torch.tensor([3, 1]), token=token)
    vectors = adapter.embedding.weight
    expected = adapter.bag(torch.stack([vectors[1:4].mean(0), vectors[4]]))
    torch.testing.assert_close(adapted.global_, expected)
    assert not hasattr(adapter, "gru")
    with pytest.raises(ValueError, match="a bag of words has no states"):
        WordsAdapter(7, 8, encoder="bag", local="gru")


def test_word_embeddings_of_a_bag_are_dropped_in_its_rows_too():
    torch.manual_seed(0)
    adapter = WordsAdapter(7, 8, encoder="bag", word_dim=400, dropout=0.25)
    token, length = torch.tensor([[1, 2, 3], [4, 0, 0]]), torch.tensor([3, 1])
    rows = adapter(length, token=token).local
    assert abs((rows == 0).float().mean() - 0.25) < 0.05
    assert torch.equal(adapter.eval()(length, token=token).local, adapter.embedding(token))


def test_the_perceptron_reads_what_the_linear_layer_gives():
    adapter = RowsAdapter(6, 6, 8, layers="mlp-on-linear", batch_norm=False, hidden=5)
    straight = rows() @ adapter.layer.linear.weight.T + adapter.layer.linear.bias
    first, _, _, second = adapter.layer.mlp
    expected = straight + (straight @ first.weight.T + first.bias).relu() @ second.weight.T + second.bias
    torch.testing.assert_close(adapter.eval()(LENGTH, rows()).local[0], expected[0])
