"""The tasks of an extraction: a batch of pictures or a few chunks of captions each, encoded once, on any Dask worker.

The tasks fill a feature set, or those of several layers of one encoder. `station` has what they share in a process, and
`pictures` reads ahead of them.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..data.regions import lay_out
from ..device import start_reading
from ..encoders.base import encode_layers
from ..encoders.threads import encoding
from ..errors import CacheError, SampleError
from ..store import FAILED, OK, ImageSet
from ..store.create import misfit
from ..store.rows import ranges
from .pictures import Batch, Item, read_in_threads
from .station import Job, Station, open_station


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


def write_images(job: Job, chunks: Sequence[int]) -> Receipt:
    """Encode the images of some chunks that are missing, and write the chunks; errors as of `encode_images`."""
    station, receipt = open_station(job), Receipt()
    for batch in read_in_threads(station, [chunks]):  # to fork for each task would cost more than it brings
        encode_images(station, batch, receipt)
    return receipt


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
            if "stamp" in own:
                own["stamp"][item.at] = one.stamp
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


def _put(rows: list[dict[str, np.ndarray] | None], items: list[Item], encoded: Any, features: ImageSet) -> None:
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
