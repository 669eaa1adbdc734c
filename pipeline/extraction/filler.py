"""Fills feature sets: what they lack is read ahead, encoded in batches and written chunk by chunk, on any machine."""

import multiprocessing
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..data.images import NO_DIGEST, digest_of
from ..data.texts import ranges
from ..device import cores, pick_device, start_reading
from ..encoders.base import encode_layers
from ..encoders.registry import is_own, load_text_layers, load_visual_layers
from ..encoders.spec import EncoderSpec
from ..encoders.threads import encoding
from ..encoders.words import WordsEncoder
from ..errors import CacheError, EncoderError, SampleError
from ..store import FAILED, NOT_DONE, OK, CaptionSet, FeatureCache, FeatureSet, ImageSet
from ..store.create import misfit
from ..store.regions import lay_out
from .options import Options
from .pictures import Batch, Picture, Read, read_in_processes
from .reuse import Reusable

_THREADS = 8  # that read by default at most: 16 on as many cores read less, since they wait for the interpreter

Tally = Counter[Any]  # ``samples``; ns of ``read``, ``encode``, ``write``; (path, ``encoded``) and (path, ``reused``)


@dataclass(frozen=True)
class Job:
    """What a worker of a cluster needs to fill sets as this process would."""

    key: str  # of the extraction and its sets
    url: str  # of the store
    paths: tuple[str, ...]  # of the sets, whose chunks have the same rows
    folder: str  # where the names of pictures, or of the files that hold them, start
    seen: str | None  # the name of one that is there
    specs: tuple[EncoderSpec, ...]  # of the encoders, which differ in their layers alone
    options: Options  # of images, those of its splits are encoded; captions are encoded by whole chunks


@dataclass
class Chunk:
    """A chunk of images being encoded."""

    arrays: dict[int, dict[str, np.ndarray]]  # by the number of each set that lacks some
    left: int = 0  # images to come
    failed: dict[int, str] = field(default_factory=dict)  # reasons by row


class Filler:
    """Fills the sets of a job in this process: `read_ahead`, and `fill` each part of the work that it yields.

    `sets` and `encoders` are those that the process has already.
    """

    def __init__(self, job: Job, sets: Sequence[Any] = (), encoders: Sequence[Any] = ()) -> None:
        self.job, self.device, self.batch_size = job, str(pick_device(job.options.device)), job.options.batch_size
        if not sets:
            cache = FeatureCache.open(job.url)
            sets = [cache.set_at(path) for path in job.paths]
        self.sets, self.cache = sets, sets[0].cache
        self.of_images = isinstance(sets[0], ImageSet)
        self.encoders: Sequence[Any] = encoders or _load(job.specs, sets[0], self.device)
        for features, encoder in zip(sets, self.encoders, strict=True):
            if features.identity != encoder.identity:
                raise EncoderError(
                    f"the weights or preprocessing of '{job.specs[0].name}' are not those that '{features.name}' was"
                    " begun with; use the same weights on every worker"
                )
        left = [features.rows_left(job.options.splits) for features in sets]
        self._rows = np.unique(np.concatenate(left))  # that a set lacks
        self._missing = [set((rows // sets[0].chunk_rows).tolist()) for rows in left]
        self._reusable = [Reusable(job.options.reuse, features) for features in sets] if job.options.reuse else []
        self._pictures: Any = None
        if self.of_images:
            self._pictures = self.cache.open_pictures(job.folder, 0, self.cache.images)
            self._digests = self.cache.known_digests()
        workers = job.options.workers
        self._threads = workers if isinstance(workers, int) else min(_THREADS, cores())
        self._readers = ThreadPoolExecutor(self._threads, "xret-read")
        self._chunks: dict[int, Chunk] = {}  # of images being encoded
        self._lock, self._stopped = threading.Lock(), False  # of what is left of each chunk

    @property
    def processes(self) -> int:
        """How many processes read pictures for a GPU, which threads are too slow for; 0: threads read.

        Processes read what becomes tensors of one shape, where the system can fork and this process may. What a user's
        own encoder decodes with may not bear it, the GPU for one.
        """
        alike = getattr(self.encoders[0], "kind", None) == "grid" and not is_own(self.job.specs[0].name)
        may_fork = hasattr(os, "fork") and not multiprocessing.current_process().daemon
        workers = self.job.options.workers
        return (workers if isinstance(workers, int) else cores()) if self.device != "cpu" and alike and may_fork else 0

    def close(self) -> None:
        """Stop what runs."""
        self._stopped = True
        self._readers.shutdown(wait=True, cancel_futures=True)

    def parts(self, groups: Sequence[Sequence[int]]) -> int:
        """Return how many parts `read_ahead` yields."""
        if not self.of_images:
            return len(groups)
        return sum(-(-len(self._lacking(group)) // self.batch_size) for group in groups)

    def read_ahead(self, groups: Iterable[Sequence[int]], *, fork: bool) -> Generator[Any, None, None]:
        """Yield the parts of the work on groups of chunks: each group of captions, of images batches.

        Images that come next are read meanwhile: one batch or two for each thread, whatever the sizes of groups and
        chunks; by processes, which `fork` allows, two batches each.
        """
        if not self.of_images:
            yield from groups
        elif fork and self.processes:
            yield from read_in_processes(self._batches(groups), self._read, self.processes)
        else:
            ahead: deque[Batch] = deque()
            waiting, most = 0, max(self.batch_size, 2 * self._threads)  # read beyond the batches being encoded
            for pictures in self._batches(groups):
                reading = [self._readers.submit(self._read, picture) for picture in pictures]
                ahead.append((pictures, map(Future.result, reading)))
                waiting += len(pictures)
                while waiting - len(ahead[0][0]) >= most:
                    waiting -= len(ahead[0][0])
                    yield ahead.popleft()
            yield from ahead

    def fill(self, part: Any) -> Tally:
        """Encode a part of the work, write the chunks of which nothing is left then, and return what was done.

        Raises:
            SampleError: an image cannot be read, and the options do not skip.
            CacheError: a value does not fit the set's dtype, or `close` was called.
        """
        if self.of_images:
            return self._fill_images(*part)
        tally = Tally()
        for chunk in part:
            self._fill_captions(chunk, tally)
        return tally

    # Images

    def _lacking(self, group: Sequence[int]) -> np.ndarray:
        """Return the rows of a group of chunks that a set lacks, of the job's splits."""
        edges = group[0] * self.sets[0].chunk_rows, (group[-1] + 1) * self.sets[0].chunk_rows
        return self._rows[slice(*np.searchsorted(self._rows, edges))]

    def _batches(self, groups: Iterable[Sequence[int]]) -> Iterator[list[Picture]]:
        """Yield the images of each group of chunks that a set lacks, as many as go together."""
        for group in groups:
            if not (rows := self._lacking(group).tolist()):
                continue  # a worker that was killed has written them
            self._chunks |= {number: Chunk(self._arrays(number)) for number in group}
            names, keys = (read(rows[0], rows[-1] + 1) for read in (self.cache.file_names, self.cache.ids))
            for row in rows:
                self._place(row)[0].left += 1
            pictures = [Picture(row, names[row - rows[0]], keys[row - rows[0]]) for row in rows]
            yield from (pictures[at : at + self.batch_size] for at in range(0, len(pictures), self.batch_size))

    def _place(self, row: int) -> tuple[Chunk, int, dict[int, dict[str, np.ndarray]]]:
        """Return an image's chunk, its row there, and by number the arrays of each set that lacks it."""
        number, at = divmod(row, self.sets[0].chunk_rows)
        chunk = self._chunks[number]
        return chunk, at, {k: own for k, own in chunk.arrays.items() if own["status"][at] == NOT_DONE}

    def _arrays(self, chunk: int) -> dict[int, dict[str, np.ndarray]]:
        """Return the arrays of a chunk, by the number of each set that lacks samples of it."""
        return {k: self.sets[k].read_chunk(chunk) for k, missing in enumerate(self._missing) if chunk in missing}

    def _read(self, picture: Picture) -> Read:
        """Read a picture; one whose features can be copied is not decoded.

        CacheError: features of another picture of this name are in the store.
        """
        if self._stopped:
            raise CacheError("the extraction was stopped")
        row, name, key = picture
        digest, stamp = b"", self._pictures.stamp(name)
        try:
            opened = self._pictures.open(name)
            digest, url = digest_of(opened), self.job.url
            if digest != NO_DIGEST and (known := self._digests[row]).any() and known.tobytes() != digest:
                raise CacheError(
                    f"{url} has features of another picture '{name}': its file has changed since; put it back as it"
                    f" was, or extract into another store with --reuse {url}"
                )
            if self._reusable and all(one.has_image(digest, key) for one in self._reusable):
                return Read(digest=digest, stamp=stamp)
            views = getattr(self.encoders[0], "decode_views", None)
            decoded, size = self.encoders[0].decode(opened) if views is None else views(opened, key)
            return Read(decoded, size, digest, stamp)
        except SampleError as error:
            return Read(digest=digest, error=error)

    def _fill_images(self, pictures: list[Picture], reading: Iterable[Read]) -> Tally:
        tally = Tally(samples=len(pictures))
        with _timed(tally, "read"):
            read = [*reading]
        for picture, one in zip(pictures, read, strict=True):
            self._note(picture, one, tally)
        if found := [
            (picture, one.decoded) for picture, one in zip(pictures, read, strict=True) if one.decoded is not None
        ]:
            self._encode_images([picture for picture, _ in found], [decoded for _, decoded in found], tally)
        numbers = {picture.row // self.sets[0].chunk_rows for picture in pictures}
        with self._lock:
            for picture in pictures:
                self._place(picture.row)[0].left -= 1
            whole = {number: self._chunks.pop(number) for number in numbers if not self._chunks[number].left}
        for number, chunk in whole.items():
            with _timed(tally, "write"):
                for k, own in chunk.arrays.items():
                    self.sets[k].write(number, own, chunk.failed)
        return tally

    def _note(self, picture: Picture, read: Read, tally: Tally) -> None:
        """Lay out what is known of a picture before it is encoded, or its features if the other store has them."""
        if read.error is not None and self.job.options.on_error == "fail":
            advice = "repair or remove it, or go on with --on-error skip"
            raise SampleError(read.error.sample, f"{read.error.reason}; {advice}")
        chunk, at, lacking = self._place(picture.row)
        for k, own in lacking.items():
            if read.digest:
                own["digest"][at] = np.frombuffer(read.digest, np.uint8)
            if "stamp" in own:
                own["stamp"][at] = read.stamp
            if read.error is not None:
                own["length"][at], own["status"][at] = 0, FAILED
                chunk.failed[picture.row] = f"{picture.name}: {read.error.reason}"
            elif read.decoded is None:
                self._reusable[k].copy_image(own, at, read.digest, picture.key)
                tally[self.job.paths[k], "reused"] += 1
            else:
                own["size"][at] = read.size

    def _encode_images(self, pictures: list[Picture], decoded: list[Any], tally: Tally) -> None:
        names, places = [picture.name for picture in pictures], [self._place(picture.row) for picture in pictures]
        wanted = sorted(set[int]().union(*(lacking for *_, lacking in places)))
        batch = _stacked(decoded, self.device) if self.encoders[0].kind == "grid" else decoded
        for k, encoded in zip(wanted, self._encode(wanted, batch, (names, names), tally), strict=True):
            for number, (_, at, lacking) in enumerate(places):
                if (own := lacking.get(k)) is None:  # the set has that image already
                    continue
                if isinstance(encoded, list):
                    local = encoded[number].local[None]
                    peaks = np.abs(local).max(axis=-1, initial=0)
                    _check_range(peaks, local.__getitem__, self.sets[k].dtype, [names[number]])
                    lay_out(own, at, encoded[number])
                else:
                    own["local"][at], own["global"][at] = (part[number] for part in encoded)
                    own["length"][at] = self.sets[k].rows
                own["status"][at] = OK
                tally[self.job.paths[k], "encoded"] += 1

    # Captions

    def _fill_captions(self, chunk: int, tally: Tally) -> None:
        texts = self.cache.caption_texts(*self.sets[0].rows_in(chunk))
        with _timed(tally, "read"):
            ids = self.encoders[0].tokenize(texts)
        lengths = np.array([len(caption) for caption in ids], dtype=np.int64)
        starts = np.cumsum(lengths) - lengths
        arrays = self._arrays(chunk)
        for own in arrays.values():
            own["token"][: lengths.sum()] = np.concatenate(ids)
            own["start"][:] = starts + chunk * len(own["token"])
            own["length"][:], own["status"][:] = lengths, OK
        left = np.arange(len(texts))
        if self.sets[0].channels is not None:
            if self._reusable:
                found = [self._reusable[k].copy_captions(own, texts, starts, lengths) for k, own in arrays.items()]
                left = np.unique(np.concatenate(found))
            by_length = left[np.argsort(lengths[left], kind="stable")]  # captions of like length need little padding
            for first in range(0, len(left), self.batch_size):
                rows = by_length[first : first + self.batch_size]
                if self._stopped:
                    raise CacheError("the extraction was stopped")
                names = [texts[row] for row in np.repeat(rows, lengths[rows])], [texts[row] for row in rows]
                encoded = self._encode([*arrays], [ids[row] for row in rows], names, tally)
                for own, (states, pooled) in zip(arrays.values(), encoded, strict=True):
                    own["local"][ranges(starts[rows], lengths[rows])], own["global"][rows] = states, pooled
        for k, own in arrays.items():
            tally[self.job.paths[k], "encoded"] += len(left)
            tally[self.job.paths[k], "reused"] += len(texts) - len(left)
            with _timed(tally, "write"):
                self.sets[k].write(chunk, own)
        tally["samples"] += len(texts)

    def _encode(self, sets: Sequence[int], batch: Any, names: tuple[list[str], list[str]], tally: Tally) -> list[Any]:
        """Return what these sets, by number, store of a batch: local and global features in their dtype, or regions.

        `names` are of the samples of the local features, and of those of the global ones. CacheError: a value does not
        fit the dtype.
        """
        with _timed(tally, "encode"):
            with encoding(self.device):
                encoded = encode_layers([self.encoders[k] for k in sets], batch)
                if isinstance(encoded[0], list):  # regions
                    return encoded
                dtypes = [self.sets[k].dtype for k in sets]
                pending = [
                    [_begin_reading(part, dtype) for part in one] for one, dtype in zip(encoded, dtypes, strict=True)
                ]
            return [(local(names[0]), global_(names[1])) for local, global_ in pending]


def _load(specs: Sequence[EncoderSpec], features: FeatureSet, device: str) -> Sequence[Any]:
    if isinstance(features, ImageSet):
        return load_visual_layers(specs, device)
    words = features.vocabulary if isinstance(features, CaptionSet) else None
    return load_text_layers(specs, device) if words is None else [WordsEncoder(words)]


@contextmanager
def _timed(tally: Tally, share: str) -> Iterator[None]:
    began = time.perf_counter_ns()
    yield
    tally[share] += time.perf_counter_ns() - began


# From the device to the dtype of a set


def _stacked(pictures: list[Tensor], device: str) -> Tensor:
    """Return pixels [B,…] of the host; from pinned memory a GPU takes them while the host goes on."""
    if device == "cpu":
        return torch.stack(pictures)
    shape, dtype = (len(pictures), *pictures[0].shape), pictures[0].dtype
    return torch.stack(pictures, out=torch.empty(shape, dtype=dtype, pin_memory=True))


def _begin_reading(values: Tensor, dtype: str) -> Callable[[list[str]], np.ndarray]:
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
