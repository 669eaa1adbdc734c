"""The tasks of an extraction: a batch of pictures or a few chunks of captions each, encoded once, on any Dask worker.

The tasks fill a feature set, or those of several layers of one encoder. What they share in a process is a `Station`:
the encoders, the open store, and threads that read pictures ahead of the network, across chunks. It closes when the
extraction ends. Before a GPU, processes read in place of threads.
"""

import multiprocessing
import os
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ..data.digests import digest_of
from ..data.regions import lay_out
from ..device import cores, pick_device, start_reading
from ..encoders.base import encode_layers
from ..encoders.registry import is_own, load_text_layers, load_visual_layers
from ..encoders.spec import EncoderSpec
from ..encoders.threads import encoding
from ..encoders.words import WordsEncoder
from ..errors import CacheError, EncoderError, SampleError, XretError
from ..store import FAILED, NOT_DONE, OK, CaptionSet, FeatureCache, FeatureSet, ImageSet
from ..store.create import misfit
from ..store.folder import drop_locks
from ..store.rows import ranges
from ..wording import reason
from .reuse import Reusable

_THREADS = 8  # that read by default at most: 16 on as many cores read less, since they wait for the interpreter


@dataclass(frozen=True)
class Job:
    """What tasks have in common."""

    key: str  # of the extraction and its sets
    url: str  # of the store
    paths: tuple[str, ...]  # of the sets, whose chunks have the same rows
    folder: str  # where the names of pictures, or of the files that hold them, start
    specs: tuple[EncoderSpec, ...]  # of the encoders, which differ in their layers alone
    device: str  # ``auto`` is decided where the task runs
    batch_size: int
    splits: tuple[str, ...]  # whose images are encoded; captions are encoded by whole chunks
    skip: bool = False  # record samples that cannot be read, and go on
    threads: int | None = None  # or processes that read pictures; None: one a core, of threads eight at most
    reuse: str | None = None  # the other store whose features are copied


@dataclass
class Receipt:
    """What a task has done: how many samples, what became of them in each set, and where its time went, in seconds."""

    samples: int = 0
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)  # by path, and ``encoded`` or ``reused``
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("read", "encode", "write"), 0.0))

    @contextmanager
    def timed(self, share: str) -> Iterator[None]:
        """Add the block's time to a share."""
        began = time.perf_counter()
        yield
        self.seconds[share] += time.perf_counter() - began


class Station:
    """What tasks share in one process; `encoders` and `sets` are those that it has already."""

    def __init__(self, job: Job, encoders: Sequence[Any] = (), sets: Sequence[FeatureSet] = ()) -> None:
        self.job, self.device, self.batch_size = job, str(pick_device(job.device)), job.batch_size
        if not sets:
            cache = FeatureCache.open(job.url, writable=True)
            sets = [cache.set_at(path) for path in job.paths]
        self.sets: Sequence[Any] = sets
        self.encoders: Sequence[Any] = encoders or _load(job, sets[0], self.device)
        for features, encoder in zip(sets, self.encoders, strict=True):
            if features.identity != encoder.identity:
                raise EncoderError(
                    f"the weights or preprocessing of '{job.specs[0].name}' are not those that '{features.name}' was"
                    " begun with; use the same weights on every worker"
                )
        self._missing = [set(features.missing(job.splits)) for features in sets]
        self.reusable = [Reusable(job.reuse, features) for features in sets] if job.reuse else []
        self.pictures: Any = None
        if isinstance(sets[0], ImageSet):
            cache = sets[0].cache
            self.pictures = cache.open_pictures(job.folder, 0, cache.images)
        threads = job.threads or min(_THREADS, cores())
        self.threads = ThreadPoolExecutor(threads, "xret-read")
        self.ahead = max(job.batch_size, 2 * threads)  # pictures that are read beyond the batches being encoded
        self.lock = threading.Lock()  # of what is left of each chunk
        self.stopped = False

    @property
    def processes(self) -> int:
        """How many processes read pictures for a GPU, which threads are too slow for; 0: threads read.

        Processes read what becomes tensors of one shape, where the system can fork and this process may. What a user's
        own encoder decodes with may not bear it, the GPU for one.
        """
        alike = getattr(self.encoders[0], "kind", None) == "grid" and not is_own(self.job.specs[0].name)
        may_fork = hasattr(os, "fork") and not multiprocessing.current_process().daemon
        return self.job.threads or cores() if self.device != "cpu" and alike and may_fork else 0

    def lacking(self, chunk: int) -> list[int]:
        """Return the numbers of the sets that lack samples of a chunk."""
        return [number for number, missing in enumerate(self._missing) if chunk in missing]

    def close(self) -> None:
        """Stop the tasks that run."""
        self.stopped = True
        self.threads.shutdown(wait=True, cancel_futures=True)


_stations: dict[str, Station] = {}
_lock = threading.Lock()


def open_station(job: Job, encoders: Sequence[Any] = (), sets: Sequence[FeatureSet] = ()) -> Station:
    """Return the station of a job in this process, opened by the first task."""
    with _lock:
        if job.key not in _stations:
            _stations[job.key] = Station(job, encoders, sets)
        return _stations[job.key]


def close_station(key: str) -> None:
    """Close a station, if this process has it."""
    with _lock:
        station = _stations.pop(key, None)
    if station is not None:
        station.close()


def _load(job: Job, features: FeatureSet, device: str) -> Sequence[Any]:
    if isinstance(features, ImageSet):
        return load_visual_layers(job.specs, device)
    words = features.vocabulary if isinstance(features, CaptionSet) else None
    return load_text_layers(job.specs, device) if words is None else [WordsEncoder(words)]


@dataclass
class _Chunk:
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


class _Item(NamedTuple):
    """A picture to encode: its chunk, its row there, its row in the store, its file name and its id."""

    chunk: _Chunk
    at: int
    row: int
    name: str
    key: str


class _Read(NamedTuple):
    """A picture that was read: as the network takes it, its size, the digest of its file; or what is wrong with it."""

    decoded: Any = None
    size: tuple[int, int] = (0, 0)
    digest: bytes = b""
    error: SampleError | None = None


class Batch(NamedTuple):
    """Pictures to encode, and what waits until they are read."""

    items: list[_Item]
    read: Callable[[], list[_Read]]


def write_images(job: Job, chunks: Sequence[int]) -> Receipt:
    """Encode the images of some chunks that are missing, and write the chunks; errors as of `encode_images`."""
    station, receipt = open_station(job), Receipt()
    for batch in _read_in_threads(station, [chunks]):  # to fork for each task would cost more than it brings
        encode_images(station, batch, receipt)
    return receipt


def read_ahead(station: Station, groups: Iterable[Sequence[int]]) -> Generator[Batch, None, None]:
    """Yield the images that are missing in groups of chunks, in batches, while those that come next are read.

    A batch lies in one group. `Station.ahead` bounds what waits, whatever the sizes of groups and chunks; processes
    read two batches each.
    """
    return (_read_in_processes if station.processes else _read_in_threads)(station, groups)


def _read_in_threads(station: Station, groups: Iterable[Sequence[int]]) -> Generator[Batch, None, None]:
    ahead: deque[Batch] = deque()
    waiting = 0
    for items in _batches(station, groups):
        begun = [station.threads.submit(_read, station, item.name, item.key) for item in items]
        ahead.append(Batch(items, partial(_results, begun)))
        waiting += len(items)
        while waiting - len(ahead[0].items) >= station.ahead:
            waiting -= len(ahead[0].items)
            yield ahead.popleft()
    yield from ahead


def _results(begun: "list[Future[_Read]]") -> list[_Read]:
    return [future.result() for future in begun]


def _read_in_processes(station: Station, groups: Iterable[Sequence[int]]) -> Generator[Batch, None, None]:
    """Yield batches that forked processes have read; threads would wait for each other's turn of the interpreter."""
    ahead: deque[list[_Item]] = deque()

    def names() -> Iterator[list[tuple[str, str]]]:
        for items in _batches(station, groups):
            ahead.append(items)
            yield [(item.name, item.key) for item in items]

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
        reading._shutdown_workers()  # else whichever thread collects it after an error waits for them


class _Pictures(Dataset[Any]):
    """Pictures by names and ids: what was read, and the pixels of those that were decoded [n,…] in shared memory."""

    def __init__(self, station: Station) -> None:
        self.station = station

    def __getitem__(self, wanted: Any) -> tuple[list[_Read] | XretError, Tensor]:
        try:
            read = [_read(self.station, name, key) for name, key in wanted]
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


def _batches(station: Station, groups: Iterable[Sequence[int]]) -> Iterator[list[_Item]]:
    """Yield the images of each group of chunks that a set lacks, of the job's splits, as many as go together."""
    cache, size = station.sets[0].cache, station.batch_size
    wanted = [range(*cache.splits[split]) for split in station.job.splits]
    for group in groups:
        items = []
        for number in group:
            chunk = _Chunk(number, {k: station.sets[k].begun(number) for k in station.lacking(number)})
            first, last = station.sets[0].rows_in(number)
            names, keys = cache.file_names(first, last), cache.ids(first, last)
            for at in range(last - first):
                if any(first + at in rows for rows in wanted) and chunk.lacking(at):
                    items.append(_Item(chunk, at, first + at, names[at], keys[at]))
                    chunk.left += 1
        yield from (items[at : at + size] for at in range(0, len(items), size))


def encode_images(station: Station, batch: Batch, receipt: Receipt | None = None) -> Receipt:
    """Encode a batch, and write the chunks of which nothing is left then; return the receipt with what was done.

    Raises:
        SampleError: an image cannot be read, and the job does not skip.
        CacheError: a value does not fit the set's dtype.
        EncoderError: the weights are not the set's.
    """
    job, receipt = station.job, receipt or Receipt()
    with receipt.timed("read"):
        read = batch.read()
    decoded = []
    for item, one in zip(batch.items, read, strict=True):
        if one.error is not None and not job.skip:
            raise SampleError(
                one.error.sample, f"{one.error.reason}; repair or remove it, or go on with --on-error skip"
            )
        for k, own in item.chunk.lacking(item.at):
            if one.digest:
                own["digest"][item.at] = np.frombuffer(one.digest, np.uint8)
            if one.error is not None:
                own["length"][item.at], own["status"][item.at] = 0, FAILED
                item.chunk.failed[k][item.row] = f"{item.name}: {one.error.reason}"
            elif one.decoded is None:  # its features are in the other store
                station.reusable[k].copy_image(own, item.at, one.digest, item.key)
                receipt.counts[job.paths[k], "reused"] += 1
            else:
                own["size"][item.at] = one.size
        if one.decoded is not None:
            decoded.append((item, one.decoded))
    if decoded:
        wanted = sorted({k for item, _ in decoded for k, _ in item.chunk.lacking(item.at)})
        pictures, names = [one for _, one in decoded], [item.name for item, _ in decoded]
        together = _stacked(pictures, station.device) if station.encoders[0].kind == "grid" else pictures
        for k, of_set in zip(wanted, _encode(station, wanted, together, (names, names), receipt), strict=True):
            rows = [dict(item.chunk.lacking(item.at)).get(k) for item, _ in decoded]
            _put(rows, [item for item, _ in decoded], of_set, station.sets[k])
            receipt.counts[job.paths[k], "encoded"] += sum(own is not None for own in rows)
    receipt.samples += len(batch.items)
    with station.lock:
        for item in batch.items:
            item.chunk.left -= 1
        done = {item.chunk.number: item.chunk for item in batch.items if not item.chunk.left}
    for chunk in done.values():
        with receipt.timed("write"):
            for k, own in chunk.begun.items():
                station.sets[k].write(chunk.number, own, chunk.failed[k])
    return receipt


def _read(station: Station, name: str, key: str) -> _Read:
    """Read a picture; one whose features can be copied is not decoded."""
    if station.stopped:
        raise CacheError("the extraction was stopped")
    digest = b""
    try:
        picture = station.pictures.open(name)
        digest = digest_of(picture)
        if station.reusable and all(one.has_image(digest, key) for one in station.reusable):
            return _Read(digest=digest)
        encoder = station.encoders[0]
        views = getattr(encoder, "decode_views", None)
        decoded, size = encoder.decode(picture) if views is None else views(picture, key)
        return _Read(decoded, size, digest)
    except SampleError as error:
        return _Read(digest=digest, error=error)


def _put(rows: list[dict[str, np.ndarray] | None], items: list[_Item], encoded: Any, features: ImageSet) -> None:
    """Lay a batch out in the arrays of its chunks; None: the set has that image already."""
    if isinstance(encoded, list):
        for arrays, item, regions in zip(rows, items, encoded, strict=True):
            assert arrays is not None, "detectors have no layers to choose from"
            local = regions.local[None]
            _check_range(np.abs(local).max(axis=-1, initial=0), local.__getitem__, features.dtype, [item.name])
            lay_out(arrays, item.at, regions)
            arrays["status"][item.at] = OK
        return
    local, global_ = encoded
    for number, (arrays, item) in enumerate(zip(rows, items, strict=True)):
        if arrays is not None:
            arrays["local"][item.at], arrays["global"][item.at] = local[number], global_[number]
            arrays["length"][item.at], arrays["status"][item.at] = features.rows, OK


def write_captions(job: Job, chunks: Sequence[int]) -> Receipt:
    """Tokenise the captions of some chunks, encode them if the set has states, and write them; errors as for images."""
    station = open_station(job)
    receipt = Receipt()
    for chunk in chunks:
        if not (lacking := station.lacking(chunk)):
            continue
        first, last = station.sets[0].rows_in(chunk)
        texts = station.sets[0].cache.caption_texts(first, last)
        with receipt.timed("read"):
            ids = station.encoders[0].tokenize(texts)
        lengths = np.array([len(caption) for caption in ids], dtype=np.int64)
        starts = np.cumsum(lengths) - lengths
        blank = {k: station.sets[k].blank(chunk) for k in lacking}
        left = np.arange(len(texts))
        for arrays in blank.values():
            arrays["token"][: lengths.sum()] = np.concatenate(ids)
            arrays["start"][:] = starts + chunk * len(arrays["token"])
            arrays["length"][:], arrays["status"][:] = lengths, OK
        if station.sets[0].channels is not None:
            if station.reusable:
                found = [station.reusable[k].copy_captions(own, texts, starts, lengths) for k, own in blank.items()]
                left = np.unique(np.concatenate(found))
            _encode_captions(station, texts, ids, blank, left, receipt)
        for k, arrays in blank.items():
            receipt.counts[job.paths[k], "encoded"] += len(left)
            receipt.counts[job.paths[k], "reused"] += len(texts) - len(left)
            with receipt.timed("write"):
                station.sets[k].write(chunk, arrays)
        receipt.samples += len(texts)
    return receipt


def _encode_captions(
    station: Station,
    texts: list[str],
    ids: list[list[int]],
    begun: dict[int, dict[str, np.ndarray]],
    left: np.ndarray,
    receipt: Receipt,
) -> None:
    """Fill the local features [tokens,C] and the global features [captions,C] of the captions that are left.

    `begun` has the arrays of a chunk by the number of their set.
    """
    lengths = np.array([len(caption) for caption in ids], dtype=np.int64)
    starts = np.cumsum(lengths) - lengths
    by_length = left[np.argsort(lengths[left], kind="stable")]  # captions of like length need little padding
    for first in range(0, len(left), station.batch_size):
        rows = by_length[first : first + station.batch_size]
        if station.stopped:
            raise CacheError("the extraction was stopped")
        names = [texts[row] for row in np.repeat(rows, lengths[rows])], [texts[row] for row in rows]
        encoded = _encode(station, [*begun], [ids[row] for row in rows], names, receipt)
        for arrays, (states, pooled) in zip(begun.values(), encoded, strict=True):
            arrays["local"][ranges(starts[rows], lengths[rows])], arrays["global"][rows] = states, pooled


def _encode(
    station: Station, sets: Sequence[int], batch: Any, names: tuple[list[str], list[str]], receipt: Receipt
) -> list[Any]:
    """Return what these sets, by number, store of a batch: local and global features in their dtype, or regions.

    `names` are of the samples of the local features, and of those of the global ones. CacheError: see `_begin`.
    """
    with receipt.timed("encode"):
        with encoding(station.device):
            encoded = encode_layers([station.encoders[k] for k in sets], batch)
            if isinstance(encoded[0], list):  # regions
                return encoded
            begun = [
                [_begin(part, station.sets[k].dtype) for part in one] for k, one in zip(sets, encoded, strict=True)
            ]
        return [(local(names[0]), global_(names[1])) for local, global_ in begun]


def _stacked(pictures: list[Tensor], device: str) -> Tensor:
    """Return pixels [B,…] of the host; from pinned memory a GPU takes them while the host goes on."""
    if device == "cpu":
        return torch.stack(pictures)
    shape, dtype = (len(pictures), *pictures[0].shape), pictures[0].dtype
    return torch.stack(pictures, out=torch.empty(shape, dtype=dtype, pin_memory=True))


def _begin(values: Tensor, dtype: str) -> Callable[[list[str]], np.ndarray]:
    """Begin to bring features [n,…,C] from their device in the dtype of a set; what is returned waits for them.

    It takes the names of the n samples, and raises CacheError for the first that the dtype cannot hold. The device
    casts them and finds the peaks that are checked; for the host's threads that is nothing to wait for.
    """
    peaks = values.new_zeros(values.shape[:-1])
    if values.numel():  # on a CPU in a third of the time of `abs` and `amax`
        peaks = torch.maximum(values.amax(-1), -values.amin(-1))
    found, stored = start_reading(peaks), start_reading(values.to(getattr(torch, dtype)))

    def rows_where(mask: np.ndarray) -> np.ndarray:
        with encoding(str(values.device)):
            return values[torch.from_numpy(mask)].cpu().numpy()

    def read(names: list[str]) -> np.ndarray:
        _check_range(found().numpy(), rows_where, dtype, names)
        return stored().numpy()

    return read


def _check_range(
    peaks: np.ndarray, rows_where: Callable[[np.ndarray], np.ndarray], dtype: str, names: list[str]
) -> None:
    """Refuse samples that the dtype cannot hold; peaks [n,…] and rows are as `misfit` takes them."""
    finite = np.isfinite(peaks).reshape(len(peaks), -1).all(axis=1)
    if not finite.all():
        raise CacheError(f"'{names[int(finite.argmin())]}': the encoder gave NaN or infinity; check its weights")
    if (found := misfit(peaks, rows_where, dtype)) is not None:
        way = "extract with --dtype float32, or other --layers if the encoder has any"
        raise CacheError(f"'{names[found[0]]}': {found[1]}; {way}")
