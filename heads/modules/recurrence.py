"""GRUs over rows of different lengths, on every device."""

from typing import overload

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence


@overload
def run_gru(gru: nn.GRU, rows: Tensor) -> tuple[Tensor, Tensor]: ...


@overload
def run_gru(gru: nn.GRU, rows: PackedSequence) -> tuple[PackedSequence, Tensor]: ...


def run_gru(gru: nn.GRU, rows: Tensor | PackedSequence) -> tuple[Tensor | PackedSequence, Tensor]:
    """Return ``gru(rows)``; under bfloat16 on a GPU it is computed in float32.

    cuDNN's GRUs have no bfloat16 in torch's mixed precision: it gives them float16, whose gradients vanish unscaled.
    """
    data = rows.data if isinstance(rows, PackedSequence) else rows
    if not data.is_cuda or torch.get_autocast_dtype("cuda") != torch.bfloat16:
        return gru(rows)
    with torch.autocast("cuda", enabled=False):
        return gru(rows._replace(data=data.float()) if isinstance(rows, PackedSequence) else rows.float())


def run_packed(gru: nn.GRU, rows: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
    """Run a GRU over the valid rows of each sample alone, so that its backward direction begins at the last one.

    Args:
        gru: batch first.
        rows: `[B, N, C]`.
        length: valid rows of each sample, `[B]`, on any device; 0 counts as 1.

    Returns:
        The states `[B, N, directions x H]`, zero after a sample's length, and the last ones `[directions, B, H]`.
    """
    # The lengths of a packed batch live on the CPU. It is sorted here, because torch, to restore the order of the
    # samples, would make the CPU wait for a GPU.
    length, order = length.cpu().clamp(min=1).sort(descending=True)
    back = order.argsort().to(rows.device, non_blocking=True)
    rows = rows.index_select(0, order.to(rows.device, non_blocking=True))
    outputs, last = run_gru(gru, pack_padded_sequence(rows, length, batch_first=True))
    states, _ = pad_packed_sequence(outputs, batch_first=True, total_length=rows.shape[1])
    return states.index_select(0, back), last.index_select(1, back)
