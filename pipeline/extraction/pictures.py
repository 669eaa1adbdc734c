"""The pictures that a feature set lacks, read ahead of the network: by threads, or for a GPU by processes."""

from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ..data.digests import NONE, digest_of
from ..errors import CacheError, SampleError, XretError
from ..store import NOT_DONE
from ..store.folder import drop_locks
from ..wording import reason
from .station import Station


@dataclass
class Chunk:
    """A chunk of images being encoded: by the number of each set that lacks some, its arrays and reasons by failed row.

    `left` counts the images to come.
    """

    number: int
    begun: dict[int, dict[str, np.ndarray]]
    failed: dict[int, dict[int, str]] = field(default_factory=lambda: defaultdict(dict))
    left: int = 0

    def lacking(self, at: int) -> list[tuple[int, dict[str, np.ndarray]]]:
        """Return the number and the arrays of each set that lacks an image, by its row in the chunk."""
        return [(k, own) for k, own in self.begun.items() if own["status"][at] == NOT_DONE]


class Item(NamedTuple):
    """A picture to encode: its chunk, its row there, its row in the store, its file name and its id."""

    chunk: Chunk
    at: int
    row: int
    name: str
    key: str


class Read(NamedTuple):
    """A picture that was read: as the network takes it, its size, what tells its file from others; or what is wrong."""

    decoded: Any = None
    size: tuple[int, int] = (0, 0)
    digest: bytes = b""
    stamp: tuple[int, int] = (0, 0)
    error: SampleError | None = None


class Batch(NamedTuple):
    """Pictures to encode, and what waits until they are read."""

    items: list[Item]
    read: Callable[[], list[Read]]


def read_ahead(station: Station, groups: Iterable[Sequence[int]]) -> Generator[Batch, None, None]:
    """Yield the images that are missing in groups of chunks, in batches, while those that come next are read.

    A batch lies in one group. `Station.ahead` bounds what waits, whatever the sizes of groups and chunks; processes
    read two batches each.
    """
    return (_read_in_processes if station.processes else read_in_threads)(station, groups)


def read_in_threads(station: Station, groups: Iterable[Sequence[int]]) -> Generator[Batch, None, None]:
    """Do what `read_ahead` does, by the station's threads."""
    ahead: deque[Batch] = deque()
    waiting = 0
    for items in _batches(station, groups):
        begun = [station.threads.submit(_read, station, item.row, item.name, item.key) for item in items]
        ahead.append(Batch(items, partial(_results, begun)))
        waiting += len(items)
        while waiting - len(ahead[0].items) >= station.ahead:
            waiting -= len(ahead[0].items)
            yield ahead.popleft()
    yield from ahead


def _results(begun: "list[Future[Read]]") -> list[Read]:
    return [future.result() for future in begun]


def _read_in_processes(station: Station, groups: Iterable[Sequence[int]]) -> Generator[Batch, None, None]:
    """Yield batches that forked processes have read; threads would wait for each other's turn of the interpreter."""
    ahead: deque[list[Item]] = deque()

    def names() -> Iterator[list[tuple[int, str, str]]]:
        for items in _batches(station, groups):
            ahead.append(items)
            yield [(item.row, item.name, item.key) for item in items]

    loader: DataLoader[Any] = DataLoader(
        _Pictures(station),
        batch_size=None,
        sampler=names(),
        num_workers=station.processes,
        multiprocessing_context="fork",
        worker_init_fn=lambda _: drop_locks(),
        generator=torch.Generator(),  # a seed is drawn from it, and not from the process's own
    )
    reading: Any = iter(loader)
    try:
        for found, pixels in reading:
            if isinstance(found, XretError):
                raise found
            left = iter(pixels)
            read = [one._replace(decoded=next(left)) if one.decoded else one for one in found]
            yield Batch(ahead.popleft(), partial(list, read))
    except RuntimeError as error:  # torch says which one
        if str(error).startswith("Caught"):  # it lives, and has raised that itself
            raise
        raise CacheError(f"a process that reads pictures has died ({error}); run the same command again") from error
    finally:
        # Else whichever thread collects it after an error waits for them. One that is stopped as it reads may say so.
        with suppress(RuntimeError):
            reading._shutdown_workers()


class _Pictures(Dataset[Any]):
    """Pictures by rows, names and ids: what was read, and the pixels of what was decoded [n,…] in shared memory."""

    def __init__(self, station: Station) -> None:
        self.station = station

    def __getitem__(self, wanted: Any) -> tuple[list[Read] | XretError, Tensor]:
        try:
            read = [_read(self.station, *one) for one in wanted]
            pixels = _shared([one.decoded for one in read if one.decoded is not None])
        except XretError as error:  # torch would raise it with a traceback in its words
            return error, torch.empty(0)
        return [one if one.decoded is None else one._replace(decoded=True) for one in read], pixels


def _shared(pixels: list[Tensor]) -> Tensor:
    """Return pixels [n,…] in shared memory; CacheError if it is too small: torch's queue would say so to nobody."""
    try:
        return torch.stack(pixels).share_memory_() if pixels else torch.empty(0)
    except RuntimeError as error:
        raise CacheError(
            f"the shared memory is too small for the pictures that are read ahead ({reason(error)}); give the container"
            " more, as by docker run --shm-size 8g, or take fewer --workers or a smaller --batch-size"
        ) from error


def _batches(station: Station, groups: Iterable[Sequence[int]]) -> Iterator[list[Item]]:
    """Yield the images of each group of chunks that a set lacks, of the job's splits, as many as go together."""
    cache, size = station.sets[0].cache, station.batch_size
    wanted = [range(*cache.splits[split]) for split in station.job.splits]
    for group in groups:
        items = []
        for number in group:
            chunk = Chunk(number, {k: station.sets[k].begun(number) for k in station.lacking(number)})
            first, last = station.sets[0].rows_in(number)
            names, keys = cache.file_names(first, last), cache.ids(first, last)
            for at in range(last - first):
                if any(first + at in rows for rows in wanted) and chunk.lacking(at):
                    items.append(Item(chunk, at, first + at, names[at], keys[at]))
                    chunk.left += 1
        yield from (items[at : at + size] for at in range(0, len(items), size))


def _read(station: Station, row: int, name: str, key: str) -> Read:
    """Read a picture; one whose features can be copied is not decoded.

    CacheError: features of another picture of this name are in the store.
    """
    if station.stopped:
        raise CacheError("the extraction was stopped")
    digest, stamp = b"", station.pictures.stamp(name)
    try:
        picture = station.pictures.open(name)
        digest, url = digest_of(picture), station.job.url
        if digest != NONE and (known := station.digests[row]).any() and known.tobytes() != digest:
            raise CacheError(
                f"{url} has features of another picture '{name}': its file has changed since; put it back as it was, or"
                f" extract into another store with --reuse {url}"
            )
        if station.reusable and all(one.has_image(digest, key) for one in station.reusable):
            return Read(digest=digest, stamp=stamp)
        encoder = station.encoders[0]
        views = getattr(encoder, "decode_views", None)
        decoded, size = encoder.decode(picture) if views is None else views(picture, key)
        return Read(decoded, size, digest, stamp)
    except SampleError as error:
        return Read(digest=digest, error=error)
