"""Where the features of a split lie while a head is trained: on the device, in the host's memory, or in the store."""

import os
from collections.abc import Callable, Hashable, Iterator, Sequence
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
_CGROUPS = Path("/sys/fs/cgroup")
_LIMITS = (  # of a container's memory, version 2 and 1
    ("memory.max", "memory.current", "memory.stat", ""),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_"),
)


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
    placement: Placement,
    arrays: Sequence[Array],
    device: torch.device,
    is_local: bool,
    what: str,
    resident: "Resident",
) -> tuple[Placement, Where, str]:
    """Return how `arrays`, all features of a split, are placed, where they lie, and of ``auto`` a sentence on why.

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
        return "stream", "store", ""
    free: dict[Where, int] = {"host": free_host_memory()}
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what earlier trainings of this process have left
        free = {"device": torch.cuda.mem_get_info(device)[0], **free}
    size = sum(array.nbytes for array in arrays)
    share = SHARE if placement == "auto" else 1.0
    fits = (place for place in free if size - resident.bytes_of(arrays, place, device) <= share * free[place])
    place = next(fits, None)
    beside = ", ".join(f"{in_bytes(room)} of the {name}'s memory is free" for name, room in free.items())
    if place is None and placement == "memory":
        raise RunError(f"{what} take {in_bytes(size)}, and {beside}; set runtime.cache to stream")
    mapped = place == "host" and device.type == "cpu" and is_local
    why = f"{what} take {in_bytes(size)}: {'streamed' if place is None else 'in memory'} ({beside})."
    why = why if placement == "auto" else ""
    if place is None:
        return "stream", "store", why
    return "memory", "store" if mapped else place, why


def free_host_memory() -> int:
    """Return the bytes of memory that this process may take without others being swapped out."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # not Linux: half of what is built in
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return max(0, min([free, *_free_in_container()]))


def _free_in_container() -> Iterator[int]:
    """Yield what the limit of a container leaves; caches of files count as free, for they make room."""
    for limit, used, stat, prefix in _LIMITS:
        try:
            counts = dict(line.split() for line in (_CGROUPS / stat).read_text().splitlines())
            cached = sum(int(counts[f"{prefix}{state}_file"]) for state in ("active", "inactive"))
            yield int((_CGROUPS / limit).read_text()) - int((_CGROUPS / used).read_text()) + cached
        except (OSError, ValueError, KeyError):  # not in a container, or one without a limit
            continue


class StoreColumn:
    """An array of a split's features in the store, for a device. Samples are counted from 0 within the split."""

    def __init__(self, array: Array, device: torch.device) -> None:
        array.read(array.rows[:1])  # opens it before two threads do
        self.read, self.rows, self.device = array.read, array.rows, device

    def fetch(self, items: np.ndarray) -> Callable[[], Tensor]:
        """Read the rows of these samples; what is returned gives them on the device, packed.

        For a GPU they are read into page-locked memory, from which they are copied beside the computation. Torch
        computes nothing before that, so any thread may call.
        """
        rows = torch.from_numpy(self.read(self.rows[items]))
        return partial((rows.pin_memory() if self.device.type == "cuda" else rows).to, self.device, non_blocking=True)


class TableColumn:
    """An array in memory, of the host or of the device; see `StoreColumn`.

    Args:
        table: the rows of all samples, one sample after the other.
        count: rows of each sample, int64.
        device: where they go.
    """

    def __init__(self, table: Tensor, count: np.ndarray, device: torch.device) -> None:
        self.table, self.count, self.device = table, count, device
        self.start = np.cumsum(count) - count

    def fetch(self, items: np.ndarray) -> Callable[[], Tensor]:
        """Find the rows as `StoreColumn` does; those in the host's memory are gathered."""
        rows = ranges(self.start[items], self.count[items])
        if self.table.is_cuda:
            return lambda: self.table.index_select(0, torch.from_numpy(rows).to(self.table.device, non_blocking=True))
        table = self.table.numpy()
        shape = (len(rows), *table.shape[1:])
        out = torch.empty(shape, dtype=self.table.dtype, pin_memory=self.device.type == "cuda")
        # NumPy gathers in the thread that calls; torch would start as many threads as there are cores beside it.
        np.take(table, rows, axis=0, out=out.numpy(), mode="clip")
        return partial(out.to, self.device, non_blocking=True)


Column = StoreColumn | TableColumn


class Resident:
    """Columns that several trainings of this process read, one after another: each is made once."""

    def __init__(self) -> None:
        self._columns: dict[Hashable, Column] = {}

    def column(self, array: Array, where: Where, device: torch.device) -> Column:
        """Return the column of an array; in memory it is filled once."""
        key = (array.name, where, str(device))
        if key not in self._columns:
            if where == "store":
                self._columns[key] = StoreColumn(array, device)
            else:
                table = _table(array, device if where == "device" else torch.device("cpu"))
                self._columns[key] = TableColumn(table, array.count, device)
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
