"""The region graph against recorded values, and padding that must not count."""

import pytest
import torch
from recorded import DTYPES, assert_near, assert_recorded, bits, leaf, near
from torch import nn

from xret.heads.modules.aggregators.region_graph import RegionGraph, RegionGraphLayer


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
    layer = RegionGraphLayer(3).double()
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
