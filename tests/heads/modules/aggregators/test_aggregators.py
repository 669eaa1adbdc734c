"""What the recipe, the model and the training rely on, of every aggregator and its variants."""

from typing import get_args

import pytest
import torch

from xret.heads.modules.aggregators.element_slots import ElementSlots
from xret.heads.modules.aggregators.fspool import FSPool
from xret.heads.modules.aggregators.gaussian import Of, TwinBranches
from xret.heads.modules.aggregators.gem import GeM
from xret.heads.modules.aggregators.gpo import GPO
from xret.heads.modules.aggregators.pcme import PCME, PCMEPlusPlus
from xret.heads.modules.aggregators.pie_net import PIENet
from xret.heads.modules.aggregators.pooling import Average, First, KMax, Last, Max
from xret.heads.modules.aggregators.region_graph import RegionGraph
from xret.heads.modules.aggregators.sequence_pooling import SelfAttention, Seq2Seq
from xret.heads.modules.padding import valid_rows
from xret.heads.recipes.schema import fields

PARTS = [
    (Average, {}),
    (Max, {}),
    (KMax, {}),
    (First, {}),
    (Last, {}),
    (GeM, {}),
    (FSPool, {}),
    (SelfAttention, {}),
    (Seq2Seq, {}),
    (GPO, {}),
    (GPO, {"generator": "cos-sin-mlp"}),
    (GPO, {"generator": "index-bigru"}),
    (GPO, {"generator": "interpolation"}),
    (GPO, {"per_dimension": True}),
    (GPO, {"feature_input": True}),
    (PIENet, {}),
    (PIENet, {"slots": 1}),
    (ElementSlots, {}),
    (ElementSlots, {"positions": "circle", "heads": 2}),
    (ElementSlots, {"dropout": 0.5}),
    (ElementSlots, {"initial": "gaussian"}),
    (ElementSlots, {"update": "gru"}),
    (ElementSlots, {"global_feature": False}),
    (ElementSlots, {"normalized_over": "inputs"}),
    (RegionGraph, {}),
    (RegionGraph, {"then": "average"}),
    *((TwinBranches, {"of": of}) for of in get_args(Of)),
    (PCME, {}),
    (PCME, {"summary": "gru"}),
    (PCMEPlusPlus, {}),
]
every_part = pytest.mark.parametrize(("part", "parameters"), PARTS, ids=lambda x: getattr(x, "__name__", str(x)))
LENGTH = torch.tensor([5, 2, 1])


def make(part, parameters):
    torch.manual_seed(0)
    module = part(8, 8, **parameters).eval()
    for name, weight in module.named_parameters():
        if "norm.weight" in name and not weight.any():  # a fresh region graph changes nothing
            torch.nn.init.uniform_(weight, 0.1, 0.3)
    return module


def inputs(dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(3, *shape, generator=generator, dtype=dtype) for shape in [(5, 8), (8,)]]


def values(aggregated):
    """The embedding as one tensor: of a Gaussian, mean and log variance side by side."""
    embedding = aggregated.embedding
    return embedding if torch.is_tensor(embedding) else torch.cat(embedding, 1)


@every_part
def test_padding_changes_nothing_and_gets_no_gradient(part, parameters):
    module, (local, global_) = make(part, parameters).double(), inputs()
    alone = [module(local[b : b + 1, :n], LENGTH[b : b + 1], global_[b : b + 1]) for b, n in enumerate(LENGTH)]
    longer = torch.nn.functional.pad(local, (0, 0, 0, 4))
    padding = ~valid_rows(longer, LENGTH)
    for garbage in (torch.nan, torch.inf, -torch.inf, 1e30):
        padded = longer.masked_fill(padding[..., None], garbage).requires_grad_()
        aggregated = module(padded, LENGTH, global_)
        torch.testing.assert_close(values(aggregated), torch.cat([values(sample) for sample in alone]))
        for b, (n, sample) in enumerate(zip(LENGTH, alone, strict=True)):
            if aggregated.attention is not None:
                torch.testing.assert_close(aggregated.attention[:, b, ..., :n], sample.attention[:, 0])
                assert not aggregated.attention[:, b, ..., n:].any()
            if aggregated.rows is not None:
                torch.testing.assert_close(aggregated.rows.rows[b, :n], sample.rows.rows[0])
                assert not aggregated.rows.rows[b, n:].any()
        if module.uses_local:
            values(aggregated).square().sum().backward()
            assert (padded.grad[padding] == 0).all()
            assert (padded.grad[~padding] != 0).any()
            assert padded.grad.isfinite().all()
        assert all(weight.grad is None or weight.grad.isfinite().all() for weight in module.parameters())


@every_part
def test_shape_and_samples_without_rows(part, parameters):
    module, (local, global_) = make(part, parameters).double(), inputs()
    local.requires_grad_()
    aggregated = module(local, torch.tensor([0, 5, 3]), global_.requires_grad_())
    if part.embedding == "set":
        assert aggregated.embedding.shape == (3, parameters.get("slots", aggregated.embedding.shape[1]), 8)
    else:
        assert values(aggregated).shape == (3, 8 if part.embedding == "vector" else 16)
    assert values(aggregated).isfinite().all()
    if part.embedding == "vector":
        assert (aggregated.embedding[0] == 0).all()
    values(aggregated).sum().backward()
    assert all(x.grad is None or x.grad.isfinite().all() for x in (local, *module.parameters()))


@every_part
def test_every_weight_is_trained(part, parameters):
    module, (local, global_) = make(part, parameters).double().train(), inputs()
    for features in (local, global_):  # some have no weights
        features.requires_grad_()
    embedding = values(module(local, LENGTH, global_))
    (embedding * torch.randn(embedding.shape[-1])).square().sum().backward()
    for name, weight in module.named_parameters():
        assert weight.grad is not None, name
        # What is added to all slots alike changes nothing in their competition, nor before a batch norm; published
        # heads have these weights.
        idle = (name == "block.norm.bias" and module.block.normalized_over == "slots") or (
            "layers." in name and name.endswith("out.bias")
        )
        assert weight.grad.abs().max() > 1e-9 or idle, name


@every_part
def test_is_made_without_memory(part, parameters):
    with torch.device("meta"):
        module = part(8, 8, **parameters)
    assert all(weight.is_meta for weight in module.parameters())
    local, global_ = inputs(torch.float32)
    module.to_empty(device="cpu")(local, LENGTH, global_)
    assert set(parameters) <= fields(part).keys()


@every_part
@pytest.mark.parametrize("how", ["autocast", "bfloat16"])
def test_low_precision_stays_near(part, parameters, how):
    (local, global_), exact, rough = inputs(torch.float32), make(part, parameters).double(), make(part, parameters)
    expected = values(exact(local.double(), LENGTH, global_.double()))
    if how == "bfloat16":
        rough, local, global_ = rough.bfloat16(), local.bfloat16(), global_.bfloat16()
    local.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=how == "autocast"):
        embedding = values(rough(local, LENGTH, global_))
    # Eight bits of mantissa: a few percent of the largest value, more after four rounds or a temperature of 0.1.
    assert (embedding.double() - expected).abs().max() <= 0.08 * expected.abs().max()
    if rough.uses_local:
        embedding.float().sum().backward()
        assert local.grad.isfinite().all()


@every_part
def test_says_whether_the_global_feature_counts(part, parameters):
    module, (local, global_) = make(part, parameters).double(), inputs()
    given, other = (values(module(local, LENGTH, vector)) for vector in (global_, -global_))
    assert module.uses_global is not torch.equal(given, other)


@pytest.mark.parametrize(
    ("part", "parameters"),
    [
        (FSPool, {}),
        (Average, {}),
        (RegionGraph, {"then": "average"}),
        (PCMEPlusPlus, {}),
        (TwinBranches, {"of": "average"}),
    ],
)
def test_what_only_pools_keeps_the_width(part, parameters):
    with pytest.raises(ValueError, match="keeps the width of the local rows, which is 3 and not 4"):
        part(3, 4, **parameters)
