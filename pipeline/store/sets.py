"""Feature sets of a store: one encoder's features of the images, or of the captions.

A set is a Zarr group whose arrays have the same number of samples in a chunk. The chunk of ``status`` is written last
and marks the others as done. Row i of an array is sample i; tokens are packed, from ``start`` of each caption.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Self

import google_crc32c
import numpy as np
import zarr

from ..data.images import DIGEST_BYTES
from ..errors import CacheError
from .rows import StoredArray
from .samples import StoredSamples

OK, FAILED, NOT_DONE = 0, 1, 255  # the status of a sample


class FeatureSet:
    """What image and caption sets share.

    The name is the encoder's, ``@`` and the first 8 digits of the fingerprint; the kind is ``grid``, ``roi``,
    ``frames``, ``words``, ``tokens``, or ``global`` for the global feature alone.
    """

    modality: str

    def __init__(self, cache: StoredSamples, name: str) -> None:
        self.cache, self.name, self.path = cache, name, f"{self.modality}/{name}"
        with cache.folder.reading(self.path):
            group = cache.group[self.path]
            assert isinstance(group, zarr.Group)
            self.group = group
            self.attributes: dict[str, Any] = dict(group.attrs)
            self.kind: str = self.attributes["kind"]
            self.fingerprint: str = self.attributes["fingerprint"]  # SHA-256 of what decides the features
            self.identity: dict[str, Any] = self.attributes["identity"]  # the same, readable
            self.dtype: str = self.attributes["dtype"]  # ``float16`` or ``float32``; ``int32`` for words
            self.channels: int | None = self.attributes["channels"]  # of a local row; None without local features
            self.global_channels: int | None = self.attributes["global_channels"]  # None for words
            self.space: str | None = self.attributes.get("space")  # global features of one space are comparable
            self.array_names: list[str] = self.attributes["arrays"]  # ``status`` is the last
        self.views: int = self.attributes.get("views", 1)  # of an image; the first is the image as it is
        self._arrays: dict[str, StoredArray] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.cache, self.name)

    # What is done

    @property
    def samples(self) -> int:
        """How many images or captions the data set has."""
        return self.cache.images if self.modality == "images" else self.cache.captions

    def rows_of(self, split: str) -> slice:
        """Return the rows of a split."""
        rows = self.cache.splits[split]
        return slice(*(rows if self.modality == "images" else self.cache.captions_of(*rows)))

    @cached_property
    def chunk_rows(self) -> int:
        """How many samples a chunk has."""
        return self.stored("status").chunk_rows

    @property
    def chunks(self) -> int:
        """How many chunks the set has."""
        return -(-self.samples // self.chunk_rows)

    def rows_in(self, chunk: int) -> tuple[int, int]:
        """Return the rows [first, last) of a chunk."""
        return chunk * self.chunk_rows, min((chunk + 1) * self.chunk_rows, self.samples)

    def chunks_of(self, split: str) -> range:
        """Return the chunks that hold rows of a split; the first and last may hold others' too."""
        rows = self.rows_of(split)
        return range(rows.start // self.chunk_rows, -(-rows.stop // self.chunk_rows))

    def rows_left(self, splits: Iterable[str], status: int = NOT_DONE, chunk: int | None = None) -> np.ndarray:
        """Return the rows of these splits (of one chunk) that are not done, or have another `status`, int64."""
        first, last = (0, self.samples) if chunk is None else self.rows_in(chunk)
        parts = [self.rows_of(split) for split in splits]
        clipped = [(max(part.start, first), max(first, min(part.stop, last))) for part in parts]
        return np.concatenate([a + np.flatnonzero(self.status[a:b] == status) for a, b in clipped])

    def missing(self, splits: Iterable[str]) -> list[int]:
        """Return the chunks that hold rows of these splits that are not done."""
        lacking = np.zeros((self.chunks, self.chunk_rows), bool)
        for part in map(self.rows_of, splits):
            lacking.ravel()[part] |= self.status[part] == NOT_DONE
        return [*map(int, np.flatnonzero(lacking.any(axis=1)))]

    def written(self) -> list[int]:
        """Return the chunks that have a mark, whether it can be read or not; rows of a chunk may be left."""
        names = self.cache.folder.names(f"{self.path}/status")
        return sorted(int(name.split(".")[1]) for name in names if name.startswith("c."))

    def complete(self, split: str) -> bool:
        """Return whether every row of a split is done."""
        return not self.missing([split])

    def reopened(self) -> Self:
        """Return the same set as it is now."""
        return type(self)(self.cache, self.name)

    @cached_property
    def status(self) -> np.ndarray:
        """Status of each sample, uint8: 0 ok, 1 failed, 255 not done; `write` keeps it up to date."""
        return self.stored("status").whole(self.written())

    @cached_property
    def length(self) -> np.ndarray:
        """Valid local rows, or tokens, of each sample, int32."""
        return self._read("length") if "length" in self.array_names else np.broadcast_to(np.int32(1), self.samples)

    @property
    def failures(self) -> list[tuple[str, str]]:
        """Image id and reason of each sample that could not be read."""
        found = self._read_failures(self._chunks_with(self.status == FAILED))
        return [(key, reason) for row, key, reason in sorted(found) if self.status[row] == FAILED]

    def _chunks_with(self, samples: np.ndarray) -> list[int]:
        return [*map(int, np.unique(np.flatnonzero(samples) // self.chunk_rows))]

    def _failed_file(self, chunk: int) -> str:
        return f"{self.path}/status/failed.{chunk}.jsonl"

    def _read_failures(self, chunks: Sequence[int]) -> list[tuple[int, str, str]]:
        """Read the failures of chunks: lines of JSON, of which the last is the crc32c of the others."""
        lines, names = [], [*map(self._failed_file, chunks)]
        for name, data in zip(names, self.cache.folder.read(*names), strict=True):
            body, _, crc = (data or b"").rstrip(b"\n").rpartition(b"\n")
            if crc != b"%d" % google_crc32c.value(body):
                raise CacheError(f"{self.cache.url}: '{name}' is damaged; extract again with --repair")
            lines += [json.loads(line) for line in body.decode().splitlines()]
        return [(line["row"], line["id"], line["reason"]) for line in lines]

    # Reading

    def array_of(self, name: str) -> "zarr.Array[Any]":
        """Return an array as Zarr has it; CacheError if there is none, or its metadata is damaged."""
        return self.cache.array(f"{self.path}/{name}")

    def stored(self, name: str) -> StoredArray:
        """Return what reads and writes an array; CacheError as of `array_of`."""
        if name not in self._arrays:
            views = self.views if name in ("local", "global") else 1
            self._arrays[name] = StoredArray(self.cache.folder, self.array_of(name), views)
        return self._arrays[name]

    def _read(self, name: str) -> np.ndarray:
        """Read the chunks of an array that have samples that are done; elsewhere it has its fill value."""
        return self.stored(name).whole(self._chunks_with(self.status != NOT_DONE))

    # Writing

    def blank(self, chunk: int) -> dict[str, np.ndarray]:
        """Return the arrays of a chunk by name, filled with their fill values."""
        first, last = self.rows_in(chunk)
        arrays = {name: self.stored(name) for name in self.array_names}
        packed = ("token", "local") if self.modality == "captions" else ()
        return {name: of.blank(of.chunk_rows if name in packed else last - first) for name, of in arrays.items()}

    def read_chunk(self, chunk: int) -> dict[str, np.ndarray]:
        """Return the arrays of a chunk by name as they are in the store, or blank if none of its samples is done.

        CacheError: a file of it is missing or damaged; Zarr would take fill values for one that is missing.
        """
        first, last = self.rows_in(chunk)
        if (self.status[first:last] == NOT_DONE).all():
            return self.blank(chunk)
        return {name: array.decoded(chunk, data).copy() for name, array, data in self.contents(chunk)}

    def contents(self, chunk: int) -> Iterator[tuple[str, StoredArray, bytes | None]]:
        """Return each array by name with the content of its file of a chunk, None of one that is missing."""
        arrays = [*map(self.stored, self.array_names)]
        files = self.cache.folder.read(*(array.file(chunk) for array in arrays))
        return zip(self.array_names, arrays, files, strict=True)

    def write(self, chunk: int, arrays: Mapping[str, np.ndarray], failed: Mapping[int, str] = {}) -> None:
        """Write a chunk of every array, as `blank` returns them, ``status`` last, whatever lies there.

        `failed` has at least the reasons of samples that fail now, by their rows in the data set.
        """
        folder = self.cache.folder
        *features, mark = self.array_names
        files = {self.stored(name).file(chunk): self.stored(name).encoded(arrays[name]) for name in features}
        rows = (chunk * self.chunk_rows + np.flatnonzero(arrays[mark] == FAILED)).tolist()
        if failed.keys() & rows:
            if {*rows} - failed.keys():  # samples of another split have failed before
                failed = {row: reason for row, _, reason in self._read_failures([chunk])} | {**failed}
            images = rows if self.modality == "images" else self.cache.caption_image[rows].tolist()
            ids = [self.cache.ids(image, image + 1)[0] for image in images]
            lines = [{"row": row, "id": key, "reason": failed[row]} for row, key in zip(rows, ids, strict=True)]
            body = "\n".join(map(json.dumps, lines)).encode()
            files[self._failed_file(chunk)] = body, b"\n%d\n" % google_crc32c.value(body)
        folder.write(files)
        self._mark(chunk, arrays[mark])

    def _mark(self, chunk: int, status: np.ndarray) -> None:
        mark = self.stored("status")
        self.cache.folder.write({mark.file(chunk): mark.encoded(status)})
        if "status" in vars(self):  # it has been read
            self.status[slice(*self.rows_in(chunk))] = status

    def retry(self, splits: Iterable[str]) -> None:
        """Mark the samples of these splits that failed as not done; what else their chunks hold stays."""
        rows, status, folder = self.rows_left(splits, FAILED), self.status.copy(), self.cache.folder
        status[rows] = NOT_DONE
        for chunk in np.unique(rows // self.chunk_rows).tolist():
            first, last = self.rows_in(chunk)
            self._mark(chunk, status[first:last])
            if not (status[first:last] == FAILED).any():
                folder.remove(self._failed_file(chunk))

    def forget(self, *chunks: int) -> Self:
        """Delete chunks, their marks first; return the set as it is then."""
        for chunk in chunks:
            files = [self.stored(name).file(chunk) for name in reversed(self.array_names)]
            for file in (*files, self._failed_file(chunk)):
                self.cache.folder.remove(file)
        return self.reopened()


class ImageSet(FeatureSet):
    """Image features of one encoder.

    The rows fill a `grid` (height, width) row by row, whose cells average those of the encoder's own map, `cells`; None
    where they fill none, or it is the same.
    """

    modality = "images"

    def __init__(self, cache: StoredSamples, name: str) -> None:
        super().__init__(cache, name)
        self.rows: int = self.attributes["rows"]  # local rows of an image, N; the most, where they vary
        sides = (self.attributes.get(name) for name in ("grid", "cells"))
        self.grid, self.cells = (None if pair is None else (int(pair[0]), int(pair[1])) for pair in sides)

    @cached_property
    def digests(self) -> np.ndarray:
        """Digest of each picture's file, uint8 [I,16]; zeros where it is not known, as of imports and failures."""
        return self._of_good("digest", DIGEST_BYTES, "uint8")

    @cached_property
    def stamps(self) -> np.ndarray:
        """Bytes and time of each picture's file when it was read, int64 [I,2]; zeros where they are not known."""
        return self._of_good("stamp", 2, "int64")

    def _of_good(self, name: str, width: int, dtype: str) -> np.ndarray:
        if name not in self.array_names:
            return np.zeros((self.samples, width), dtype)
        values = self._read(name)
        values[self.status != OK] = 0
        return values

    def differing(self, other: "ImageSet") -> np.ndarray:
        """Return the image rows, int64, whose features here and in another set of the store are of other files."""
        one, two = self.digests, other.digests
        return np.flatnonzero(one.any(1) & two.any(1) & (one != two).any(1))

    def local(self, rows: np.ndarray, view: np.ndarray | int = 0) -> np.ndarray:
        """Return the local features [B,N,C] of these image rows, in one view or each in its own [B]."""
        return self._features("local", rows, view)

    def global_(self, rows: np.ndarray, view: np.ndarray | int = 0) -> np.ndarray:
        """Return the global features [B,C] of these image rows, in one view or each in its own [B]."""
        return self._features("global", rows, view)

    def packed(self, rows: np.ndarray) -> np.ndarray:
        """Return the valid local features of these image rows in the first view, packed [sum of lengths, C]."""
        return self.local(rows)[np.arange(self.rows) < self.length[rows, None]]

    def _features(self, name: str, rows: np.ndarray, view: np.ndarray | int) -> np.ndarray:
        return self.stored(name).gather(np.asarray(rows) * self.views + view)

    def array(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Return any array of these image rows.

        ``length`` [B], ``size`` [B,2] (width, height), ``digest`` [B,16], ``stamp`` [B,2] (bytes, time), or of regions
        ``boxes`` [B,N,4], ``classes`` or ``scores`` [B,N]. Features of several views are [B,V,…].
        CacheError: the set has no such array.
        """
        if name == "length":
            return np.asarray(self.length[rows])
        if name in ("local", "global") and self.views > 1:
            return np.stack([self._features(name, rows, view) for view in range(self.views)], axis=1)
        return self.stored(name).gather(rows)


class CaptionSet(FeatureSet):
    """Caption features of one encoder, packed; `vocabulary` of a ``words`` set has the words by token id."""

    modality = "captions"

    def __init__(self, cache: StoredSamples, name: str) -> None:
        super().__init__(cache, name)
        words = self.attributes.get("vocabulary")
        self.vocabulary: tuple[str, ...] | None = None if words is None else tuple(words)

    @cached_property
    def _start(self) -> np.ndarray:
        return self._read("start")

    def local(self, rows: np.ndarray) -> np.ndarray:
        """Return the token features of these caption rows, packed [sum of lengths, C]."""
        return self.stored("local").gather(self._start[rows], self.length[rows])

    def global_(self, rows: np.ndarray) -> np.ndarray:
        """Return the global features [B,C] of these caption rows."""
        return self.stored("global").gather(rows)

    def packed(self, rows: np.ndarray) -> np.ndarray:
        """Return what `local` does, or the ids of words, which have no local features."""
        return self.local(rows) if self.vocabulary is None else self.token(rows)

    def token(self, rows: np.ndarray) -> np.ndarray:
        """Return the token ids of these caption rows, packed int32 [sum of lengths]."""
        return self.stored("token").gather(self._start[rows], self.length[rows])
