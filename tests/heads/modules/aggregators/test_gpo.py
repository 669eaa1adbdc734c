"""GPO against recorded values, every generator against one sample at a time, and what its coefficients promise."""

import pytest
import torch
from recorded import DTYPES, assert_near, bits, leaf, near

from xret.heads.modules.aggregators import gpo
from xret.heads.modules.aggregators.gpo import GPO, INDICES, cos_sin_positions
from xret.heads.modules.padding import mean_rows

VARIANTS = [
    {"generator": generator, "per_dimension": per_dimension, "feature_input": feature_input}
    for generator in ("cos-sin-bigru", "cos-sin-mlp", "index-bigru", "interpolation")
    for per_dimension in (False, True)
    for feature_input in (False, True)
    if not (feature_input and generator == "interpolation")
]


@pytest.fixture(autouse=True, scope="module")
def narrow():
    """Make generators small enough for numeric gradients."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpo, "POSITION_DIM", 4)
        patch.setattr(gpo, "HIDDEN_DIM", 5)
        yield


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ["base", "small"])
def test_recorded_values(golden, monkeypatch, case, dtype):
    data = golden("gpo")
    local = leaf(data, f"{case}/in_features", dtype)
    length = torch.tensor(data[f"{case}/in_lengths"])
    position_dim = data[f"{case}/w_gru.weight_ih_l0"].shape[1]
    monkeypatch.setattr(gpo, "HIDDEN_DIM", data[f"{case}/w_linear.weight"].shape[1])
    monkeypatch.setattr(gpo, "POSITION_DIM", position_dim)
    module = GPO(local.shape[2], local.shape[2])
    module.load_state_dict({name: torch.tensor(data[f"{case}/w_{name}"]) for name in module.state_dict()})
    pooled = module.to(dtype)(local, length, None).embedding

    outputs = {
        "pooled": pooled,
        "weights": module.coefficients(length, int(length.max())),
        "positions": cos_sin_positions(int(length.max()), position_dim, pooled),
    }
    for name, actual in outputs.items():
        assert_near(actual, data[f"{case}/out{bits(dtype)}_{name}"], near(dtype))
    (pooled * torch.tensor(data[f"{case}/in_cotangent"])).sum().backward()
    assert_near(local.grad, data[f"{case}/grad{bits(dtype)}_features"], near(dtype))


def make(**parameters):
    torch.manual_seed(0)
    module = GPO(3, 3, **parameters).double()
    if parameters.get("generator") == "interpolation":
        torch.nn.init.normal_(module.knots)
    return module


def one_sample(module, rows):
    """The pooled vector of one sample's sorted rows [L, D], by loops over ranks and dimensions."""
    scores = []
    for rank in range(len(rows)):
        if module.generator == "interpolation":
            at = 20 * rank / max(len(rows) - 1, 1)
            left = min(int(at), 19)
            scores.append((left + 1 - at) * module.knots[left] + (at - left) * module.knots[left + 1])
            continue
        if module.generator == "index-bigru":
            position = module.index.weight[rank]
        else:
            position = cos_sin_positions(len(rows), 4, rows)[rank]
        scores.append(torch.cat([position, rows[rank]]) if module.feature_input else position)
    inputs = torch.stack(scores)
    if module.generator == "cos-sin-mlp":
        inputs = torch.stack([module.mlp(x) for x in inputs])
    elif module.generator != "interpolation":
        states = module.gru(inputs[None])[0][0]
        inputs = module.linear((states[:, :5] + states[:, 5:]) / 2)
    weights = (inputs / gpo.TEMPERATURE).exp()
    weights = (weights / weights.sum(0)).expand_as(rows)
    return torch.stack([sum(weights[k, i] * rows[k, i] for k in range(len(rows))) for i in range(3)])


@pytest.mark.parametrize("number", [6, 7])  # as many rows as samples, and more
@pytest.mark.parametrize("is_cpu", [True, False])
@pytest.mark.parametrize("parameters", VARIANTS, ids=lambda p: "-".join(str(value) for value in p.values()))
def test_a_batch_of_many_lengths_is_each_sample_alone(parameters, is_cpu, number, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_cpu", is_cpu)  # another device is not asked for lengths
    module = make(**parameters)
    length = torch.tensor([4, 1, 6, 4, 0, 5])
    local = torch.randn(6, number, 3, dtype=torch.float64)
    local[4, 0] = 0  # no row counts as one of zeros
    pooled = module(local, length, None).embedding
    for b, rows in enumerate(length.clamp(min=1).tolist()):
        values = local[b, :rows].sort(dim=0, descending=True).values
        torch.testing.assert_close(pooled[b], one_sample(module, values))


@pytest.mark.parametrize("generator", ["cos-sin-bigru", "cos-sin-mlp", "index-bigru", "interpolation"])
def test_any_length(generator):
    weights = make(generator=generator).coefficients(torch.tensor([1, INDICES + 20]), INDICES + 20)
    assert weights.shape == (2, INDICES + 20)
    assert weights.isfinite().all()
    assert weights[0, 0] == 1


def test_interpolation_begins_as_average_pooling():
    local, length = torch.randn(3, 5, 3), torch.tensor([5, 2, 1])
    pooled = GPO(3, 3, generator="interpolation")(local, length, None).embedding
    torch.testing.assert_close(pooled, mean_rows(local, length))


def test_refuses_what_cannot_be():
    with pytest.raises(ValueError, match="GPO: feature_input is true, but must be false"):
        GPO(3, 3, generator="interpolation", feature_input=True)
