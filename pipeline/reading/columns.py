"""Where the features of a split lie while a head is trained: on the device, in the host's memory, or in the store."""

import os
import shutil
import sys
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from ..cache.rows import Buffers, ranges
from ..errors import RunError
from ..wording import in_bytes

Placement = Literal["auto", "device", "pinned", "mapped", "stream"]
Reader = Callable[[np.ndarray], np.ndarray]  # items [B] -> their rows, packed

_MEMORY = {"device": "device memory", "pinned": "RAM", "mapped": "RAM"}
_PLACES = {  # how a message says them
    "device": "in device memory",
    "pinned": "in pinned RAM",
    "mapped": "in the store's files, of which the system keeps in RAM what is read",
    "stream": "read from the store with a block shuffle",
}
SHARE = 0.6  # of the free memory that `auto` fills; the rest is the model's
_PART = 1 << 26  # bytes that are read at once when a table is filled
_SHARED = "/dev/shm"  # where Linux keeps the memory that processes share
_CGROUPS = Path("/sys/fs/cgroup")
_LIMITS = (  # of a container's memory, version 2 and 1
    ("memory.max", "memory.current", "memory.stat", ""),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_"),
)


def choose(
    placement: Placement,
    size: int,
    device: torch.device,
    is_local: bool,
    what: str,
    there: Callable[[Placement], int] = lambda _: 0,
) -> Placement:
    """Return where features of `size` bytes are put; what ``auto`` takes is told on standard error.

    - ``device``: whole in the device's memory, each batch an index there. On a CPU the same as ``pinned``.
    - ``pinned``: whole in the host's memory; batches go to a GPU from page-locked memory, beside the computation.
    - ``mapped``: in the files of a local store, which are mapped; the system keeps in memory what it can.
    - ``stream``: the same for more than fits: an epoch visits the store block by block (`stream.block_order`).
    - ``auto``: the first that fits `SHARE` of the free memory, of ``device``, ``pinned`` and ``stream`` on a GPU, of
      ``mapped`` (of an object store ``pinned``) and ``stream`` on a CPU.

    Args:
        placement: what was asked for.
        size: bytes of all features of the split.
        device: what computes.
        is_local: whether the store lies on a local disk.
        what: the features, for messages.
        there: returns how many of the bytes lie in a place already, see `Resident`.

    Raises:
        RunError: what was asked for does not fit.
    """
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()  # what earlier trainings of this process have left
    free = {"pinned": free_host_memory(), "mapped": free_host_memory()}
    free["device"] = torch.cuda.mem_get_info(device)[0] if on_gpu else free["pinned"]
    if placement == "auto":
        candidates: list[Placement] = ["device", "pinned"] if on_gpu else ["mapped" if is_local else "pinned"]
        chosen: Placement = next((name for name in candidates if size - there(name) <= SHARE * free[name]), "stream")
        if size and there(chosen) == size:
            return chosen  # which was told when they were put there
        beside = ", ".join(f"{in_bytes(free[name])} of {_MEMORY[name]}" for name in candidates)
        print(f"{what} take {in_bytes(size)}: {_PLACES[chosen]} (free: {beside}).", file=sys.stderr, flush=True)
        return chosen
    if placement in ("device", "pinned") and size - there(placement) > free[placement]:
        where = str(device) if placement == "device" else "the host"
        other = "pinned or stream" if placement == "device" and on_gpu else "stream"
        raise RunError(
            f"{what} take {in_bytes(size)}, and {where} has {in_bytes(free[placement])} free; set runtime.cache to"
            f" {other}"
        )
    return placement


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


class Column(Protocol):
    """One array of a split's features, wherever it lies. Items are counted from 0 within the split."""

    def fetch(self, items: np.ndarray) -> Tensor:
        """Do what the host has to do for the rows of `items`; torch computes nothing here, so any thread may call."""

    def finish(self, fetched: Tensor) -> Tensor:
        """Return the rows on the device, packed."""


class StoreColumn:
    """Rows in the store.

    Args:
        read: returns the rows of items.
        device: where they go.
    """

    def __init__(self, read: Reader, device: torch.device) -> None:
        self.read, self.device = read, device

    def fetch(self, items: np.ndarray) -> Tensor:
        """Read the rows; for a GPU into page-locked memory, from which they are copied beside the computation."""
        rows = torch.from_numpy(self.read(items))
        return rows.pin_memory() if self.device.type == "cuda" else rows

    def finish(self, fetched: Tensor) -> Tensor:
        """Copy the rows to the device."""
        return fetched.to(self.device, non_blocking=True)


class HostColumn:
    """Rows of a table in the host's memory.

    Args:
        table: the rows of all items, one item after the other.
        count: rows of each item, int64.
        device: where they go.
    """

    def __init__(self, table: Tensor, count: np.ndarray, device: torch.device) -> None:
        self.table, self.count, self.device = table, count, device
        self.start = np.cumsum(count) - count
        self._buffers = Buffers()

    def __reduce__(self) -> tuple[Any, ...]:
        return HostColumn, (self.table, self.count, self.device)

    def fetch(self, items: np.ndarray) -> Tensor:
        """Gather the rows; for a GPU in page-locked memory, from which they are copied beside the computation."""
        table, rows = self.table.numpy(), ranges(self.start[items], self.count[items])
        shape = (len(rows), *table.shape[1:])
        if self.device.type == "cuda":
            out = torch.empty(shape, dtype=self.table.dtype, pin_memory=True)
        else:
            out = torch.from_numpy(self._buffers.empty(shape, table.dtype))
        # NumPy gathers in the thread that calls; torch would start as many threads as there are cores beside it.
        np.take(table, rows, axis=0, out=out.numpy(), mode="clip")
        return out

    def finish(self, fetched: Tensor) -> Tensor:
        """Copy the rows to the device."""
        return fetched.to(self.device, non_blocking=True)


class DeviceColumn:
    """Rows of a table in the device's memory.

    Args:
        table: the rows of all items, one item after the other.
        count: rows of each item, int64.
    """

    def __init__(self, table: Tensor, count: np.ndarray) -> None:
        self.table, self.count = table, count
        self.start = np.cumsum(count) - count

    def fetch(self, items: np.ndarray) -> Tensor:
        """Return the numbers of the rows."""
        return torch.from_numpy(ranges(self.start[items], self.count[items]))

    def finish(self, fetched: Tensor) -> Tensor:
        """Return the rows."""
        return self.table.index_select(0, fetched.to(self.table.device, non_blocking=True))


class Resident:
    """Columns that several trainings read, one after another or in several processes: each is made once.

    Handed to a process when it is started, it takes along what lies in memory: a GPU's tables as they are, those of the
    host as memory that both processes see. Of the files of a store the system keeps one copy anyway.
    """

    def __init__(self) -> None:
        self._columns: dict[Hashable, Column] = {}

    def column(self, key: Hashable, make: Callable[[], Column]) -> Column:
        """Return the column of this key; the first time `make` makes it."""
        if key not in self._columns:
            self._columns[key] = make()
        return self._columns[key]

    def __contains__(self, key: Hashable) -> bool:
        return key in self._columns

    def __getstate__(self) -> dict[str, Any]:
        in_memory = {key: column for key, column in self._columns.items() if not isinstance(column, StoreColumn)}
        tables = [column.table for column in in_memory.values() if isinstance(column, HostColumn)]
        size = sum(table.nbytes for table in tables if not table.is_shared())
        room = shutil.disk_usage(_SHARED).free if Path(_SHARED).is_dir() else size
        if size > room:
            raise RunError(
                f"the features take {in_bytes(size)}, and {_SHARED}, which processes share, has {in_bytes(room)} free;"
                " set runtime.cache to stream, or train one cell after another"
            )
        return {"_columns": in_memory}


def lies_in(placement: Placement, device: torch.device) -> Placement:
    """Return which of ``device``, ``pinned`` and ``mapped`` the column of a placement is in truth."""
    if placement == "device":
        return "pinned" if device.type == "cpu" else "device"
    return "mapped" if placement == "stream" else placement


def place(read: Reader, count: np.ndarray, placement: Placement, device: torch.device) -> Column:
    """Return the column of an array, its table filled where `placement` says that it is kept in memory.

    Args:
        read: returns the rows of items.
        count: rows of each item, int64.
        placement: as `choose` returned it.
        device: what computes.
    """
    kind = lies_in(placement, device)
    if kind == "device":
        return DeviceColumn(_table(read, count, device), count)
    if kind == "pinned":
        return HostColumn(_table(read, count, torch.device("cpu")), count, device)
    read(np.arange(1))  # opens the array before two threads do
    return StoreColumn(read, device)


def _table(read: Reader, count: np.ndarray, device: torch.device) -> Tensor:
    """Read all rows, in order and in parts."""
    row = read(np.arange(1))[:1]
    table = torch.empty((int(count.sum()), *row.shape[1:]), dtype=torch.from_numpy(row).dtype, device=device)
    items = max(1, int(_PART / max(1, row.nbytes * count.mean())))
    end = 0
    for first in range(0, len(count), items):
        part = torch.from_numpy(read(np.arange(first, min(first + items, len(count)))))
        table[end : end + len(part)].copy_(part)
        end += len(part)
    return table
