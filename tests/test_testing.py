"""The contracts that xret ships: every registered part keeps its own, and each breach is told."""

import re
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import nn

from xret.heads.modules.aggregators import AGGREGATORS
from xret.heads.modules.aggregators.gaussians import Of
from xret.heads.modules.losses import LOSSES
from xret.heads.modules.similarity import SIMILARITIES
from xret.heads.recipes.schema import fields
from xret.losses import Loss
from xret.nn import Aggregated, Aggregator, valid_rows
from xret.similarities import Similarity
from xret.testing import check_aggregator, check_loss, check_similarity

CHECKS = {check_aggregator: AGGREGATORS, check_similarity: SIMILARITIES, check_loss: LOSSES}
SLOTS = {"heads": 2, "positions": "circle", "dropout": 0.5, "initial": "gaussian", "update": "gru"}
VARIED = [
    *(("gpo", {"generator": generator}) for generator in ("cos-sin-mlp", "index-bigru", "interpolation")),
    *(("gpo", {name: True}) for name in ("per_dimension", "feature_input")),
    ("pie-net", {"slots": 1}),
    *(("element-slots", {name: value}) for name, value in SLOTS.items()),
    ("element-slots", {"global_feature": False}),
    ("element-slots", {"normalized_over": "inputs"}),
    ("region-graph", {"then": "average"}),
    *(("gaussian", {"of": of}) for of in get_args(Of)),
    ("pcme", {"summary": "gru"}),
    *(("smooth-chamfer", {"alpha": alpha}) for alpha in (0.5, 40.0)),  # below and above what is computed at once
    ("wasserstein", {"form": "printed"}),
    ("kl", {"direction": "caption-image"}),
    *(
        ("cross-attention", {"direction": direction, "pooling": pooling, "negative_slope": 0.1})
        for direction in ("t-i", "i-t")
        for pooling in ("lse", "average")
    ),
    ("monte-carlo-match", {"link": "logistic"}),
    *(("triplet", {"negatives": negatives}) for negatives in ("all", "semi-hard")),
    *(("triplet", {"negatives": negatives, "reduction": "sum"}) for negatives in ("all", "semi-hard", "hardest")),
    ("diversity", {"form": "gram"}),
    ("embedding-graph", {"strongest": 2, "reduction": "mean", "negatives": "all"}),
    ("information-bottleneck", {"form": "pcme"}),
    ("infonce", {"scale": 7.0, "logarithm": True}),
    ("matching-bce", {"pseudo_positives": 0.3}),
]
MORE = {
    # Weights that are added to all slots alike, and change nothing in their competition, or that a batch norm takes out
    # again; published heads have them.
    "element-slots": {"idle": ["block.norm.bias"]},
    "region-graph": {"idle": ["out.bias"]},
    "gaussian": {"idle": ["out.bias"]},
    "embedding-graph": {"embedding": "vector", "whole": False},  # takes rows and what guides the relevances as constant
}


@pytest.mark.parametrize(
    ("name", "parameters"), [*((name, {}) for parts in CHECKS.values() for name in parts), *VARIED], ids=str
)
def test_every_part_keeps_its_contract(name, parameters):
    check, part = next((check, parts[name]) for check, parts in CHECKS.items() if name in parts)
    check(part, **MORE.get(name, {}), **parameters)
    assert set(parameters) <= fields(part).keys()


class Mean(Aggregator):
    def forward(self, local, length, global_):
        rows = local.masked_fill(~valid_rows(local, length)[..., None], 0)
        return Aggregated(rows.sum(1) / length[:, None].clamp(min=1))


class Leaking(Mean):
    """Its padding is multiplied by zero, which is NaN of what is not finite."""

    def forward(self, local, length, global_):
        rows = local * valid_rows(local, length)[..., None]
        return Aggregated(rows.sum(1) / length[:, None].clamp(min=1))


class Idle(Mean):
    def __init__(self, local_dim, dim):
        super().__init__(local_dim, dim)
        self.unused = nn.Parameter(torch.ones(2))


class Claiming(Mean):
    uses_global = True


class Early(Mean):
    def __init__(self, local_dim, dim):
        super().__init__(local_dim, dim)
        self.scale = nn.Parameter(torch.ones(1, device="cpu"))

    def forward(self, local, length, global_):
        return Aggregated(self.scale * super().forward(local, length, global_).embedding)


class Dot(Similarity):
    def forward(self, images, captions):
        dtype = torch.promote_types(images.dtype, torch.float32)
        return images.to(dtype) @ captions.to(dtype).T


class Wrong(Dot):
    of_cosines = True


class Weighed(Similarity):
    of_cosines = True

    def forward(self, images, captions):
        dtype = torch.promote_types(images.dtype, torch.float32)
        images, captions = (nn.functional.normalize(side.to(dtype), dim=1) for side in (images, captions))
        return images[:, :2] @ captions[:, :2].T


class Half(Dot):
    def forward(self, images, captions):
        return images @ captions.T


class Rounded(Loss):
    def forward(self, similarity, positives, images, captions):
        return images.embedding.float().square().mean()


class First(Loss):
    def forward(self, similarity, positives, images, captions):
        return similarity[0, 0]


class Infinite(Loss):
    def forward(self, similarity, positives, images, captions):
        return (similarity * (~positives)).sum()


class Resting(Loss):
    def at_rest(self, pairs):
        return 3.0

    def forward(self, similarity, positives, images, captions):
        return similarity.masked_fill(~positives, 0).square().sum()


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (Leaking, "padding or another sample changes the embedding"),
        (Idle, "unused does not learn"),
        (Claiming, "uses_global is wrong"),
        (Early, "not made on the device of the context"),
        (Wrong, "lengths change scores"),
        (Weighed, "a rotation changes scores"),
        (Half, "is compared in"),
        (Rounded, "float64 is rounded"),
        (First, "another order of the batch"),
        (Infinite, "similarity -inf"),
        (Resting, "at_rest is wrong"),
    ],
)
def test_a_breach_is_told(part, message):
    check = next(check for check, parts in CHECKS.items() if issubclass(part, parts.base))
    with pytest.raises(AssertionError, match=message):
        check(part)


def test_what_keeps_the_contract_passes_and_draws_nothing():
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    check_aggregator(Mean)
    check_similarity(Dot)
    check_similarity(type("Unclaimed", (Weighed,), {"of_cosines": False}))
    assert torch.rand(1) == expected


def test_the_example_of_the_tutorial_keeps_it():
    document = Path(__file__).parents[1] / "docs" / "tutorials" / "your-head.md"
    namespace = {}
    for block in re.findall(r"^```python\n(.*?)^```$", document.read_text("utf-8"), re.DOTALL | re.MULTILINE):
        exec(compile(block, document.name, "exec"), namespace)
    namespace["test_between"]()
