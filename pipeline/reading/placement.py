"""Where the features of a split lie while a head is trained: on the device, in the host's memory, or in the store."""

import os
import shutil
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ..cache.rows import Buffers, ranges
from ..errors import RunError
from ..wording import in_bytes

Placement = Literal["auto", "device", "pinned", "mapped", "stream"]

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
) -> tuple[Placement, str]:
    """Return where `arrays`, all features of a split, are put, and of ``auto`` a sentence on why; else "".

    - ``device``: whole in the device's memory, each batch an index there. On a CPU the same as ``pinned``.
    - ``pinned``: whole in the host's memory; batches go to a GPU from page-locked memory, beside the computation.
    - ``mapped``: in the files of a local store, which are mapped; the system keeps in memory what it can.
    - ``stream``: the same for more than fits: an epoch visits the store block by block (`prefetch.block_order`).
    - ``auto``: the first that fits `SHARE` of the free memory, of ``device``, ``pinned`` and ``stream`` on a GPU, of
      ``mapped`` (of an object store ``pinned``) and ``stream`` on a CPU.

    Args:
        is_local: whether the store lies on a local disk.
        what: the features, for messages.
        resident: what lies in memory already.

    Raises:
        RunError: what was asked for does not fit.
    """
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()  # what earlier trainings of this process have left
    size = sum(array.nbytes for array in arrays)

    def missing(place: Placement) -> int:
        return size - resident.bytes_of(arrays, place, device)

    free = {"pinned": free_host_memory(), "mapped": free_host_memory()}
    free["device"] = torch.cuda.mem_get_info(device)[0] if on_gpu else free["pinned"]
    if placement == "auto":
        candidates: list[Placement] = ["device", "pinned"] if on_gpu else ["mapped" if is_local else "pinned"]
        chosen: Placement = next((name for name in candidates if missing(name) <= SHARE * free[name]), "stream")
        if size and not missing(chosen):
            return chosen, ""  # which was told when they were put there
        beside = ", ".join(f"{in_bytes(free[name])} of {_MEMORY[name]}" for name in candidates)
        return chosen, f"{what} take {in_bytes(size)}: {_PLACES[chosen]} (free: {beside})."
    if placement in ("device", "pinned") and missing(placement) > free[placement]:
        where = str(device) if placement == "device" else "the host"
        other = "pinned or stream" if placement == "device" and on_gpu else "stream"
        raise RunError(
            f"{what} take {in_bytes(size)}, and {where} has {in_bytes(free[placement])} free; set runtime.cache to"
            f" {other}"
        )
    return placement, ""


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
        self._buffers = Buffers()

    def __reduce__(self) -> tuple[Any, ...]:
        return TableColumn, (self.table, self.count, self.device)

    def fetch(self, items: np.ndarray) -> Callable[[], Tensor]:
        """Find the rows as `StoreColumn` does; those in the host's memory are gathered."""
        rows = ranges(self.start[items], self.count[items])
        if self.table.is_cuda:
            return lambda: self.table.index_select(0, torch.from_numpy(rows).to(self.table.device, non_blocking=True))
        table = self.table.numpy()
        shape = (len(rows), *table.shape[1:])
        if self.device.type == "cuda":
            out = torch.empty(shape, dtype=self.table.dtype, pin_memory=True)
        else:
            out = torch.from_numpy(self._buffers.empty(shape, table.dtype))
        # NumPy gathers in the thread that calls; torch would start as many threads as there are cores beside it.
        np.take(table, rows, axis=0, out=out.numpy(), mode="clip")
        return partial(out.to, self.device, non_blocking=True)


Column = StoreColumn | TableColumn


class Resident:
    """Columns that several trainings read, one after another or in several processes: each is made once.

    Handed to a process when it is started, it takes along what lies in memory: a GPU's tables as they are, those of the
    host as memory that both processes see. Of the files of a store the system keeps one copy anyway.
    """

    def __init__(self) -> None:
        self._columns: dict[Hashable, Column] = {}

    def column(self, array: Array, placement: Placement, device: torch.device) -> Column:
        """Return the column of an array; where `placement`, as `choose` returned it, is memory, it is filled once."""
        kind = _lies_in(placement, device)
        key = (array.name, kind, str(device))
        if key not in self._columns:
            if kind == "mapped":
                self._columns[key] = StoreColumn(array, device)
            else:
                table = _table(array, device if kind == "device" else torch.device("cpu"))
                self._columns[key] = TableColumn(table, array.count, device)
        return self._columns[key]

    def bytes_of(self, arrays: Sequence[Array], placement: Placement, device: torch.device) -> int:
        """Return how many bytes of `arrays` lie already in the memory where `placement` would put them."""
        kind = _lies_in(placement, device)
        if kind == "mapped":
            return 0
        return sum(array.nbytes for array in arrays if (array.name, kind, str(device)) in self._columns)

    def __getstate__(self) -> dict[str, Any]:
        in_memory = {key: column for key, column in self._columns.items() if isinstance(column, TableColumn)}
        tables = [column.table.untyped_storage() for column in in_memory.values() if not column.table.is_cuda]
        size = sum(table.nbytes() for table in tables if not table.is_shared())
        room = shutil.disk_usage(_SHARED).free if Path(_SHARED).is_dir() else size
        if size > room:
            raise RunError(
                f"the features take {in_bytes(size)}, and {_SHARED}, which processes share, has {in_bytes(room)} free;"
                " set runtime.cache to stream, or train one cell after another"
            )
        return {"_columns": in_memory}


def _lies_in(placement: Placement, device: torch.device) -> Placement:
    """Return which of ``device``, ``pinned`` and ``mapped`` the column of a placement is in truth."""
    if placement == "device":
        return "pinned" if device.type == "cpu" else "device"
    return "mapped" if placement == "stream" else placement


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
