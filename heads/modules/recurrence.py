"""GRUs over rows of different lengths, on every device."""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ...pipeline.device import on_host, send
from .padding import MovedRows, ways

R = TypeVar("R", Tensor, PackedSequence)


def run_gru(gru: nn.GRU, rows: R) -> tuple[R, Tensor]:
    """Return ``gru(rows)``; under bfloat16 on a GPU it is computed in float32.

    cuDNN's GRUs have no bfloat16 in torch's mixed precision: it gives them float16, whose gradients vanish unscaled.
    """
    data = rows.data if isinstance(rows, PackedSequence) else rows
    if not data.is_cuda or torch.get_autocast_dtype("cuda") != torch.bfloat16:
        return gru(rows)
    with torch.autocast("cuda", enabled=False):
        return gru(rows._replace(data=data.float()) if isinstance(rows, PackedSequence) else rows.float())


def run_packed(gru: nn.GRU, rows: Tensor, length: Tensor) -> tuple[Callable[[], Tensor], Tensor]:
    """Run a GRU over the valid rows of each sample alone, so that its backward direction begins at the last one.

    Args:
        gru: batch first.
        rows: `[B, N, C]`.
        length: valid rows of each sample, `[B]`, on any device; 0 counts as 1.

    Returns:
        What gives the states `[B, N, directions x H]`, zero after a sample's length, and the last ones, which few need
        beside them, `[directions, B, H]`.
    """
    # A packed batch holds the first rows of all samples, the longest sample first, then their second rows, and so on.
    # torch's own packing copies the whole batch once for every row when it goes back.
    samples, number = rows.shape[:2]
    length, order = on_host(length).clamp(min=1).sort(descending=True)
    step = torch.arange(int(length[0]))[:, None]
    inside = step < length
    there, back = ways((order * number + step)[inside], samples * number, rows.device)
    packed = MovedRows.apply(rows.flatten(0, 1), there, back)
    outputs, last = run_gru(gru, PackedSequence(packed, inside.sum(1)))

    def states() -> Tensor:
        return MovedRows.apply(outputs.data, back, there).unflatten(0, (samples, number))

    return states, last.index_select(1, send(order.argsort(), rows.device))
