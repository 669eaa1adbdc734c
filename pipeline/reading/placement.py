"""Where the features of a split lie while a head is trained: on the device, in the host's memory, or in the store."""

import os
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ..data.texts import ranges
from ..device import CGROUP
from ..errors import RunError
from ..wording import in_bytes

Placement = Literal["auto", "memory", "stream"]  # what is asked for
Where = Literal["device", "host", "store"]  # the memory of the device or of the host, or the files of the store

SHARE = 0.6  # of the free memory that `auto` fills; the rest is the model's
_PART = 1 << 26  # bytes that are read at once when a table is filled
_CPU = torch.device("cpu")


class Resident(dict[Hashable, Tensor]):
    """Arrays in memory that several trainings of this process read, one after another: each is filled once.

    So many `processes` of this machine train side by side, and share its memory.
    """

    def __init__(self, processes: int = 1) -> None:
        super().__init__()
        self.processes = processes


@dataclass(eq=False)
class Column:
    """One array of a feature set for the samples of a split, which are counted from 0; `place` puts it somewhere."""

    name: Hashable  # what tells it from all others
    read: Callable[[np.ndarray], np.ndarray]  # returns the rows of samples, packed, from the store
    samples: int
    count: np.ndarray | None  # rows of the array that belong to each sample, [S]; None: one, so that nothing is padded
    row_bytes: int  # of a row of the array
    device: torch.device = _CPU  # where batches go
    table: Tensor | None = None  # in memory, the rows of all samples, one sample after the other

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self.row_bytes * self._rows

    @cached_property
    def _rows(self) -> int:
        return self.samples if self.count is None else int(self.count.sum())

    @cached_property
    def _start(self) -> np.ndarray:
        """First row of each sample in a table, int64 [S], where they are several."""
        assert self.count is not None, "else it is the sample"
        return np.asarray(np.cumsum(self.count) - self.count)

    def key(self, where: Where, device: torch.device) -> Hashable:
        """Return what a `Resident` calls it."""
        return self.name, where, str(device)

    def place(self, where: Where, device: torch.device, resident: Resident) -> None:
        """Put it there, unless `resident` has it, for batches on `device`."""
        self.device = device
        if where == "store":
            self.read(np.arange(1))  # opens it before two threads do
            return
        key = self.key(where, device)
        if key not in resident:
            resident[key] = self._filled(device if where == "device" else _CPU)
        self.table = resident[key]

    def fetch(self, items: np.ndarray) -> Callable[[], Tensor]:
        """Read or gather the rows of these samples; what is returned gives them on the device, packed.

        For a GPU they are put into page-locked memory, from which they are copied beside the computation. Torch
        computes nothing before that, so any thread may call.
        """
        pinned = self.device.type == "cuda"
        if self.table is None:
            found = torch.from_numpy(self.read(items))
            return partial((found.pin_memory() if pinned else found).to, self.device, non_blocking=True)
        table, rows = self.table, items if self.count is None else ranges(self._start[items], self.count[items])
        if table.is_cuda:
            return lambda: table.index_select(0, torch.from_numpy(rows).to(table.device, non_blocking=True))
        out = torch.empty((len(rows), *table.shape[1:]), dtype=table.dtype, pin_memory=pinned)
        # NumPy gathers in the thread that calls; torch would start as many threads as there are cores beside it.
        np.take(table.numpy(), rows, axis=0, out=out.numpy(), mode="clip")
        return partial(out.to, self.device, non_blocking=True)

    def _filled(self, device: torch.device) -> Tensor:
        row = self.read(np.arange(1))[:1]
        table = torch.empty((self._rows, *row.shape[1:]), dtype=torch.from_numpy(row).dtype, device=device)
        samples, end = max(1, int(_PART / max(1, row.nbytes * self._rows / self.samples))), 0
        for first in range(0, self.samples, samples):
            part = torch.from_numpy(self.read(np.arange(first, min(first + samples, self.samples))))
            table[end : end + len(part)].copy_(part)
            end += len(part)
        return table


def choose_placement(
    placement: Placement, columns: Sequence[Column], device: torch.device, is_local: bool, what: str, resident: Resident
) -> tuple[Placement, Where]:
    """Return how `columns`, all features of a split, are placed, and where they lie.

    - ``memory``: on a GPU in its memory, or else in the host's; on a CPU, and where several processes would each have a
      copy in the host's, in the mapped files of a local store, which the system keeps in memory once for all.
    - ``stream``: in the store; an epoch visits it block by block (`prefetch.block_order`).
    - ``auto``: ``memory`` if they fit `SHARE` of what is free, else ``stream``.

    The store may lie on a local disk, and what is `resident` lies in memory already. RunError: ``memory`` is too small
    for `what`, the features.
    """
    if placement == "stream":
        return "stream", "store"
    free: dict[Where, int] = {"host": free_host_memory()}
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what earlier trainings of this process have left
        free = {"device": torch.cuda.mem_get_info(device)[0], **free}
    size = sum(column.nbytes for column in columns)
    share = SHARE if placement == "auto" else 1.0
    for place, room in free.items():
        there = sum(column.nbytes for column in columns if column.key(place, device) in resident)
        mapped = place == "host" and is_local and (device.type == "cpu" or resident.processes > 1)
        if (size - there) * (1 if mapped else resident.processes) <= share * room:
            return "memory", "store" if mapped else place
    if placement == "memory":
        beside = ", ".join(f"{in_bytes(room)} of the {name}'s memory is free" for name, room in free.items())
        copies = f" in each of {resident.processes} processes" if resident.processes > 1 else ""
        raise RunError(f"{what} take {in_bytes(size)}{copies}, and {beside}; set runtime.cache to stream")
    return "stream", "store"


def free_host_memory() -> int:
    """Return the bytes that this process may take without others being swapped out, also within a container's limit."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # not Linux: half of what is built in
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    try:  # files that the container has cached make room
        counts = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        cached = int(counts["active_file"]) + int(counts["inactive_file"])
        limit, used = (int((CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        return max(0, min(free, limit - used + cached))
    except (OSError, ValueError, KeyError):  # not in a container, or in one without a limit
        return free
