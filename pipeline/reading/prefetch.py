"""What keeps a device from waiting for its batches: threads that read ahead, and an order that suits a disk."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import lru_cache
from itertools import islice
from typing import Any, TypeVar
from weakref import finalize

import numpy as np
import torch
from torch import Tensor

from ..data.texts import ranges

R = TypeVar("R")
T = TypeVar("T")

RUN = 64  # neighbouring images that are a block of a local store; of an object store a block is a chunk
GROUP = 8  # blocks whose samples are mixed with one another, or more where these hold fewer than
MIXED = 4096  # samples
_AT_ONCE = 1 << 20  # samples whose order is found together
_READERS = 2  # threads that read for a CPU: the memory of a machine is faster than one of its cores can copy


def shuffled(count: int, rng: np.random.Generator) -> np.ndarray:
    """Return 0 … count - 1 in the order of ``rng.permutation``, as int32 where they fit."""
    order = np.arange(count, dtype=np.result_type(np.int32, np.min_scalar_type(-count)))
    rng.shuffle(order)
    return order


def block_order(
    sizes: np.ndarray, rng: np.random.Generator, group: int | None = None
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return an order that visits shuffled blocks in groups and shuffles the samples of each, and the groups.

    `sizes` are the samples in each block, which follow one another; a group has `GROUP` blocks, or as many as hold
    `MIXED` samples. The order is a permutation of 0 … S - 1; each group is an array of blocks, none of them empty.
    """
    blocks, ends = np.flatnonzero(sizes), np.cumsum(sizes)
    group = group or max(GROUP, -(-MIXED * len(blocks) // int(ends[-1])))
    drawn = blocks[rng.permutation(len(blocks))]
    groups = [drawn[first : first + group] for first in range(0, len(drawn), group)]
    group_of = np.zeros(len(sizes), dtype=np.int64)
    group_of[drawn] = np.arange(len(drawn)) // group
    order = shuffled(int(ends[-1]), rng)
    grouped, place = np.empty_like(order), np.cumsum([0, *(sizes[some].sum() for some in groups)])
    for first in range(0, len(order), _AT_ONCE):  # a stable sort by group, which holds no more than a part at a time
        part = order[first : first + _AT_ONCE]
        of_part = group_of[np.searchsorted(ends, part, side="right")]
        by_group = np.argsort(of_part, kind="stable")
        count = np.bincount(of_part, minlength=len(groups))
        grouped[ranges(place[:-1], count)] = part[by_group]
        place[:-1] += count
    return grouped, groups


@contextmanager
def _threads(count: int, name: str) -> Iterator[ThreadPoolExecutor]:
    """Give a pool that ends with the block; or, if that is left open, with the process, while its modules are there."""
    pool = ThreadPoolExecutor(count, name)
    end = finalize(_threads, pool.shutdown, cancel_futures=True)  # it runs once
    try:
        yield pool
    finally:
        end()


def opened_ahead(
    open_blocks: Callable[[np.ndarray], object],
    items: Iterable[T],
    blocks_of: Callable[[T], np.ndarray],
    groups: Sequence[np.ndarray],
) -> Iterator[T]:
    """Yield `items`; with the first one that touches a group, a thread begins to open the blocks of the next group.

    `items` are in the order of `block_order`. An error of `open_blocks` is dropped: reading the block raises it again.
    A reader that keeps three groups needs nothing twice.
    """
    group_of = {block: number for number, blocks in enumerate(groups) for block in blocks.tolist()}
    opened = -1

    def open_group(number: int) -> None:
        if number >= opened - 1:  # otherwise it comes too late: its samples have been read
            open_blocks(groups[number])

    with _threads(1, "open-ahead") as pool:
        for item in items:
            touched = [group_of[block] for block in np.unique(blocks_of(item)).tolist()]
            opened = max(opened, min(touched) - 1)
            while opened < min(max(touched) + 1, len(groups) - 1):
                opened += 1
                pool.submit(open_group, opened)
            yield item


def read_ahead(read: Callable[[T], Callable[[], R]], items: Iterable[T], device: torch.device) -> Iterator[R]:
    """Yield ``read(item)()`` of each item, in order, while threads work on the next ones.

    `read` does the host's part without torch's threads, in several at once; what it returns puts that on `device`, as a
    dataclass of tensors. On a GPU one thread does both, on a stream of its own. On a CPU they only read: torch would
    start as many threads for the rest as there are cores, beside those that compute.
    """
    if device.type != "cuda":
        for finish in _ahead(read, items, _READERS):
            yield finish()
        return
    stream = _copies(device)
    stream.wait_stream(torch.cuda.current_stream(device))  # which may still be filling tables

    def make(item: T) -> tuple[R, torch.cuda.Event]:
        with torch.cuda.stream(stream):
            return read(item)(), stream.record_event()

    for batch, ready in _ahead(make, items, 1):
        computing = torch.cuda.current_stream(device)
        computing.wait_event(ready)
        for tensor in _tensors(batch):
            tensor.record_stream(computing)  # its memory is not reused before that stream is done with it
        yield batch


# By device, one to make batches on: memory that a stream has used stays its own.
_copies = lru_cache(64)(torch.cuda.Stream)


def _ahead(work: Callable[[T], R], items: Iterable[T], threads: int) -> Iterator[R]:
    """Yield ``work(item)`` of each item in order; so many threads have one item, and one more waits."""
    rest = iter(items)
    with _threads(threads, "read-ahead") as pool:
        pending = deque(pool.submit(work, item) for item in islice(rest, threads + 1))
        while pending:
            done = pending.popleft().result()
            pending.extend(pool.submit(work, item) for item in islice(rest, 1))
            yield done


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors on a GPU in a dataclass, and in the dataclasses and tuples it holds."""
    if isinstance(value, Tensor) and value.is_cuda:
        yield value
    elif is_dataclass(value) or isinstance(value, tuple):
        parts = value if isinstance(value, tuple) else (getattr(value, field.name) for field in fields(value))
        for part in parts:
            yield from _tensors(part)
