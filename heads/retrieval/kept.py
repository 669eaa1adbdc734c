"""Embeddings of pictures on the disk, found again by what stands in each picture's file, whatever it is called.

    KEY/HEX.safetensors   some embeddings: `digest` [B, 16] of the files, and `embedding`, or `mean` and
                          `log_variance`, or `rows` and `length`; its metadata has the `sha256` of these tensors, and
                          KEY tells apart what embeds pictures otherwise
    HEX.json              of a folder of pictures: size, times and digest of each file, which is then not read again

Each file appears whole, and none is changed. One that is damaged or missing is as if its pictures were new.
"""

import json
import time
from collections.abc import Sequence as Several
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from ...pipeline.data.digests import as_row, digest
from ...pipeline.documents import DocumentError, read_json
from ...pipeline.encoders.weights import digest as digest_of_tensors
from ...pipeline.errors import OutputError
from ...pipeline.files import making_file, partials_in, remove, remove_abandoned, require_writable, write_text
from ..modules.embedding import Embedding, concatenate, each, embedding_of, tensors_of

PART, SECONDS = 1024, 30.0  # embeddings in a file at most, and how long one waits for more
_FRESH = 2_000_000_000  # nanoseconds in which a file may change again and keep its time
_REMEDY = "make room, or choose another --image-cache"
_DAMAGE = (OSError, SafetensorError, LookupError, TypeError, ValueError, RuntimeError)


class Kept:
    """Embeddings of pictures in the files of a folder, which is made when the first are added."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._where: dict[bytes, tuple[Path, int]] = {}
        self._waiting: list[tuple[list[bytes], Embedding]] = []
        self._began = 0.0
        for left in partials_in(folder):
            remove_abandoned(left)
        for path in sorted(folder.glob("*.safetensors")):
            with suppress(*_DAMAGE), safe_open(path, "numpy") as file:
                self._note(path, [bytes(row) for row in file.get_tensor("digest")])

    def __contains__(self, key: bytes) -> bool:
        return key in self._where

    def require_writable(self) -> None:
        """Raise OutputError if nothing can be added."""
        require_writable(self.folder, "--image-cache")

    def add(self, keys: list[bytes], embedding: Embedding) -> None:
        """Add the embeddings of B pictures, which are written with others, soon or by `flush`; OutputError as there."""
        if not self._waiting:
            self._began = time.monotonic()
        self._waiting.append((keys, each(lambda t: t.cpu().contiguous(), embedding)))
        if sum(len(some) for some, _ in self._waiting) >= PART or time.monotonic() - self._began >= SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write what was added; OutputError where that cannot be."""
        if not self._waiting:
            return
        keys = [key for some, _ in self._waiting for key in some]
        tensors = tensors_of(concatenate([embedding for _, embedding in self._waiting]))
        tensors["digest"] = torch.from_numpy(np.stack([as_row(key) for key in keys]))
        path = self.folder / f"{digest(b''.join(keys)).hex()}.safetensors"
        with making_file(path, OutputError, _REMEDY) as partial:
            partial.write_bytes(save(tensors, {"sha256": digest_of_tensors(tensors)}))
        self._waiting.clear()
        self._note(path, keys)

    def of(self, keys: Several[bytes]) -> Embedding:
        """Return the embeddings of pictures that are all there; KeyError of those that turn out to be damaged."""
        at: dict[Path, list[int]] = {}
        for number, key in enumerate(keys):
            at.setdefault(self._where[key][0], []).append(number)
        parts = []
        for path, numbers in at.items():
            rows = torch.tensor([self._where[keys[number]][1] for number in numbers])
            try:
                parts.append(each(itemgetter(rows), _read(path)))
            except _DAMAGE as error:
                remove(path)
                self._where = {key: where for key, where in self._where.items() if where[0] != path}
                raise KeyError(path) from error
        order = torch.tensor([number for numbers in at.values() for number in numbers]).argsort()
        return each(itemgetter(order), concatenate(parts))

    def _note(self, path: Path, keys: list[bytes]) -> None:
        self._where.update((key, (path, row)) for row, key in enumerate(keys))


def _read(path: Path) -> Embedding:
    """Return the embeddings of a file; an error of `_DAMAGE` where they are not those that were written."""
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if (file.metadata() or {}).get("sha256") != digest_of_tensors(tensors):
            raise ValueError(f"{path} has another SHA-256")
    return embedding_of(tensors)


class Stamp(NamedTuple):
    """What changes when a file is changed or replaced: its size and times, nanoseconds."""

    size: int
    modified: int
    changed: int


class KnownFiles:
    """The digests of the files of a folder, by their names, as they were when they were last read.

    Args:
        place: the folder of the list.
        folder: whose files.
    """

    def __init__(self, place: Path, folder: Path) -> None:
        self._folder = folder
        self._list = place / f"{digest(str(folder.resolve()).encode(errors='surrogateescape')).hex()}.json"
        self._known: dict[str, tuple[Stamp, bytes]] = {}
        self._now: dict[str, tuple[Stamp, bytes]] = {}
        with suppress(OSError, DocumentError, ValueError, TypeError, AttributeError):
            for name, (size, modified, changed, hexadecimal) in read_json(self._list).items():
                self._known[name] = Stamp(size, modified, changed), bytes.fromhex(hexadecimal)

    def stamp(self, name: str) -> Stamp:
        """Return what changes with a file; OSError where there is none."""
        status = (self._folder / name).stat()
        return Stamp(status.st_size, status.st_mtime_ns, status.st_ctime_ns)

    def digest(self, name: str, stamp: Stamp) -> bytes | None:
        """Return the digest of a file that has not changed; None: it is not known."""
        before, key = self._known.get(name, (None, None))
        return key if before == stamp else None

    def note(self, name: str, stamp: Stamp, key: bytes) -> None:
        """Take down the digest of a file that had this stamp before it was read."""
        if stamp == self._known.get(name, (None,))[0] or time.time_ns() - max(stamp[1:]) > _FRESH:
            self._now[name] = stamp, key

    def save(self, *, complete: bool) -> None:
        """Write the list of the files that were noted, if it is another; nothing where that cannot be.

        Unless they are `complete`, what was known of the others stays.
        """
        files = self._now if complete else {**self._known, **self._now}
        if files == self._known:
            return
        told = {name: [*stamp, key.hex()] for name, (stamp, key) in files.items()}
        with suppress(OutputError):
            write_text(self._list, json.dumps(told), OutputError)
