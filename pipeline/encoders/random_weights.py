"""Random weights with which a network behaves: its batch norms know the statistics of varied images."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


def settle_norms(network: nn.Module, run: Callable[[], Any]) -> None:
    """Give the batch norms of a network the statistics that they see while `run` runs it; it stays in eval mode."""
    norms = [module for module in network.eval().modules() if isinstance(module, nn.BatchNorm2d)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.train().momentum = 1.0
    if norms:
        with torch.inference_mode():
            run()
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.eval().momentum = momentum
        if norm.num_batches_tracked is not None:
            norm.num_batches_tracked.zero_()


def noise_images(count: int, image_size: int) -> Tensor:
    """Draw images [count, 3, S, S] in 0..1, each with its own mixture of shades, shapes, edges and grain.

    Images that are all of one smoothness give statistics under which the features of photographs, or of flat
    drawings, grow from layer to layer, up to thousands.
    """
    weights = torch.rand(count, 4, 1, 1, 1) ** 3
    weights /= weights.square().sum(1, keepdim=True).sqrt()

    def noise(channels: int) -> Tensor:
        fields = [torch.randn(count, channels, side, side) for side in (1, 4, 16, 64)]
        scaled = [functional.interpolate(field, (image_size, image_size), mode="bilinear") for field in fields]
        return (weights * torch.stack(scaled, 1)).sum(1)

    return torch.sigmoid(4 * (noise(1) + 0.6 * noise(3)))
