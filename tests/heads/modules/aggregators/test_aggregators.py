"""What the recipe, the model and the training rely on, of every aggregator and its variants."""

import pytest
import torch

from xret.heads.modules.aggregators.element_slots import ElementSlots
from xret.heads.modules.aggregators.fspool import FSPool
from xret.heads.modules.aggregators.gem import GeM
from xret.heads.modules.aggregators.gpo import GPO
from xret.heads.modules.aggregators.pie_net import PIENet
from xret.heads.modules.aggregators.pooling import Average, First, KMax, Last, Max
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
]
every_part = pytest.mark.parametrize(("part", "parameters"), PARTS, ids=lambda x: getattr(x, "__name__", str(x)))
LENGTH = torch.tensor([5, 2, 1])


def make(part, parameters):
    torch.manual_seed(0)
    return part(8, 8, **parameters).eval()


def inputs(dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(3, *shape, generator=generator, dtype=dtype) for shape in [(5, 8), (8,)]]


@every_part
def test_padding_changes_nothing_and_gets_no_gradient(part, parameters):
    module, (local, global_) = make(part, parameters).double(), inputs()
    alone = [module(local[b : b + 1, :n], LENGTH[b : b + 1], global_[b : b + 1]) for b, n in enumerate(LENGTH)]
    padding = ~valid_rows(local, LENGTH)
    for garbage in (torch.nan, torch.inf, -torch.inf, 1e30):
        padded = local.masked_fill(padding[..., None], garbage).requires_grad_()
        embedding = module(padded, LENGTH, global_).embedding
        torch.testing.assert_close(embedding, torch.cat([sample.embedding for sample in alone]))
        embedding.square().sum().backward()
        assert (padded.grad[padding] == 0).all()
        assert (padded.grad[~padding] != 0).any()
        assert padded.grad.isfinite().all()
        assert all(weight.grad is None or weight.grad.isfinite().all() for weight in module.parameters())


@every_part
def test_longer_padding_changes_nothing(part, parameters):
    module, (local, global_) = make(part, parameters).double(), inputs()
    expected = module(local, LENGTH, global_).embedding
    longer = torch.nn.functional.pad(local, (0, 0, 0, 4))
    torch.testing.assert_close(module(longer, LENGTH, global_).embedding, expected)


@every_part
def test_shape_type_and_samples_without_rows(part, parameters):
    module, (local, global_) = make(part, parameters).double(), inputs()
    local.requires_grad_()
    aggregated = module(local, torch.tensor([0, 5, 3]), global_)
    shape = (3, parameters.get("slots", module(local, LENGTH, global_).embedding.shape[1]), 8)
    assert aggregated.embedding.shape == (shape if part.embedding == "set" else (3, 8))
    assert aggregated.embedding.isfinite().all()
    if part.embedding == "vector":
        assert (aggregated.embedding[0] == 0).all()
    aggregated.embedding.sum().backward()
    assert local.grad.isfinite().all()
    assert all(weight.grad is None or weight.grad.isfinite().all() for weight in module.parameters())


@every_part
def test_every_weight_is_trained(part, parameters):
    module, (local, global_) = make(part, parameters).double().train(), inputs()
    local.requires_grad_()  # some have no weights
    (module(local, LENGTH, global_).embedding * torch.randn(8)).square().sum().backward()
    for name, weight in module.named_parameters():
        assert weight.grad is not None, name
        # What is added to all slots alike changes nothing in their competition; published heads have the weight.
        idle = name == "block.norm.bias" and module.block.normalized_over == "slots"
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
    expected = exact(local.double(), LENGTH, global_.double()).embedding
    if how == "bfloat16":
        rough, local, global_ = rough.bfloat16(), local.bfloat16(), global_.bfloat16()
    local.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=how == "autocast"):
        embedding = rough(local, LENGTH, global_).embedding
    embedding.float().sum().backward()
    # Eight bits of mantissa: a few percent of the largest value, more after four rounds or a temperature of 0.1.
    assert (embedding.double() - expected).abs().max() <= 0.08 * expected.abs().max()
    assert local.grad.isfinite().all()


@every_part
def test_says_whether_the_global_feature_counts(part, parameters):
    module, (local, global_) = make(part, parameters).double(), inputs()
    given, other = (module(local, LENGTH, vector).embedding for vector in (global_, -global_))
    assert module.uses_global is not torch.equal(given, other)
