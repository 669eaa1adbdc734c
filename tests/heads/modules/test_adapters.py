"""Adapters: what they read, padding that must not count, and agreement with slow references."""

from functools import partial

import pytest
import torch

from xret.heads.modules.adapters import RowsAdapter, WordsAdapter

ROWS = [RowsAdapter, partial(RowsAdapter, layers="mlp")]
LENGTH = torch.tensor([5, 1, 3])
TOKEN = torch.tensor([[3, 1, 4, 1, 5], [2, 0, 0, 0, 0], [6, 0, 5, 0, 0]])


def rows(dtype=torch.float64):
    local = torch.randn(3, 5, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    for sample, length in enumerate(LENGTH):
        local[sample, length:] = 0
    return local


def words(dtype=torch.float64, **parameters):
    torch.manual_seed(0)
    return WordsAdapter(7, 8, word_dim=4, **parameters).to(dtype)


# ---- grid, regions and tokens


@pytest.mark.parametrize("adapter", ROWS)
@pytest.mark.parametrize("global_", ["mean", "max"])
def test_pooled_rows_are_the_adapted_valid_ones(adapter, global_):
    adapter = adapter(6, 6, 8, global_=global_).double().eval()
    adapted = adapter(local=rows(), length=LENGTH, global_=None, token=None)
    assert adapted.local.shape == (3, 5, adapter.local_dim) == (3, 5, 8)
    assert adapted.length is LENGTH
    for sample, length in enumerate(LENGTH):
        alone = torch.cat([adapter.layer(row[None]) for row in rows()[sample, :length]])
        torch.testing.assert_close(adapted.local[sample, :length], alone)
        expected = alone.mean(0) if global_ == "mean" else alone.amax(0)
        torch.testing.assert_close(adapted.global_[sample], expected)


@pytest.mark.parametrize("adapter", ROWS)
def test_a_cached_global_of_another_width_has_a_layer_of_its_own(adapter):
    made = adapter(6, 5, 8, global_="cached", standardize=True).double().eval()
    cached = torch.linspace(-1, 1, 15).double().view(3, 5)
    adapted = made(local=rows(), length=LENGTH, global_=cached, token=None)
    assert torch.equal(adapted.global_, made.global_layer(made.global_input(cached)))
    assert adapted.local.shape == (3, rows().shape[1], 8)


@pytest.mark.parametrize("adapter", ROWS)
def test_cached_global_goes_through_the_same_layer(adapter):
    adapter = adapter(6, 6, 8, global_="cached").double().eval()
    cached = rows()[:, 0]
    with_rows = adapter(local=rows(), length=LENGTH, global_=cached, token=None)
    without = adapter(local=None, length=LENGTH, global_=cached, token=None)
    torch.testing.assert_close(with_rows.global_, with_rows.local[:, 0])
    torch.testing.assert_close(without.global_, with_rows.global_)
    assert without.local is None


@pytest.mark.parametrize("layers", ["mlp", "mlp-on-linear"])
@pytest.mark.parametrize("global_", ["cached", "pooled", "mean"])
def test_rows_and_vectors_are_normalised_in_evaluation_as_in_training(layers, global_):
    torch.manual_seed(0)
    adapter = RowsAdapter(6, 6, 8, global_=global_, layers=layers)
    adapter.output_dropout.p, adapter.layer.mlp[1].momentum = 0.0, 1.0  # statistics of the last batch
    local, length = torch.randn(400, 5, 6), torch.arange(400) % 5 + 1
    cached = (length, local, local.mean(1) / 3)
    trained, evaluated = adapter.train()(*cached), adapter.eval()(*cached)
    torch.testing.assert_close(evaluated.global_, trained.global_, rtol=0.01, atol=0.01)
    for sample in range(5):
        both = (one.local[sample, : length[sample]] for one in (evaluated, trained))
        torch.testing.assert_close(*both, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("adapter", ROWS)
def test_only_what_is_needed_is_read(adapter):
    cached, pooled = adapter(6, 6, 8, global_="cached"), adapter(6, 2, 8, global_="mean")
    assert cached.fields(uses_local=False) == {"global"}
    assert cached.fields(uses_local=True) == {"global", "local"}
    assert pooled.fields(uses_local=False) == pooled.fields(uses_local=True) == {"local"}


@pytest.mark.parametrize("adapter", ROWS)
@pytest.mark.parametrize("global_", ["cached", "max"])
def test_float16_features_meet_float32_weights(adapter, global_):
    adapter = adapter(6, 6, 8, global_=global_)
    half = rows(torch.float16)
    adapted = adapter(local=half, length=LENGTH, global_=half[:, 0])
    exact = adapter(local=half.float(), length=LENGTH, global_=half[:, 0].float())
    assert adapted.local.dtype == adapted.global_.dtype == torch.float32
    assert torch.equal(adapted.local, exact.local)
    assert torch.equal(adapted.global_, exact.global_)


def test_regions_are_a_linear_layer_plus_a_perceptron():
    adapter = RowsAdapter(6, 6, 8, layers="mlp").double()
    x, layer = rows(), adapter.layer
    first, norm, _, second = layer.mlp
    hidden = x @ first.weight.T + first.bias
    valid = hidden[valid_mask(x)]
    hidden = (hidden - valid.mean(0)) / (valid.var(0, correction=0) + norm.eps).sqrt()
    expected = x @ layer.linear.weight.T + layer.linear.bias + hidden.relu() @ second.weight.T + second.bias
    adapted = adapter(local=x, length=LENGTH).local
    for sample, length in enumerate(LENGTH):
        torch.testing.assert_close(adapted[sample, :length], expected[sample, :length])
        assert not adapted[sample, length:].any()
    torch.testing.assert_close(norm.running_mean, 0.1 * (x @ first.weight.T + first.bias)[valid_mask(x)].mean(0))


def valid_mask(x):
    return torch.arange(x.shape[1]) < LENGTH[:, None]


# ---- words


@pytest.mark.parametrize("bidirectional", [True, False])
def test_words_are_the_recurrence(bidirectional):
    """Of each caption alone, which torch's GRU reads; two directions are averaged."""
    adapter = words(local="gru", bidirectional=bidirectional)
    adapted = adapter(length=LENGTH, token=TOKEN)
    assert adapted.local.shape == (3, 5, adapter.local_dim) == (3, 5, 8)
    for sample, length in enumerate(LENGTH):
        states, last = adapter.gru(adapter.embedding.weight[TOKEN[sample, :length]])
        forwards, backwards = states[:, :8], states[:, -8:]
        torch.testing.assert_close(adapted.local[sample, :length], (forwards + backwards) / 2)
        torch.testing.assert_close(adapted.global_[sample], last.mean(0))


def test_word_embeddings_as_local_rows():
    adapter = words()
    adapted = adapter(length=LENGTH, token=TOKEN)
    assert adapter.local_dim == 4
    assert torch.equal(adapted.local, adapter.embedding.weight[TOKEN])
    assert torch.equal(adapted.global_, words(local="gru")(length=LENGTH, token=TOKEN).global_)
    assert adapter.fields(True) == adapter.fields(False) == {"token"}
    assert -0.1 <= adapter.embedding.weight.min() < -0.05 < 0.05 < adapter.embedding.weight.max() <= 0.1


@pytest.mark.parametrize("padding", [0, 6])
def test_padding_tokens_change_nothing(padding):
    adapter = words(local="gru")
    expected = adapter(length=LENGTH, token=TOKEN)
    token = torch.cat([TOKEN, torch.full((3, 4), padding)], 1)
    for sample, length in enumerate(LENGTH):
        token[sample, length:] = padding
    adapted = adapter(length=LENGTH, token=token)
    torch.testing.assert_close(adapted.global_, expected.global_)
    for sample, length in enumerate(LENGTH):
        torch.testing.assert_close(adapted.local[sample, :length], expected.local[sample, :length])
    # Nothing flows back to the embedding of a token that only pads.
    alone = adapter(length=torch.tensor([2]), token=torch.tensor([[1, 2, padding]])).global_
    (gradient,) = torch.autograd.grad(alone.sum(), adapter.embedding.weight)
    assert (gradient[padding] == 0).all()
    assert (gradient[[1, 2]] != 0).all()


def test_the_unknown_word_is_trained():
    adapter = words()
    adapter(length=torch.tensor([1]), token=torch.tensor([[0]])).global_.sum().backward()
    assert (adapter.embedding.weight.grad[0] != 0).any()


@pytest.mark.parametrize("kind", ["grid", "words"])
def test_autocast_stays_near(kind):
    adapter = words(torch.float32, local="gru") if kind == "words" else RowsAdapter(6, 6, 8)
    given = {"local": rows(torch.float32), "length": LENGTH, "token": TOKEN}
    expected = adapter(**given).global_
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = adapter(**given).global_
    torch.testing.assert_close(actual.float(), expected, rtol=0, atol=0.02 * expected.abs().max().item())


# ---- word vectors


FOUND = torch.tensor([False, True, True, False, True, False, True])


def vectors():
    """Word vectors [7, 4], zeros where there are none."""
    return 3 * torch.randn(7, 4, generator=torch.Generator().manual_seed(1)) * FOUND[:, None]


def test_word_vectors_begin_the_embeddings():
    adapter, before = words(torch.float32), words(torch.float32).embedding.weight
    adapter.load_vectors(vectors(), FOUND)
    after = adapter.embedding.weight
    assert torch.equal(after[FOUND], vectors()[FOUND])
    ratio = after[~FOUND] / before[~FOUND]  # the others are what chance gave, in another scale
    torch.testing.assert_close(ratio, ratio[0, 0].expand_as(ratio))
    assert after.requires_grad and after.is_leaf


def test_words_without_a_vector_are_as_loud_as_the_others():
    torch.manual_seed(0)
    adapter, found = WordsAdapter(2000, 8, word_dim=10), torch.arange(2000) < 1000
    adapter.load_vectors(2 + 5 * torch.randn(2000, 10), found)
    random = adapter.embedding.weight[~found]
    assert random.std().item() == pytest.approx(5, rel=0.05)
    assert random.mean().item() == pytest.approx(0, abs=0.2)


def test_word_vectors_change_nothing_else_that_chance_decides():
    with_file, without = words(vectors="glove.txt"), words()
    with_file.load_vectors(vectors().double(), FOUND)
    for name, value in without.state_dict().items():
        assert torch.equal(with_file.state_dict()[name], value) == (name != "embedding.weight")


def test_a_trained_model_needs_no_file():
    trained, loaded = words(vectors="glove.txt"), words(vectors="/gone/glove.txt")
    trained.load_vectors(vectors(), FOUND)
    loaded.load_state_dict(trained.state_dict())
    assert torch.equal(loaded(length=LENGTH, token=TOKEN).global_, trained(length=LENGTH, token=TOKEN).global_)


@pytest.mark.parametrize("train", [True, False])
def test_word_vectors_learn_if_they_shall(train):
    adapter = words(torch.float32, vectors="glove.txt", train_vectors=train)
    adapter.load_vectors(vectors(), FOUND)
    before = {name: value.clone() for name, value in adapter.state_dict().items()}
    optimizer = torch.optim.AdamW(adapter.parameters(), lr=0.1, weight_decay=0.1)
    adapter(length=LENGTH, token=TOKEN).global_.square().sum().backward()
    optimizer.step()
    changed = {name for name, value in adapter.state_dict().items() if not torch.equal(value, before[name])}
    assert ("embedding.weight" in changed) == train
    assert "gru.weight_ih_l0" in changed


def test_word_vectors_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="vectors are 7 x 5 and the embeddings 7 x 4: set word_dim to their width"):
        words().load_vectors(torch.zeros(7, 5), FOUND)
    with pytest.raises(ValueError, match=r"train_vectors is false .* name a file"):
        words(train_vectors=False)


# ---- as the published scripts train


@pytest.mark.parametrize("global_", ["max", "pooled"])
def test_dropout_of_what_the_layers_give(global_):
    adapter, plain = (RowsAdapter(6, 6, 40, global_=global_).double() for _ in range(2))
    adapter.load_state_dict(plain.state_dict())
    adapter.output_dropout.p = 0.5
    assert RowsAdapter(6, 6, 8, layers="mlp-on-linear").output_dropout.p == 0.1  # SetDiv's published code
    expected = plain(local=rows(), length=LENGTH)
    adapted = adapter.eval()(local=rows(), length=LENGTH)
    assert torch.equal(adapted.local, expected.local)
    assert torch.equal(adapted.global_, expected.global_)
    torch.manual_seed(0)
    adapted = adapter.train()(local=rows(), length=LENGTH)
    kept = adapted.local != 0
    assert 0.3 < kept[valid_mask(rows())].double().mean() < 0.7
    torch.testing.assert_close(adapted.local[kept], 2 * expected.local[kept])
    kept = adapted.global_ != 0
    if global_ == "pooled":
        assert 0.3 < kept.double().mean() < 0.7
        torch.testing.assert_close(adapted.global_[kept], 2 * expected.global_[kept])
    else:  # a single row is its own maximum: what is dropped of it is drawn anew for the global feature
        own = adapted.global_[1]
        torch.testing.assert_close(own[own != 0], 2 * expected.global_[1][own != 0])
        assert not torch.equal(own != 0, adapted.local[1, 0] != 0)


@pytest.mark.parametrize("local", ["embedding", "gru"])
def test_ends_of_captions(local):
    adapter = words(ends=True, local=local)
    assert len(adapter.embedding.weight) == 9
    adapted = adapter(length=LENGTH, token=TOKEN)
    assert adapted.length.tolist() == [7, 3, 5]
    spelled = torch.tensor([[7, 3, 1, 4, 1, 5, 8], [7, 2, 8, 0, 0, 0, 0], [7, 6, 0, 5, 8, 0, 0]])
    plain = WordsAdapter(9, 8, word_dim=4, local=local).double()
    plain.load_state_dict(adapter.state_dict())
    expected = plain(length=adapted.length, token=spelled)
    torch.testing.assert_close(adapted.local, expected.local)
    torch.testing.assert_close(adapted.global_, expected.global_)


def test_word_vectors_leave_ends_and_mask_to_chance():
    torch.manual_seed(0)
    adapter = WordsAdapter(8, 8, word_dim=4, ends=True)  # seven words and <mask>
    adapter.load_vectors(vectors(), FOUND)
    assert torch.equal(adapter.embedding.weight[:7][FOUND], vectors()[FOUND])
    assert adapter.embedding.weight[7:].abs().min() > 0
    with pytest.raises(ValueError, match="vectors are 9 x 4 and the embeddings 10 x 4"):
        adapter.load_vectors(torch.zeros(9, 4), torch.ones(9).bool())
