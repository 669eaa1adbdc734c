"""The tasks of an extraction: a few chunks each, read, encoded and written once, on any Dask worker.

The tasks fill a feature set, or those of several layers of one encoder. What they share in a process is a `Station`:
the encoders, the open store, and threads that read pictures ahead of the network. It closes when the extraction ends.
"""

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from ..data.digests import as_row, digest_of
from ..data.regions import lay_out
from ..device import cores, pick_device
from ..encoders import EncoderSpec, VisualEncoder, encode_layers, encoding, load_text_layers, load_visual_layers
from ..encoders.words import WordsEncoder
from ..errors import CacheError, EncoderError, SampleError
from ..store import FAILED, NOT_DONE, OK, CaptionSet, FeatureCache, FeatureSet, ImageSet
from ..store.create import misfit
from ..store.rows import ranges
from .reuse import Reusable

_THREADS = 8  # that read by default at most: with more, decoding is slower, and the network waits for the interpreter


@dataclass(frozen=True)
class Job:
    """What tasks have in common.

    Attributes:
        key: of the extraction and its sets.
        url, paths: the store and the sets, whose chunks have the same rows.
        folder: where the names of pictures, or of the files that hold them, start.
        specs: of the encoders, which differ in their layers alone; `device` ``auto`` is decided where the task runs.
        splits: whose images are encoded; captions are encoded by whole chunks.
        skip: record samples that cannot be read, and go on.
        threads: that read pictures; None: one a core, eight at most.
        reuse: the other store whose features are copied.
    """

    key: str
    url: str
    paths: tuple[str, ...]
    folder: str
    specs: tuple[EncoderSpec, ...]
    device: str
    batch_size: int
    splits: tuple[str, ...]
    skip: bool = False
    threads: int | None = None
    reuse: str | None = None


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
    """What tasks share in one process.

    Args:
        job: theirs.
        encoders, sets: those of this process, if it has them already.
    """

    def __init__(self, job: Job, encoders: Sequence[Any] = (), sets: Sequence[FeatureSet] = ()) -> None:
        self.device, self.batch_size = str(pick_device(job.device)), job.batch_size
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
        self.threads = ThreadPoolExecutor(job.threads or min(_THREADS, cores()), "xret-read")
        self.stopped = False

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


class _Item(NamedTuple):
    """A picture to encode: its chunk, its row there, its row in the store, its file name and its id."""

    chunk: int
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


def write_images(job: Job, chunks: Sequence[int]) -> Receipt:
    """Encode the images of some chunks that are missing, and write the chunks.

    Raises:
        SampleError: an image cannot be read, and the job does not skip.
        CacheError: a value does not fit the set's dtype.
        EncoderError: the weights are not the set's.
    """
    station = open_station(job)
    receipt = Receipt()
    begun = {chunk: {k: station.sets[k].begun(chunk) for k in station.lacking(chunk)} for chunk in chunks}
    items = list(_items(station.sets[0], begun, job.splits))
    failed: dict[tuple[int, int], dict[int, str]] = defaultdict(dict)
    left = Counter(item.chunk for item in items)
    batches = [items[first : first + job.batch_size] for first in range(0, len(items), job.batch_size)]
    ahead = _submit(station, batches[0]) if batches else []
    for number, batch in enumerate(batches):
        with receipt.timed("read"):
            read = [future.result() for future in ahead]
        ahead = _submit(station, batches[number + 1]) if number + 1 < len(batches) else []
        decoded = []
        for item, one in zip(batch, read, strict=True):
            if one.error is not None and not job.skip:
                raise SampleError(
                    one.error.sample, f"{one.error.reason}; repair or remove it, or go on with --on-error skip"
                )
            for k, own in _lacking(begun, item):
                if one.digest:
                    own["digest"][item.at] = as_row(one.digest)
                if one.error is not None:
                    own["length"][item.at], own["status"][item.at] = 0, FAILED
                    failed[item.chunk, k][item.row] = f"{item.name}: {one.error.reason}"
                elif one.decoded is None:  # its features are in the other store
                    station.reusable[k].copy_image(own, item.at, one.digest, item.key)
                    receipt.counts[job.paths[k], "reused"] += 1
                else:
                    own["size"][item.at] = one.size
            if one.decoded is not None:
                decoded.append((item, one.decoded))
        if decoded:
            wanted = sorted({k for item, _ in decoded for k, _ in _lacking(begun, item)})
            with receipt.timed("encode"), encoding(station.device):
                encoded = _encode([station.encoders[k] for k in wanted], [one for _, one in decoded])
            for k, of_set in zip(wanted, encoded, strict=True):
                rows = [dict(_lacking(begun, item)).get(k) for item, _ in decoded]
                _put(rows, [item for item, _ in decoded], of_set, station.sets[k])
                receipt.counts[job.paths[k], "encoded"] += sum(own is not None for own in rows)
        receipt.samples += len(batch)
        left.subtract(item.chunk for item in batch)
        for chunk in {item.chunk for item in batch}:
            if not left[chunk]:
                with receipt.timed("write"):
                    for k, own in begun.pop(chunk).items():
                        station.sets[k].write(chunk, own, failed[chunk, k])
    return receipt


_Begun = dict[int, dict[int, dict[str, np.ndarray]]]  # by chunk, and the number of the set, the arrays by name


def _items(features: ImageSet, begun: _Begun, splits: Sequence[str]) -> Iterator[_Item]:
    """Yield the images of the chunks, of these splits, that a set lacks."""
    wanted = [range(*features.cache.splits[split]) for split in splits]
    for chunk in begun:
        first, last = features.rows_in(chunk)
        names, keys = features.cache.file_names(first, last), features.cache.ids(first, last)
        for at in range(last - first):
            item = _Item(chunk, at, first + at, names[at], keys[at])
            if any(item.row in rows for rows in wanted) and _lacking(begun, item):
                yield item


def _lacking(begun: _Begun, item: _Item) -> list[tuple[int, dict[str, np.ndarray]]]:
    """Return the number and the arrays of each set that lacks an image."""
    return [(k, own) for k, own in begun[item.chunk].items() if own["status"][item.at] == NOT_DONE]


def _submit(station: Station, batch: list[_Item]) -> "list[Future[_Read]]":
    return [station.threads.submit(_read, station, item) for item in batch]


def _read(station: Station, item: _Item) -> _Read:
    """Read a picture; one whose features can be copied is not decoded."""
    if station.stopped:
        raise CacheError("the extraction was stopped")
    digest = b""
    try:
        picture = station.pictures.open(item.name)
        digest = digest_of(picture)
        if station.reusable and all(one.has_image(digest, item.key) for one in station.reusable):
            return _Read(digest=digest)
        return _Read(*decode(station.encoders[0], picture, item.key), digest)
    except SampleError as error:
        return _Read(digest=digest, error=error)


def decode(encoder: VisualEncoder, picture: Any, key: str) -> tuple[Any, tuple[int, int]]:
    """Read an image as `VisualEncoder.decode` does, or its views; `key` is its id."""
    if (views := getattr(encoder, "decode_views", None)) is not None:
        found: tuple[Any, tuple[int, int]] = views(picture, key)
        return found
    return encoder.decode(picture)


def _encode(encoders: Sequence[VisualEncoder], decoded: list[Any]) -> list[Any]:
    return encode_layers(encoders, torch.stack(decoded) if encoders[0].kind == "grid" else decoded)


def _put(rows: list[dict[str, np.ndarray] | None], items: list[_Item], encoded: Any, features: ImageSet) -> None:
    """Lay a batch out in the arrays of its chunks; None: the set has that image already."""
    names = [item.name for item in items]
    if isinstance(encoded, list):
        for arrays, item, regions in zip(rows, items, encoded, strict=True):
            assert arrays is not None, "detectors have no layers to choose from"
            _check_range(regions.local[None], features, [item.name])
            lay_out(arrays, item.at, regions)
            arrays["status"][item.at] = OK
        return
    local, global_ = encoded
    _check_range(local, features, names)
    _check_range(global_, features, names)
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
    encoders = [station.encoders[k] for k in begun]
    starts = np.cumsum(lengths) - lengths
    by_length = left[np.argsort(lengths[left], kind="stable")]  # captions of like length need little padding
    for first in range(0, len(left), station.batch_size):
        rows = by_length[first : first + station.batch_size]
        if station.stopped:
            raise CacheError("the extraction was stopped")
        with receipt.timed("encode"), encoding(station.device):
            encoded = encode_layers(encoders, [ids[row] for row in rows])
        for (k, arrays), (states, pooled) in zip(begun.items(), encoded, strict=True):
            _check_range(states[:, None], station.sets[k], [texts[row] for row in np.repeat(rows, lengths[rows])])
            _check_range(pooled, station.sets[k], [texts[row] for row in rows])
            arrays["local"][ranges(starts[rows], lengths[rows])], arrays["global"][rows] = states, pooled


def _check_range(values: np.ndarray, features: FeatureSet, names: list[str]) -> None:
    """Refuse values that the set's dtype cannot hold; their first axis is the samples."""
    finite = np.isfinite(values).reshape(len(values), -1).all(axis=1)
    if not finite.all():
        raise CacheError(f"'{names[int(finite.argmin())]}': the encoder gave NaN or infinity; check its weights")
    if (found := misfit(values, features.dtype)) is not None:
        way = "extract with --dtype float32, or other --layers if the encoder has any"
        raise CacheError(f"'{names[found[0]]}': {found[1]}; {way}")
