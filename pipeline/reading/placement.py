"""Where the features of a split lie while a head is trained: on the device, in the host's memory, or in the store."""

import os
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ..errors import RunError
from ..store.rows import ranges
from ..wording import in_bytes

Placement = Literal["auto", "memory", "stream"]  # what is asked for
Where = Literal["device", "host", "store"]  # the memory of the device or of the host, or the files of the store

SHARE = 0.6  # of the free memory that `auto` fills; the rest is the model's
_PART = 1 << 26  # bytes that are read at once when a table is filled
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Array:
    """One array of a feature set for the samples of a split, wherever it is put."""

    name: Hashable  # what tells it from all others
    read: Callable[[np.ndarray], np.ndarray]  # returns the rows of samples, packed, from their rows in the cache
    rows: np.ndarray  # the samples' rows in the cache, int64 [S]
    count: np.ndarray  # rows of the array that belong to each sample, int64 [S]
    ragged: bool  # whether `count` varies, so that a batch has to be padded
    row_bytes: int  # of a row of the array

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self.row_bytes * int(self.count.sum())


def choose(
    placement: Placement, arrays: Sequence[Array], device: torch.device, is_local: bool, what: str, resident: "Resident"
) -> tuple[Placement, Where]:
    """Return how `arrays`, all features of a split, are placed, and where they lie.

    - ``memory``: on a GPU in its memory, or else in the host's; on a CPU in the mapped files of a local store, which
      the system keeps in memory, or in the host's memory if they come from an object store.
    - ``stream``: in the store; an epoch visits it block by block (`prefetch.block_order`).
    - ``auto``: ``memory`` if they fit `SHARE` of what is free, else ``stream``.

    Args:
        is_local: whether the store lies on a local disk.
        what: the features, for messages.
        resident: what lies in memory already.

    Raises:
        RunError: ``memory`` is too small.
    """
    if placement == "stream":
        return "stream", "store"
    free: dict[Where, int] = {"host": free_host_memory()}
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what earlier trainings of this process have left
        free = {"device": torch.cuda.mem_get_info(device)[0], **free}
    size = sum(array.nbytes for array in arrays)
    share = SHARE if placement == "auto" else 1.0
    for place, room in free.items():
        if size - resident.bytes_of(arrays, place, device) <= share * room:
            mapped = place == "host" and device.type == "cpu" and is_local
            return "memory", "store" if mapped else place
    if placement == "memory":
        beside = ", ".join(f"{in_bytes(room)} of the {name}'s memory is free" for name, room in free.items())
        raise RunError(f"{what} take {in_bytes(size)}, and {beside}; set runtime.cache to stream")
    return "stream", "store"


def free_host_memory() -> int:
    """Return the bytes that this process may take without others being swapped out, also within a container's limit."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # not Linux: half of what is built in
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    try:  # files that the container has cached make room
        counts = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        cached = int(counts["active_file"]) + int(counts["inactive_file"])
        limit, used = (int((_CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        return max(0, min(free, limit - used + cached))
    except (OSError, ValueError, KeyError):  # not in a container, or in one without a limit
        return free


class Column:
    """An array of a split's features for a device, whose samples are counted from 0 within the split.

    `where` it lies; in memory it is filled now.
    """

    def __init__(self, array: Array, where: Where, device: torch.device) -> None:
        self.read, self.rows, self.count, self.device = array.read, array.rows, array.count, device
        self.start = np.cumsum(array.count) - array.count
        self.table: Tensor | None = None  # the rows of all samples, one sample after the other
        if where == "store":
            array.read(array.rows[:1])  # opens it before two threads do
        else:
            self.table = _table(array, device if where == "device" else torch.device("cpu"))

    def fetch(self, items: np.ndarray) -> Callable[[], Tensor]:
        """Read or gather the rows of these samples; what is returned gives them on the device, packed.

        For a GPU they are put into page-locked memory, from which they are copied beside the computation. Torch
        computes nothing before that, so any thread may call.
        """
        pinned = self.device.type == "cuda"
        if self.table is None:
            found = torch.from_numpy(self.read(self.rows[items]))
            return partial((found.pin_memory() if pinned else found).to, self.device, non_blocking=True)
        table, rows = self.table, ranges(self.start[items], self.count[items])
        if table.is_cuda:
            return lambda: table.index_select(0, torch.from_numpy(rows).to(table.device, non_blocking=True))
        out = torch.empty((len(rows), *table.shape[1:]), dtype=table.dtype, pin_memory=pinned)
        # NumPy gathers in the thread that calls; torch would start as many threads as there are cores beside it.
        np.take(table.numpy(), rows, axis=0, out=out.numpy(), mode="clip")
        return partial(out.to, self.device, non_blocking=True)


class Resident:
    """Columns that several trainings of this process read, one after another: each is made once."""

    def __init__(self) -> None:
        self._columns: dict[Hashable, Column] = {}

    def column(self, array: Array, where: Where, device: torch.device) -> Column:
        """Return the column of an array; in memory it is filled once."""
        key = (array.name, where, str(device))
        if key not in self._columns:
            self._columns[key] = Column(array, where, device)
        return self._columns[key]

    def bytes_of(self, arrays: Sequence[Array], where: Where, device: torch.device) -> int:
        """Return how many bytes of `arrays` lie in that memory already."""
        return sum(array.nbytes for array in arrays if (array.name, where, str(device)) in self._columns)


def _table(array: Array, device: torch.device) -> Tensor:
    """Read all rows, in order and in parts."""
    row = array.read(array.rows[:1])[:1]
    table = torch.empty((int(array.count.sum()), *row.shape[1:]), dtype=torch.from_numpy(row).dtype, device=device)
    samples = max(1, int(_PART / max(1, row.nbytes * array.count.mean())))
    end = 0
    for first in range(0, len(array.rows), samples):
        part = torch.from_numpy(array.read(array.rows[first : first + samples]))
        table[end : end + len(part)].copy_(part)
        end += len(part)
    return table
