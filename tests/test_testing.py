"""The contracts that xret ships: each breach is told, and what keeps them passes; bundled parts are tested in heads."""

import re
from pathlib import Path

import pytest
import torch
from own_encoder import Askew, Letters, Quarters
from torch import nn

from xret.losses import Loss
from xret.nn import Aggregated, Aggregator, valid_rows
from xret.similarities import Similarity
from xret.testing import check_aggregator, check_encoder, check_loss, check_similarity

CHECKS = {Aggregator: check_aggregator, Similarity: check_similarity, Loss: check_loss}


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


class Left(Mean):
    def __init__(self, local_dim, dim):
        super().__init__(local_dim, dim)
        self.scale = torch.ones(1)


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


class Detached(Loss):
    def forward(self, similarity, positives, images, captions):
        return similarity.detach().sum()


class Constant(Loss):
    def forward(self, similarity, positives, images, captions):
        return (
            similarity.masked_fill(~positives, 0).square().sum()
            + 2 * similarity[positives].detach() @ similarity[positives]
        )


class Resting(Loss):
    def at_rest(self, pairs):
        return 3.0

    def forward(self, similarity, positives, images, captions):
        return similarity.masked_fill(~positives, 0).square().sum()


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (nn.Linear, "derives from Aggregator"),
        (Leaking, "padding or another sample"),
        (Idle, "unused does not learn"),
        (Claiming, "uses_global is True"),
        (Early, "on a fixed device"),
        (Left, "scale: .* register_buffer"),
        (Wrong, "lengths of embeddings"),
        (Weighed, "a rotation of all"),
        (Half, "is compared in"),
        (Rounded, "float64 is rounded"),
        (First, "another order of the batch"),
        (Infinite, "similarity -inf"),
        (Detached, "not attached"),
        (Constant, "whole=False"),
        (Resting, "at_rest is 3"),
    ],
)
def test_a_breach_is_told(part, message):
    check = next((check for base, check in CHECKS.items() if issubclass(part, base)), check_aggregator)
    with pytest.raises(AssertionError, match=message):
        check(part)


class Turned(Quarters):
    def decode(self, path):
        image, size = super().decode(path)
        return image, size[::-1]


class Double(Quarters):
    def encode(self, pixels):
        return tuple(features.astype(float) for features in super().encode(pixels))


class Returning(Letters):
    def encode(self, ids):
        super().encode(ids)


class Together(Quarters):
    def encode(self, pixels):
        local, global_ = super().encode(pixels)
        return local - local.mean(0), global_


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (Turned, "decode gives the size"),
        (Double, "not float32"),
        (Together, "beside a picture"),
        (Askew, "4 cells"),
        (Returning, "returns None"),
    ],
)
def test_a_breach_of_an_encoder_is_told(part, message):
    with pytest.raises(AssertionError, match=message):
        check_encoder(part(None, "cpu") if part is Returning else part("none", 60, "cpu"))


def test_what_keeps_the_contract_passes_and_draws_nothing():
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    check_aggregator(Mean)
    check_similarity(Dot)
    check_loss(Constant, whole=False)
    check_encoder(Quarters("none", 60, "cpu"))
    check_encoder(Letters(None, "cpu"))
    check_similarity(type("Unclaimed", (Weighed,), {"of_cosines": False}))
    assert torch.rand(1) == expected


def test_the_example_of_the_tutorial_keeps_it():
    document = Path(__file__).parents[1] / "docs" / "tutorials" / "your-head.md"
    namespace = {}
    for block in re.findall(r"^```python\n(.*?)^```$", document.read_text("utf-8"), re.DOTALL | re.MULTILINE):
        exec(compile(block, document.name, "exec"), namespace)
    namespace["test_between"]()
