"""GRUs over rows of different lengths, on every device."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import _VF, Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.onnx.ops import symbolic_multi_out

from ...pipeline.device import may_wait, on_host
from .padding import MovedRows, way_back

R = TypeVar("R", Tensor, PackedSequence)


def run_gru(gru: Callable[[R], tuple[R, Tensor]], rows: R) -> tuple[R, Tensor]:
    """Return ``gru(rows)``; under bfloat16 on a GPU it is computed in float32.

    cuDNN's GRUs have no bfloat16 in torch's mixed precision: it gives them float16, whose gradients vanish unscaled.
    """
    if not rows.is_cuda or torch.get_autocast_dtype("cuda") != torch.bfloat16:
        return gru(rows)
    with torch.autocast("cuda", enabled=False):
        return gru(rows.float())


def run_packed(gru: nn.GRU, rows: Tensor, length: Tensor) -> tuple[Callable[[], Tensor], Tensor]:
    """Run a GRU over the valid rows of each sample alone, so that its backward direction begins at the last one.

    Args:
        gru: of one layer, batch first.
        rows: `[B, N, C]`, whose padding must be finite.
        length: valid rows of each sample, `[B]`, on any device; 0 counts as 1.

    Returns:
        What gives the states `[B, N, directions x H]`, zero after a sample's length, which few need, and the last ones
        `[directions, B, H]`.
    """
    if torch.compiler.is_exporting():
        return run_onnx(gru, rows, length)
    if not may_wait(rows):
        return run_padded(gru, rows, length)
    # A packed batch holds the first rows of all samples, the longest sample first, then their second rows, and so on.
    # torch's own packing copies the whole batch once for every row when it goes back.
    samples, number = rows.shape[:2]
    length, order = on_host(length).clamp(min=1).sort(descending=True)
    step = torch.arange(int(length[0]))[:, None]
    inside = step < length
    there = (order * number + step)[inside]
    back = way_back(there, samples * number)
    packed = MovedRows.apply(rows.flatten(0, 1), there, back)
    outputs, last = run_gru(gru, PackedSequence(packed, inside.sum(1)))

    def states() -> Tensor:
        return MovedRows.apply(outputs.data, back, there).unflatten(0, (samples, number))

    return states, last.index_select(1, order.argsort())


def run_padded(gru: nn.GRU, rows: Tensor, length: Tensor) -> tuple[Callable[[], Tensor], Tensor]:
    """Return what `run_packed` does, but compute padding, too, so that no shape depends on lengths.

    A GPU's time goes by steps and hardly by rows. The backward direction reads each sample reversed within its own
    length, so that padding comes last in both directions.
    """
    samples, number = rows.shape[:2]
    sample, place = torch.arange(samples, device=rows.device), torch.arange(number, device=rows.device)
    turned = length.to(rows.device).clamp(min=1)[:, None] - 1 - place
    padding = turned < 0
    turned = torch.where(padding, place, turned)  # its own inverse
    # There: the first rows of all samples, then their second ones, and so on, each sample reversed.
    there, back = (sample[:, None] * number + turned).T.flatten(), (turned * samples + sample[:, None]).flatten()
    # Both directions come to a sample's end at the same step, where its first row stands reversed.
    to_end, from_end = back[::number], torch.where(turned.T == 0, sample, samples).flatten()
    made = [run_gru(partial(_run_direction, gru, 0), rows.transpose(0, 1))[0]]
    if gru.bidirectional:
        reversed_rows = MovedRows.apply(rows.flatten(0, 1), there, back).unflatten(0, (number, samples))
        made.append(run_gru(partial(_run_direction, gru, 1), reversed_rows)[0])
    last = torch.stack([MovedRows.apply(own.flatten(0, 1), to_end, from_end) for own in made])

    def states() -> Tensor:
        both = [made[0].transpose(0, 1)]
        both += [MovedRows.apply(own.flatten(0, 1), back, there).unflatten(0, (samples, number)) for own in made[1:]]
        return torch.cat(both, 2).masked_fill(padding[..., None], 0)

    return states, last


def run_onnx(gru: nn.GRU, rows: Tensor, length: Tensor) -> tuple[Callable[[], Tensor], Tensor]:
    """Return what `run_packed` does for lengths of at least 1, as ONNX's own GRU: torch would export single steps."""

    def joined(some: tuple[Tensor, ...]) -> Tensor:
        gates = [weight.chunk(3) for weight in some]  # of each direction: reset, update, new; ONNX has update first
        return torch.stack([torch.cat([update, reset, new]) for reset, update, new in gates])

    *weights, of_input, of_state = map(joined, zip(*gru.all_weights, strict=True))
    samples, number = rows.shape[:2]
    directions = 1 + gru.bidirectional
    attributes: Any = {"hidden_size": gru.hidden_size, "linear_before_reset": 1}
    states, last = symbolic_multi_out(
        "GRU",
        (rows.transpose(0, 1), *weights, torch.cat([of_input, of_state], 1), length.int()),
        attributes | {"direction": "bidirectional" if gru.bidirectional else "forward"},
        dtypes=(rows.dtype, rows.dtype),
        shapes=((number, directions, samples, gru.hidden_size), (directions, samples, gru.hidden_size)),
        version=14,
    )
    return lambda: states.permute(2, 0, 1, 3).flatten(2), last


def _run_direction(gru: nn.GRU, number: int, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Run one direction of a GRU, 0 or 1, over all of `rows [N, B, C]` in their order."""
    weights = gru.all_weights[number]
    # Side by side in memory, weights before biases, as cuDNN reads them: else it copies them one by one, and warns.
    joined = torch.cat([one.flatten() for one in weights]).split([one.numel() for one in weights])
    parts = [part.view_as(one) for part, one in zip(joined, weights, strict=True)]
    start = rows.new_zeros(1, rows.shape[1], gru.hidden_size)
    states, last = _VF.gru(rows, start, parts, gru.bias, 1, 0.0, gru.training, False, False)
    return states, last
