"""What is done to a cached vector, and the layers over it, against calculations by hand."""

import math
from functools import partial

import pytest
import torch
from torch import nn

from xret.heads.modules.adapters import RowsAdapter, WordsAdapter
from xret.heads.modules.padding import valid_rows, zero_padding
from xret.heads.modules.projections import CachedInput, GatedPerceptron, RowNorm, on_all_rows, on_valid_rows, projection

LENGTH = torch.tensor([2, 0, 3])
LAYERS = ["linear", "mlp", "mlp-on-linear", "gated", "blocks"]


def filled(layer, seed=0):
    """Give every weight a value of its own, normalisations and biases too."""
    torch.manual_seed(seed)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    return layer.double()


def normalised(x, norm):
    """Normalise a vector, value by value."""
    mean = sum(x) / len(x)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in x) / len(x) + norm.eps)
    return [(value - mean) / deviation * w + b for value, w, b in zip(x, *parts(norm), strict=True)]


def product(layer, x):
    return [sum(w * value for w, value in zip(row, x, strict=True)) + b for row, b in zip(*parts(layer), strict=True)]


def parts(layer):
    return layer.weight.tolist(), layer.bias.tolist()


def gelu(x):
    return x * (1 + math.erf(x / math.sqrt(2))) / 2


def test_a_gated_perceptron_by_hand():
    layer = filled(projection("gated", 3, 2, hidden=8))
    layer.gate.weight.data *= 4  # so that a gate reaches its end
    x = [0.3, -2.0, 5.0]
    inner = normalised(x, layer.norm)
    gate, value = product(layer.gate, inner), product(layer.value, inner)
    assert max(gate) > 6 and min(gate) < 0
    expected = product(layer.out, [min(max(g, 0), 6) * v for g, v in zip(gate, value, strict=True)])
    assert layer(torch.tensor([x], dtype=torch.float64))[0].tolist() == pytest.approx(expected)


def test_blocks_by_hand():
    layer = filled(projection("blocks", 3, 2, hidden=4, depth=2))
    x = [0.3, -2.0, 5.0]
    expected = x
    for block in layer[:2]:
        norm, widen, _, _, narrow = block.layers
        inner = product(narrow, [gelu(value) for value in product(widen, normalised(expected, norm))])
        expected = [a + b for a, b in zip(expected, inner, strict=True)]
    expected = product(layer[3], normalised(expected, layer[2]))
    assert layer(torch.tensor([x], dtype=torch.float64))[0].tolist() == pytest.approx(expected)


def test_hidden_layers_are_as_wide_as_the_published_ones():
    gated, blocks = projection("gated", 6, 5), projection("blocks", 6, 5, depth=3)
    assert gated.gate.weight.shape == gated.value.weight.shape == (48, 6)
    assert gated.out.weight.shape == (5, 48)
    assert len(blocks) == 5
    assert all(block.layers[1].weight.shape == (24, 6) for block in blocks[:3])
    assert blocks[4].weight.shape == (5, 6)
    assert projection("mlp", 6, 8).mlp[0].weight.shape == (4, 6)


@pytest.mark.parametrize("layers", ["gated", "blocks"])
def test_hidden_values_are_dropped_while_training(layers):
    layer, x = projection(layers, 8, 4, dropout=0.5), torch.randn(5, 8)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))
    whole = projection(layers, 8, 4)
    assert torch.equal(whole(x), whole(x))


@pytest.mark.parametrize("layers", LAYERS)
def test_every_adapter_takes_them(layers):
    rows = RowsAdapter(6, 6, 8, layers=layers, depth=2, batch_norm=False).eval()
    length, local = torch.tensor([3, 1]), torch.randn(2, 3, 6)
    adapted = rows(length, local)
    changed = local.clone()
    changed[1, 1:] = 7  # padding
    torch.testing.assert_close(rows(length, changed).global_, adapted.global_)
    assert adapted.global_.shape == (2, 8)
    bag = WordsAdapter(9, 8, encoder="bag", word_dim=6, layers=layers, depth=2, batch_norm=False)
    made = bag(length, token=torch.tensor([[1, 2, 3], [4, 0, 0]]))
    assert made.global_.shape == (2, 8)
    assert isinstance(rows.layer, GatedPerceptron) == (layers == "gated")


def test_a_single_row_is_normalised_by_the_running_statistics():
    torch.manual_seed(0)
    norm, reference, batch = RowNorm(5), nn.BatchNorm1d(5), 3 + 2 * torch.randn(6, 5)
    assert torch.equal(norm(batch), reference(batch))
    assert torch.equal(norm(batch[:1]), reference.eval()(batch[:1]))
    assert torch.equal(norm.running_mean, reference.running_mean)
    assert torch.equal(norm.running_var, reference.running_var)


def test_statistics_of_valid_rows_are_those_of_a_batch_norm_over_them():
    torch.manual_seed(0)
    norm, reference = filled(RowNorm(5)), filled(nn.BatchNorm1d(5))
    for valid in ([1, 0, 1, 1, 0, 0, 1], [0, 0, 1, 1, 0, 0, 0], [1] * 7):
        valid = torch.tensor(valid, dtype=torch.bool)
        x = 3 + 2 * torch.randn(7, 5, dtype=torch.float64)
        gradients = []
        for layer, rows in ((norm, x.clone().requires_grad_()), (reference, x[valid].requires_grad_())):
            layer.zero_grad()
            made = layer(rows, valid)[valid] if layer is norm else layer(rows)
            (made * torch.linspace(-1, 2, made.numel()).view_as(made)).sum().backward()
            ours = rows.grad[valid] if layer is norm else rows.grad
            gradients.append([made, ours, layer.weight.grad.clone(), layer.bias.grad.clone()])
            assert layer is reference or not rows.grad[~valid].any()
        for ours, theirs in zip(*gradients, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
        for name, theirs in reference.named_buffers():
            torch.testing.assert_close(dict(norm.named_buffers())[name], theirs)
    torch.testing.assert_close(norm.eval()(x, valid), reference.eval()(x))


@pytest.mark.parametrize("count", [0, 1])
def test_a_single_valid_row_is_normalised_by_the_running_statistics(count):
    norm = filled(RowNorm(5))
    norm(3 + 2 * torch.randn(6, 5, dtype=torch.float64))
    before = {name: value.clone() for name, value in norm.named_buffers()}
    x, valid = torch.randn(4, 5, dtype=torch.float64, requires_grad=True), torch.arange(4) < count
    made = norm(x, valid)
    torch.testing.assert_close(made[valid], norm(x[:1])[:count])
    assert all(torch.equal(value, before[name]) for name, value in norm.named_buffers())
    made[valid].sum().backward()
    assert x.grad.isfinite().all() and bool(x.grad[0].any()) == bool(count)


def test_statistics_under_mixed_precision_are_exact():
    norm, reference = RowNorm(5), nn.BatchNorm1d(5)
    x, valid = (1000 + torch.randn(600, 5)).bfloat16(), torch.arange(600) < 400
    made = norm(x, valid)
    assert made.dtype == torch.bfloat16
    torch.testing.assert_close(made[valid].float(), reference(x[valid].float()), rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(norm.running_var, reference.running_var)


def test_a_layer_sees_valid_rows_alone():
    rows = torch.randn(3, 3, 2)
    seen = []

    def layer(some):
        seen.append(some)
        return some @ torch.ones(2, 4)

    made = on_valid_rows(layer, rows.requires_grad_(), LENGTH)
    (some,) = seen
    assert torch.equal(some, torch.cat([rows[0, :2], rows[2]]))
    torch.testing.assert_close(made, zero_padding(rows.sum(2, keepdim=True).expand(-1, -1, 4), LENGTH))
    made.sum().backward()
    assert torch.equal(rows.grad != 0, valid_rows(rows, LENGTH)[..., None].expand_as(rows))


@pytest.mark.parametrize("garbage", [7.0, torch.nan])
@pytest.mark.parametrize("length", [[2, 0, 3], [1, 0, 0], [4, 4, 4], [1, 2, 1]])
@pytest.mark.parametrize("layers", [*LAYERS, "norm"])
def test_with_padding_computed_values_and_gradients_are_the_same(layers, length, garbage):
    length, rows = torch.tensor(length), torch.randn(3, 4, 6, dtype=torch.float64)
    rows = rows.masked_fill(~valid_rows(rows, length)[..., None], garbage)
    found = []
    for form in (on_valid_rows, on_all_rows):
        layer = filled(RowNorm(6) if layers == "norm" else projection(layers, 6, 8, depth=2))
        own = rows.clone().requires_grad_()
        made = form(layer, own, length)
        (made * torch.linspace(-1, 2, made.numel()).view_as(made)).sum().backward()
        gradients = [own.grad, *(weight.grad for weight in layer.parameters())]
        found.append([made.detach(), *gradients, *layer.buffers()])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


ROWS = torch.tensor([4, 1, 3])
OFF = {"standardize": False, "dropout": 0.0}


class Part:
    def __init__(self, length, local, global_):
        self.length, self.local, self.global_ = length, local, global_


def cached():
    torch.manual_seed(0)
    return 3 + 2 * torch.randn(3, 4, 6)


def test_channels_are_standardised_by_the_valid_rows_alone():
    local = cached()
    local[1, 1:] = 1e4  # padding
    local[..., 5] = 0.25  # never changes
    adapter = RowsAdapter(6, 6, 8, standardize=True, global_="pooled")
    adapter.measure(lambda: [Part(ROWS[:2], local[:2], None), Part(ROWS[2:], local[2:], None)], uses_local=True)
    valid = torch.cat([local[0], local[1, :1], local[2, :3]])
    expected = (valid - valid.mean(0)) / torch.cat([valid.std(0, correction=0)[:5], torch.ones(1)])
    torch.testing.assert_close(adapter.rows_input(local)[0], expected[:4])
    means = torch.stack([local[0].mean(0), local[1, 0], local[2, :3].mean(0)])
    standardised = adapter.global_input(means)
    torch.testing.assert_close(standardised.mean(0), torch.zeros(6), atol=1e-5, rtol=0)
    torch.testing.assert_close(standardised.std(0, correction=0), torch.tensor([1.0] * 5 + [0.0]), atol=1e-5, rtol=0)
    assert {"rows_input.mean", "rows_input.deviation"} <= adapter.state_dict().keys()  # kept with the weights


def test_a_single_row_is_the_mean_and_stays_unscaled():
    row = cached()[0, :1]
    adapter = RowsAdapter(6, 6, 8, standardize=True)
    adapter.rows_input.measure([row])
    torch.testing.assert_close(adapter.rows_input(row + 2), torch.full((1, 6), 2.0))


def test_a_channel_of_rounding_noise_is_no_input():
    values = cached().flatten(0, 1)
    values[:, 2] = 2e-7 + 1e-7 * torch.rand(len(values))
    adapter = RowsAdapter(6, 6, 8, standardize=True)
    adapter.rows_input.measure([values.half()])
    exact, rounded = adapter.rows_input(values), adapter.rows_input(values.half().float())
    torch.testing.assert_close(exact, rounded, atol=0.01, rtol=0)


def given_rows():
    return {"length": ROWS, "local": cached()}


def tokens():
    return {"length": torch.tensor([3, 1]), "token": torch.tensor([[1, 2, 3], [4, 0, 0]])}


@pytest.mark.parametrize(
    ("make", "given", "noise"),
    [
        (partial(RowsAdapter, 6, 6, 8, global_="pooled"), given_rows, {"dropout": 0.5}),
        (partial(RowsAdapter, 6, 6, 8, layers="mlp", batch_norm=False), given_rows, {"hidden_dropout": 0.5}),
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
    straight = cached() @ adapter.layer.linear.weight.T + adapter.layer.linear.bias
    first, _, _, second = adapter.layer.mlp
    expected = straight + (straight @ first.weight.T + first.bias).relu() @ second.weight.T + second.bias
    torch.testing.assert_close(adapter.eval()(ROWS, cached()).local[0], expected[0])
