"""Several processes train one head: each embeds its share of a batch, and each sees the whole loss.

    torchrun --nproc-per-node 2 -m xret.cli train-head STORE --recipe setdiv --out RUN

Every rank reads a batch whole and in the same order, and computes its loss whole, from the embeddings of all ranks:
negatives come from everywhere. Going back, a rank carries the gradient of its own share through its own branches; the
sum over ranks is the gradient that one process would have had.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...pipeline.device import pick_device
from ...pipeline.errors import RunError

_TIMEOUT = timedelta(hours=2)


@dataclass(frozen=True)
class Ranks:
    """The processes of a training; a single one without torchrun.

    Attributes:
        number: of this one, from 0.
        count: how many.
    """

    number: int = 0
    count: int = 1

    @property
    def first(self) -> bool:
        """Whether this is the one that writes."""
        return self.number == 0

    def share(self, items: int) -> tuple[int, int]:
        """Return which of so many items are this rank's, from first to before last; ranks differ by one."""
        return items * self.number // self.count, items * (self.number + 1) // self.count

    def gather(self, mine: Tensor, items: int) -> Tensor:
        """Return the rows of all ranks, ``[items, …]``, from this one's `share`; what `mine` has beyond is ignored.

        The gradient of a row goes to the rank that it came from.
        """
        gathered: Tensor = _Gather.apply(mine, *self.share(items), items)
        return gathered

    @contextmanager
    def own_draws(self, device: torch.device) -> Iterator[None]:
        """Let each rank draw numbers of its own, and all of them the same again afterwards."""
        if self.count == 1:
            yield
            return
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            # Not the step's own seed for any rank: rows to leave out were drawn with it.
            torch.manual_seed(torch.initial_seed() + 1 + self.number)
            yield

    def sum_gradients(self, shared: Iterable[nn.Parameter], whole: Iterable[nn.Parameter]) -> None:
        """Make every gradient that of the whole batch.

        Args:
            shared: parameters whose gradient is of this rank's share only: summed.
            whole: parameters of what every rank computes whole: averaged, so that rounding cannot part the ranks.
        """
        if self.count == 1:
            return
        sums = [p.grad for p in shared if p.grad is not None]
        means = [p.grad for p in whole if p.grad is not None]
        flat = torch.cat([*(g.flatten() for g in sums), *(g.flatten() / self.count for g in means)])
        dist.all_reduce(flat)
        gradients = [*sums, *means]
        for gradient, values in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(values.view_as(gradient))

    def agree(self, value: float, device: torch.device) -> float:
        """Return the first rank's `value` on all."""
        if self.count == 1:
            return value
        told = torch.tensor(value, dtype=torch.float64, device=device)
        dist.broadcast(told, 0)
        return told.item()

    def wait(self) -> None:
        """Go on when all ranks are here."""
        if self.count > 1:
            dist.barrier()


ALONE = Ranks()


@contextmanager
def joined_ranks(device: str) -> Iterator[tuple[Ranks, torch.device]]:
    """Join the processes that torchrun started, and give this one's device; each GPU has one.

    Raises:
        DeviceError: there is no such device.
    """
    if not dist.is_torchelastic_launched():
        yield ALONE, pick_device(device)
        return
    if device in ("auto", "cuda") and torch.cuda.is_available():
        device = f"cuda:{os.environ['LOCAL_RANK']}"
    target = pick_device(device)
    if target.type == "cuda":
        torch.cuda.set_device(target)
    # The others wait while the first one validates.
    if target.type == "cuda":
        dist.init_process_group("nccl", timeout=_TIMEOUT, device_id=target)
    else:
        dist.init_process_group("gloo", timeout=_TIMEOUT)
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size()), target
    finally:
        dist.destroy_process_group()


def require_one_process(what: str) -> None:
    """Raise RunError where torchrun has started this process; `what` says what knows nothing of it."""
    if dist.is_torchelastic_launched():
        raise RunError(f"{what} runs in one process; start it without torchrun")


def speaks() -> bool:
    """Return whether this process is the one to print."""
    return not dist.is_torchelastic_launched() or os.environ["RANK"] == "0"


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mine: Tensor, first: int, last: int, items: int) -> Tensor:
        ctx.first, ctx.last, ctx.shape = first, last, mine.shape
        rows = mine.new_zeros(items, *mine.shape[1:])
        rows[first:last] = mine[: last - first]
        dist.all_reduce(rows)  # a row plus zeros is the row itself, and shares need not be of one size
        return rows

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        mine = gradient.new_zeros(ctx.shape)
        mine[: ctx.last - ctx.first] = gradient[ctx.first : ctx.last]
        return mine, None, None, None
