"""The tasks of an extraction: a few chunks each, read, encoded and written once, on any Dask worker.

What the tasks of a feature set share in a process is its `Station`: the encoder, the open store, and threads that read
pictures ahead of the network. It is closed when the extraction ends.
"""

import threading
import time
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
from ..encoders import EncoderSpec, TextEncoder, VisualEncoder, encoding, load_text, load_visual
from ..encoders.words import WordsEncoder
from ..errors import CacheError, EncoderError, SampleError
from ..store import FAILED, NOT_DONE, OK, CaptionSet, FeatureCache, FeatureSet, ImageSet
from ..store.create import misfit
from ..store.rows import ranges
from .reuse import Reusable

_THREADS = 8  # that read by default at most: with more, decoding is slower, and the network waits for the interpreter


@dataclass(frozen=True)
class Job:
    """What the tasks of one feature set have in common.

    Attributes:
        key: of the extraction and the set.
        url, path: the store and the set.
        folder: where the names of pictures, or of the files that hold them, start.
        spec: of the encoder; `device` ``auto`` is decided where the task runs.
        splits: whose images are encoded; captions are encoded by whole chunks.
        skip: record samples that cannot be read, and go on.
        threads: that read pictures; None: one a core, eight at most.
        reuse: the other store whose features are copied.
    """

    key: str
    url: str
    path: str
    folder: str
    spec: EncoderSpec
    device: str
    batch_size: int
    splits: tuple[str, ...]
    skip: bool = False
    threads: int | None = None
    reuse: str | None = None


@dataclass
class Receipt:
    """What a task has done: samples by what became of them, and where its time went, in seconds."""

    chunks: int
    encoded: int = 0
    reused: int = 0
    failed: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("read", "encode", "write"), 0.0))

    @contextmanager
    def timed(self, share: str) -> Iterator[None]:
        """Add the block's time to a share."""
        began = time.perf_counter()
        yield
        self.seconds[share] += time.perf_counter() - began


class Station:
    """What the tasks of a feature set share in one process.

    Args:
        job: theirs.
        encoder, features: those of this process, if it has them already.
    """

    def __init__(self, job: Job, encoder: Any = None, features: FeatureSet | None = None) -> None:
        self.device, self.batch_size = str(pick_device(job.device)), job.batch_size
        self.features: Any = features or FeatureCache.open(job.url, writable=True).set_at(job.path)
        self.encoder: Any = encoder or _load(job, self.features, self.device)
        if self.features.identity != self.encoder.identity:
            raise EncoderError(
                f"the weights or preprocessing of '{job.spec.name}' are not those that '{self.features.name}' was"
                " begun with; use the same weights on every worker"
            )
        self.reusable = Reusable(job.reuse, self.features) if job.reuse else None
        self.pictures: Any = None
        if isinstance(self.features, ImageSet):
            cache = self.features.cache
            self.pictures = cache.open_pictures(job.folder, 0, cache.images)
        self.threads = ThreadPoolExecutor(job.threads or min(_THREADS, cores()), "xret-read")
        self.stopped = False

    def close(self) -> None:
        """Stop the tasks that run."""
        self.stopped = True
        self.threads.shutdown(wait=True, cancel_futures=True)


_stations: dict[str, Station] = {}
_lock = threading.Lock()


def open_station(job: Job, encoder: Any = None, features: FeatureSet | None = None) -> Station:
    """Return the station of a job in this process, opened by the first task."""
    with _lock:
        if job.key not in _stations:
            _stations[job.key] = Station(job, encoder, features)
        return _stations[job.key]


def close_station(key: str) -> None:
    """Close a station, if this process has it."""
    with _lock:
        station = _stations.pop(key, None)
    if station is not None:
        station.close()


def _load(job: Job, features: FeatureSet, device: str) -> VisualEncoder | TextEncoder:
    if isinstance(features, ImageSet):
        return load_visual(job.spec, device)
    words = features.vocabulary if isinstance(features, CaptionSet) else None
    return load_text(job.spec, device) if words is None else WordsEncoder(words)


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
    features: ImageSet = station.features
    receipt = Receipt(len(chunks))
    arrays = {chunk: features.begun(chunk) for chunk in chunks}
    items = list(_items(features, arrays, job.splits))
    failed: dict[int, dict[int, str]] = {chunk: {} for chunk in chunks}
    left = {chunk: sum(item.chunk == chunk for item in items) for chunk in chunks}
    batches = [items[first : first + job.batch_size] for first in range(0, len(items), job.batch_size)]
    ahead = _submit(station, batches[0]) if batches else []
    for number, batch in enumerate(batches):
        with receipt.timed("read"):
            read = [future.result() for future in ahead]
        ahead = _submit(station, batches[number + 1]) if number + 1 < len(batches) else []
        decoded = []
        for item, one in zip(batch, read, strict=True):
            own = arrays[item.chunk]
            if one.digest:
                own["digest"][item.at] = as_row(one.digest)
            if one.error is not None:
                if not job.skip:
                    raise SampleError(
                        one.error.sample, f"{one.error.reason}; repair or remove it, or go on with --on-error skip"
                    )
                own["length"][item.at], own["status"][item.at] = 0, FAILED
                failed[item.chunk][item.row] = f"{item.name}: {one.error.reason}"
                receipt.failed += 1
            elif one.decoded is None:  # its features are in the other store
                assert station.reusable is not None
                station.reusable.copy_image(own, item.at, one.digest, item.key)
                receipt.reused += 1
            else:
                own["size"][item.at] = one.size
                decoded.append((item, one.decoded))
        if decoded:
            with receipt.timed("encode"), encoding(station.device):
                encoded = _encode(station.encoder, [one for _, one in decoded])
            _put([(arrays[item.chunk], item) for item, _ in decoded], encoded, features)
            receipt.encoded += len(decoded)
        for item in batch:
            left[item.chunk] -= 1
            if not left[item.chunk]:
                with receipt.timed("write"):
                    features.write(item.chunk, arrays.pop(item.chunk), failed[item.chunk])
    return receipt


def _items(features: ImageSet, arrays: dict[int, dict[str, np.ndarray]], splits: Sequence[str]) -> Iterator[_Item]:
    """Yield the images of the chunks that are not done, of these splits."""
    wanted = [range(*features.cache.splits[split]) for split in splits]
    for chunk, own in arrays.items():
        first, last = features.rows_in(chunk)
        names, keys = features.cache.file_names(first, last), features.cache.ids(first, last)
        for at in np.flatnonzero(own["status"] == NOT_DONE).tolist():
            if any(first + at in rows for rows in wanted):
                yield _Item(chunk, at, first + at, names[at], keys[at])


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
        if station.reusable is not None and station.reusable.has_image(digest, item.key):
            return _Read(digest=digest)
        return _Read(*decode(station.encoder, picture, item.key), digest)
    except SampleError as error:
        return _Read(digest=digest, error=error)


def decode(encoder: VisualEncoder, picture: Any, key: str) -> tuple[Any, tuple[int, int]]:
    """Read an image as `VisualEncoder.decode` does, or its views; `key` is its id."""
    if (views := getattr(encoder, "decode_views", None)) is not None:
        found: tuple[Any, tuple[int, int]] = views(picture, key)
        return found
    return encoder.decode(picture)


def _encode(encoder: VisualEncoder, decoded: list[Any]) -> Any:
    return encoder.encode(torch.stack(decoded) if encoder.kind == "grid" else decoded)


def _put(rows: list[tuple[dict[str, np.ndarray], _Item]], encoded: Any, features: ImageSet) -> None:
    """Lay a batch out in the arrays of its chunks."""
    names = [item.name for _, item in rows]
    if isinstance(encoded, list):
        for (arrays, item), regions in zip(rows, encoded, strict=True):
            _check_range(regions.local[None], features, [item.name])
            lay_out(arrays, item.at, regions)
            arrays["status"][item.at] = OK
        return
    local, global_ = encoded
    _check_range(local, features, names)
    _check_range(global_, features, names)
    for number, (arrays, item) in enumerate(rows):
        arrays["local"][item.at], arrays["global"][item.at] = local[number], global_[number]
        arrays["length"][item.at], arrays["status"][item.at] = features.rows, OK


def write_captions(job: Job, chunks: Sequence[int]) -> Receipt:
    """Tokenise the captions of some chunks, encode them if the set has states, and write them; errors as for images."""
    station = open_station(job)
    features: CaptionSet = station.features
    receipt = Receipt(len(chunks))
    for chunk in chunks:
        first, last = features.rows_in(chunk)
        texts = features.cache.caption_texts(first, last)
        arrays = features.blank(chunk)
        with receipt.timed("read"):
            ids = station.encoder.tokenize(texts)
        lengths = np.array([len(caption) for caption in ids], dtype=np.int64)
        starts = np.cumsum(lengths) - lengths
        arrays["token"][: lengths.sum()] = np.concatenate(ids)
        arrays["start"][:] = starts + chunk * len(arrays["token"])
        arrays["length"][:], arrays["status"][:] = lengths, OK
        left = np.arange(len(texts))
        if features.channels is not None:
            if station.reusable is not None:
                left = station.reusable.copy_captions(arrays, texts, starts, lengths)
                receipt.reused += len(texts) - len(left)
            _encode_captions(station, texts, ids, arrays, left, receipt)
        receipt.encoded += len(left)
        with receipt.timed("write"):
            features.write(chunk, arrays)
    return receipt


def _encode_captions(
    station: Station,
    texts: list[str],
    ids: list[list[int]],
    arrays: dict[str, np.ndarray],
    left: np.ndarray,
    receipt: Receipt,
) -> None:
    """Fill the local features [tokens,C] and the global features [captions,C] of the captions that are left."""
    lengths = arrays["length"].astype(np.int64)
    starts = np.cumsum(lengths) - lengths
    by_length = left[np.argsort(lengths[left], kind="stable")]  # captions of like length need little padding
    for first in range(0, len(left), station.batch_size):
        rows = by_length[first : first + station.batch_size]
        if station.stopped:
            raise CacheError("the extraction was stopped")
        with receipt.timed("encode"), encoding(station.device):
            states, pooled = station.encoder.encode([ids[row] for row in rows])
        _check_range(states[:, None], station.features, [texts[row] for row in np.repeat(rows, lengths[rows])])
        _check_range(pooled, station.features, [texts[row] for row in rows])
        arrays["local"][ranges(starts[rows], lengths[rows])], arrays["global"][rows] = states, pooled


def _check_range(values: np.ndarray, features: FeatureSet, names: list[str]) -> None:
    """Refuse values that the set's dtype cannot hold; their first axis is the samples."""
    finite = np.isfinite(values).reshape(len(values), -1).all(axis=1)
    if not finite.all():
        raise CacheError(f"'{names[int(finite.argmin())]}': the encoder gave NaN or infinity; check its weights")
    if (found := misfit(values, features.dtype)) is not None:
        way = "extract with --dtype float32, or another --layer if the encoder has one"
        raise CacheError(f"'{names[found[0]]}': {found[1]}; {way}")
