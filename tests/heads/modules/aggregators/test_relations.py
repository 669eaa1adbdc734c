"""Aggregators whose rows see each other: against recorded values, torch's own layers and loops, each sample alone."""

import pytest
import torch
from recorded import DTYPES, assert_near, assert_recorded, bits, leaf, near
from torch import nn

from xret.heads.modules.aggregators.relations import (
    RegionGraph,
    RegionGraphLayer,
    RowTransformer,
    SelfAttention,
    Seq2Seq,
)

LENGTH = torch.tensor([5, 3, 1])


def local_rows():
    torch.manual_seed(1)
    return torch.randn(3, 5, 8, dtype=torch.float64)


def test_self_attention_is_that_of_torch():
    module, local = SelfAttention(8, 8).double(), local_rows()
    reference = nn.MultiheadAttention(8, 1, bias=False, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        reference.in_proj_weight.copy_(torch.cat([module.query.weight, module.key.weight, module.value.weight]))
        reference.out_proj.weight.copy_(torch.eye(8))
    aggregated = module(local, LENGTH, None)
    for b, rows in enumerate(LENGTH.tolist()):
        sample = local[b : b + 1, :rows]
        expected = sample + reference(sample, sample, sample)[0]
        torch.testing.assert_close(aggregated.rows.rows[b, :rows], expected[0])
        torch.testing.assert_close(aggregated.embedding[b], expected[0].mean(0))
        assert (aggregated.rows.rows[b, rows:] == 0).all()


def test_seq2seq_is_the_last_state_of_a_gru():
    module, local = Seq2Seq(8, 4).double(), local_rows()
    embedding = module(local, LENGTH, None).embedding
    for b, rows in enumerate(LENGTH.tolist()):
        torch.testing.assert_close(embedding[b], module.gru(local[b, :rows])[1][0])


@pytest.mark.parametrize(("part", "millions"), [(SelfAttention, 3.15), (Seq2Seq, 6.30)])
def test_number_of_weights_is_that_of_the_paper(part, millions):
    with torch.device("meta"):
        module = part(1024, 1024)
    assert sum(weight.numel() for weight in module.parameters()) / 1e6 == pytest.approx(millions, abs=0.01)


def recorded_layer(data, case, dtype, divide=True):
    layer = RegionGraphLayer(data[f"{case}/w_g.weight"].shape[1], divide=divide)
    if case == "nobn":
        layer.norm = nn.Identity()
    names = {"value": "g", "theta": "theta", "phi": "phi", "out": "W", "norm": "bn"}
    for name, recorded in names.items():
        part = getattr(layer, name)
        if not isinstance(part, nn.Identity):
            prefix = f"{case}/w_{recorded}."
            part.load_state_dict({k[len(prefix) :]: torch.tensor(v) for k, v in data.items() if k.startswith(prefix)})
    return layer.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("case", "mode"), [("bn", "eval"), ("bn", "train"), ("nobn", "eval")])
def test_recorded_layer(golden, case, mode, dtype):
    data = golden("region_graph")
    layer = recorded_layer(data, case, dtype).train(mode == "train")
    regions = leaf(data, f"{case}/in_regions_BDN", dtype)
    rows = regions.transpose(1, 2)
    length = torch.full((len(rows),), rows.shape[1])
    if mode == "eval":
        assert_near(layer.affinity(rows, length), data[f"{case}/out{bits(dtype)}_affinity_over_n"], near(dtype))
    out, weights = layer(rows, length).transpose(1, 2), data[f"{case}/in_cotangent"]
    assert_recorded(data, mode, out, {"regions": regions}, dtype, f"{case}/", weights=weights)
    if mode == "eval" and dtype is torch.float64:
        layer = recorded_layer(data, case, dtype, divide=False).eval()
        assert_near(layer.affinity(rows, length), data[f"{case}/out64_affinity"], 1e-9)
        assert_near(layer(rows, length).transpose(1, 2), data[f"{case}/out64_eval_without_1_over_n"], 1e-9)


def test_statistics_are_of_valid_rows_alone():
    layer = RegionGraphLayer(3, divide=True).double()
    nn.init.ones_(layer.norm.weight)
    rows, length = torch.randn(2, 4, 3, dtype=torch.float64), torch.tensor([4, 1])
    change = layer(rows, length) - rows
    valid = torch.cat([change[0], change[1, :1]])
    torch.testing.assert_close(valid.mean(0), torch.zeros(3, dtype=torch.float64), atol=1e-12, rtol=0)
    running, layer.norm = layer.norm.running_mean, nn.Identity()
    before = layer(rows, length) - rows
    torch.testing.assert_close(running, 0.1 * torch.cat([before[0], before[1, :1]]).mean(0))


def test_begins_as_the_identity_and_reads_unit_rows():
    graph = RegionGraph(4, 6).eval()
    local, length = torch.randn(2, 5, 4), torch.tensor([5, 3])
    aggregated = graph(local, length, None)
    assert aggregated.embedding.shape == (2, 6)
    unit = nn.functional.normalize(local, dim=2)
    torch.testing.assert_close(aggregated.rows.rows[0], unit[0])
    torch.testing.assert_close(aggregated.embedding[0], graph.read.gru(unit[:1])[1][0, 0])
    assert aggregated.rows.length is length
    plain = RegionGraph(4, 4, then="average").eval()(local, length, None)
    torch.testing.assert_close(plain.embedding[1], unit[1, :3].mean(0))


def slow_graph(graph, rows):
    """One image's vector and rows, by loops: what is normalised is every row, or every channel over the rows."""

    def normalised(rows):
        if graph.normalise == "rows":
            return torch.stack([row / sum(value**2 for value in row) ** 0.5 for row in rows])
        return torch.stack([channel / sum(value**2 for value in channel) ** 0.5 for channel in rows.T]).T

    if graph.normalise != "regions-after":
        rows = normalised(rows)
    for layer in graph.layers:
        theta, phi, value = (part(rows) for part in (layer.theta, layer.phi, layer.value))
        added = [sum((one @ other) / len(rows) * v for other, v in zip(phi, value, strict=True)) for one in theta]
        norm = layer.norm
        change = (layer.out(torch.stack(added)) - norm.running_mean) / (norm.running_var + norm.eps) ** 0.5
        rows = rows + change * norm.weight + norm.bias
    rows = normalised(rows)
    vector = graph.read.gru(rows[None])[1][0, 0]
    if graph.normalise == "regions-after":
        vector = (vector - graph.norm.running_mean) / (graph.norm.running_var + graph.norm.eps) ** 0.5
    return vector, rows


@pytest.mark.parametrize("normalise", ["rows", "regions", "regions-after"])
def test_what_is_normalised_against_loops(normalise):
    torch.manual_seed(0)
    graph = RegionGraph(4, 6, normalise=normalise).double()
    for layer in graph.layers:  # which begin as the identity
        nn.init.normal_(layer.norm.weight)
        nn.init.normal_(layer.norm.bias)
    local, length = torch.randn(3, 5, 4, dtype=torch.float64), torch.tensor([5, 3, 1])
    graph(local, length, None)  # takes statistics
    aggregated = graph.eval()(local, length, None)
    for one, vector, rows, count in zip(local, *aggregated[:1], aggregated.rows.rows, length, strict=True):
        expected, expected_rows = slow_graph(graph, one[:count])
        torch.testing.assert_close(vector, expected)
        torch.testing.assert_close(rows[:count], expected_rows)
        assert not rows[count:].any()


def test_number_of_weights_of_the_published_table():
    # VSE-infinity Table 1: GCN+AvgPool 4.2M (one layer), GCN+Seq2Seq 23.1M, at 1024 dimensions.
    with torch.device("meta"):
        graph = RegionGraph(1024, 1024)
    assert [round(sum(p.numel() for p in g.parameters()) / 1e6, 1) for g in (graph.layers[0], graph)] == [4.2, 23.1]
    RegionGraph(4, 4).to(torch.bfloat16)(torch.randn(2, 3, 4).bfloat16(), torch.tensor([3, 2]), None)


@pytest.mark.parametrize("head_dim", [2, 64])
def test_row_transformer_against_the_library(head_dim):
    torch.manual_seed(0)
    ours = RowTransformer(8, 8, head_dim=head_dim, residual=0.7).double().eval()
    heads = max(1, 8 // head_dim)
    theirs = nn.TransformerEncoderLayer(8, heads, dim_feedforward=8, batch_first=True).double().eval()
    theirs.load_state_dict(
        dict(zip(ORDER, (ours.state_dict()[f"layer.{name}"] for name in ORDER.values()), strict=True))
    )
    local = torch.randn(3, 5, 8).double()
    made = ours(local, LENGTH, torch.zeros(3, 8)).embedding
    for vector, rows, length in zip(made, local, LENGTH, strict=True):
        rows = rows[:length]
        largest = rows.sort(0, descending=True).values[:2].mean(0)
        torch.testing.assert_close(vector, 0.7 * largest + 0.3 * theirs(rows[None])[0].mean(0))


ORDER = {
    "self_attn.in_proj_weight": "project.weight",
    "self_attn.in_proj_bias": "project.bias",
    "self_attn.out_proj.weight": "out.weight",
    "self_attn.out_proj.bias": "out.bias",
    "linear1.weight": "mlp.0.weight",
    "linear1.bias": "mlp.0.bias",
    "linear2.weight": "mlp.3.weight",
    "linear2.bias": "mlp.3.bias",
    "norm1.weight": "norms.0.weight",
    "norm1.bias": "norms.0.bias",
    "norm2.weight": "norms.1.weight",
    "norm2.bias": "norms.1.bias",
}


def test_heads_that_do_not_divide_the_width_are_refused():
    with pytest.raises(ValueError, match="heads of width 64 do not divide rows of width 100: set head_dim"):
        RowTransformer(100, 100)
