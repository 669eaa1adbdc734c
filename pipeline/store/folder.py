"""The folder of a store: a local path, or an object store through fsspec; and the groups and arrays of Zarr in it.

On a disk every file is written beside its place, synced and renamed, so that it is whole or absent after a kill. Object
stores write whole objects by themselves; what they raise becomes one `StoreError`.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

import fsspec
import google_crc32c
import numpy as np
import zarr
from zarr.abc.store import Store as ZarrStore
from zarr.codecs import Crc32cCodec
from zarr.core.buffer import Buffer
from zarr.storage import FsspecStore, LocalStore, MemoryStore

from ..errors import CacheError, StoreError
from ..files import beside, locked, make_folders, remove, remove_whole, require_writable, to_disk
from ..wording import reason
from .object_lock import object_lock

LOCK = ".lock"
_locks: set[int] = set()  # descriptors of the locks that this process holds
DAMAGED = (KeyError, ValueError, TypeError, AssertionError)  # what Zarr raises of damaged metadata
_LOCAL = ("file", "local")


class Folder:
    """A folder at a local path, or at an fsspec URL such as ``s3://bucket/coco.zarr``; `root` is its path there."""

    def __init__(self, url: str | Path) -> None:
        self.url = str(url).rstrip("/") or str(url)
        if not self.url:
            raise CacheError("the name of the store is empty; give a local path or an fsspec URL")
        if "::" in self.url and "://" not in self.url:
            raise CacheError(f"{url} cannot be a store: '::' joins URLs in fsspec; give a path without it")
        try:
            self.fs, self.root = fsspec.core.url_to_fs(self.url)
        except (ValueError, ImportError) as error:
            way = "give a local path, or a URL that fsspec can write"
            raise CacheError(f"{url} cannot be a store ({reason(error)}); {way}") from error
        self.is_local = not isinstance(self.fs.protocol, str) and self.fs.protocol[0] in _LOCAL
        self.absolute_url = str(self.root) if self.is_local else self.url  # valid in any working folder
        self.zarr: ZarrStore  # the folder as Zarr reads it
        if self.is_local:
            self.zarr = LocalStore(self.root, read_only=True)
        else:
            self.fs, self.zarr = _connect(self.url, os.getpid())

    def path(self, name: str) -> str:
        """Return the path of `name` on the file system."""
        return f"{self.root}/{name.lstrip('/')}" if name else self.root

    def exists(self, name: str) -> bool:
        """Return whether a file or folder `name` is there."""
        with self.answering():
            return bool(self.fs.exists(self.path(name)))

    def names(self, name: str) -> list[str]:
        """Return the names directly below the folder `name`, sorted, without partial files; none if it is absent."""
        with self.answering():
            try:
                entries = [Path(entry).name for entry in self.fs.ls(self.path(name), detail=False)]
            except (FileNotFoundError, NotADirectoryError):
                return []
        return sorted(entry for entry in entries if not entry.endswith(".partial"))

    def read(self, *names: str) -> list[bytes | None]:
        """Return the content of each file, None of one that is absent; an object store sends several at once."""
        with self.answering():
            contents = self.fs.cat_ranges([*map(self.path, names)], None, None, on_error="return")
            for content in contents:
                if isinstance(content, Exception) and not isinstance(content, FileNotFoundError):
                    raise content
        return [None if isinstance(content, Exception) else bytes(content) for content in contents]

    def write(self, files: Mapping[str, Sequence[Any]]) -> None:
        """Write each file whole, of its bytes one after the other; an object store takes several at once."""
        if self.is_local:
            for name, parts in files.items():
                _put(Path(self.path(name)), *parts)
            for folder in {Path(self.path(name)).parent for name in files}:
                to_disk(folder)
            return
        with self.answering():
            self.fs.pipe({self.path(name): b"".join(map(bytes, parts)) for name, parts in files.items()})

    def remove(self, name: str) -> None:
        """Delete the file or folder `name` and all below it, if it is there."""
        with self.answering(), suppress(FileNotFoundError):
            if self.is_local:
                remove_whole(Path(self.path(name)))
            else:
                self.fs.rm(self.path(name), recursive=True)

    def size(self, name: str = "") -> int:
        """Return the bytes of all files below `name`."""
        with self.answering():
            try:
                return sum(entry.get("size", 0) for entry in self.fs.find(self.path(name), detail=True).values())
            except FileNotFoundError:
                return 0

    def require_writable(self) -> None:
        """Raise OutputError where nothing can be written to a folder on a disk."""
        if self.is_local:
            require_writable(Path(self.root), "store")

    @contextmanager
    def one_writer(self) -> Iterator[Self]:
        """Lock the folder against other writers; on a disk, the system unlocks it however the process ends.

        CacheError: another process or thread is writing there. OutputError: nothing can be written there.
        """
        self.require_writable()
        if not self.is_local:
            with ExitStack() as held:
                with self.answering():
                    held.enter_context(object_lock(self.fs, self.path(LOCK), self.url))
                yield self
            return
        busy = CacheError(f"another process is writing to {self.url}; wait until it has ended")
        lock = Path(self.root, LOCK)
        make_folders(lock.parent)
        with ExitStack() as opened:
            while True:
                lock.touch()
                handle = opened.enter_context(locked(lock, busy))
                with suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(handle), lock.stat()):
                        break  # else a writer has ended meanwhile, and has removed this file
            for partial in lock.parent.rglob("*.partial"):  # what killed writers left
                remove(partial)
            _locks.add(handle)
            try:
                yield self
            finally:
                _locks.discard(handle)
                remove(lock)  # at which Zarr would wonder

    @contextmanager
    def reading(self, what: str, advice: str = "run `xret cache verify`") -> Iterator[None]:
        """Turn what Zarr raises of damaged metadata, or a checksum, into a CacheError; see also `answering`."""
        with self.answering():
            try:
                yield
            except (*DAMAGED, FileNotFoundError) as error:
                raise CacheError(f"{self.url}/{what} is missing or damaged; {advice}") from error

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Turn what an object store raises into one `StoreError`."""
        try:
            yield
        except (CacheError, StoreError, FileNotFoundError, NotADirectoryError):
            raise
        except Exception as error:  # each kind of object store has errors of its own
            if self.is_local:
                raise
            raise StoreError(f"{self.url} does not answer ({reason(error)}); run the same command again") from error


def drop_locks() -> None:
    """Close the locks that a forked process has inherited; else it would keep them when its parent is killed."""
    for handle in _locks:
        os.close(handle)
    _locks.clear()


@dataclass(frozen=True)
class NewArray:
    """An array to be created, uncompressed, each chunk of so many rows with a crc32c."""

    dimensions: tuple[str, ...]
    shape: tuple[int, ...]
    rows: int
    dtype: str
    fill: float = 0
    blocks: Iterable[np.ndarray] | None = None  # its values, one after the other; None: there are no chunks yet


def begin_group(folder: Folder, path: str) -> None:
    """Write a group without attributes, which is unfinished."""
    files: dict[str, Buffer] = {}
    zarr.create_group(MemoryStore(files), zarr_format=3)
    folder.write({f"{path}/zarr.json": [files["zarr.json"].as_buffer_like()]})


def write_group(folder: Folder, path: str, attributes: Mapping[str, Any], arrays: Mapping[str, NewArray] = {}) -> None:
    """Write a group and its arrays, last its attributes, which mark it as whole, with a checksum of all metadata.

    Zarr writes them into memory; in an object store it would ask for everything before it writes it.
    """
    files: dict[str, Buffer] = {}
    group = zarr.create_group(MemoryStore(files), zarr_format=3, attributes={**attributes, "checksum": 0})
    for name, new in arrays.items():
        array = group.create_array(
            name,
            shape=new.shape,
            chunks=(max(1, new.rows), *new.shape[1:]),
            dtype=new.dtype,
            fill_value=new.fill,
            filters=None,
            compressors=[Crc32cCodec()],
            chunk_key_encoding={"name": "default", "separator": "."},
            dimension_names=new.dimensions,
            config={"write_empty_chunks": True},
        )
        for first, values in _in_chunks(new):
            array[first : first + len(values)] = values
            chunks = [file for file in files if not file.endswith("zarr.json")]
            folder.write({f"{path}/{file}": [files.pop(file).as_buffer_like()] for file in chunks})
    metadata = [files[name].to_bytes() for name in ("zarr.json", *(f"{name}/zarr.json" for name in arrays))]
    sealed = metadata[0].replace(b'"checksum": 0', b'"checksum": %d' % _checksum(metadata))
    del files["zarr.json"]
    folder.write({f"{path}/{name}": [data.as_buffer_like()] for name, data in files.items()})
    folder.write({f"{path}/zarr.json": [sealed]})


def _in_chunks(new: NewArray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the values of an array chunk by chunk, each with its first row."""
    first, pending = 0, list[np.ndarray]()
    for block in new.blocks or ():
        pending.append(block)
        while (have := sum(map(len, pending))) and (have >= new.rows or first + have == new.shape[0]):
            values = np.concatenate(pending)
            yield first, values[: new.rows]
            first, pending = first + min(have, new.rows), [values[new.rows :]]


def is_sealed(folder: Folder, path: str) -> bool:
    """Return whether the metadata of a group and its arrays are those that were written."""
    try:
        (group,) = folder.read(f"{path}/zarr.json")
        attributes = json.loads(group or b"")["attributes"]
        arrays = folder.read(*(f"{path}/{name}/zarr.json" for name in attributes.get("arrays", ())))
        return bool(attributes.get("checksum") == _checksum([group or b"", *(array or b"" for array in arrays)]))
    except DAMAGED:
        return False


def _checksum(metadata: Sequence[bytes]) -> int:
    """Return the crc32c of the metadata of a group, its own checksum blanked, and of its arrays'."""
    group, *arrays = metadata
    return int(google_crc32c.value(b"\0".join([re.sub(rb'"checksum": \d+', b'"checksum": 0', group), *arrays])))


def _put(path: Path, *parts: Any) -> None:
    """Write a file beside its place, sync it and rename it."""
    make_folders(path.parent)
    partial = beside(path)
    try:
        with partial.open("wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException as error:
        remove(partial)
        if isinstance(error, OSError):
            error.filename = str(path)  # of a full disk Python names none
        raise


@lru_cache(16)
def _connect(url: str, _process: int) -> tuple[fsspec.AbstractFileSystem, FsspecStore]:
    """Return our and Zarr's connection, one a process, where fsspec would make one a thread."""
    ours, zarrs = fsspec.core.url_to_fs(url)[0], FsspecStore.from_url(url, read_only=True)
    for fs in (ours, zarrs.fs):
        fs.dircache.use_listings_cache = False  # another process may have written since
        if hasattr(fs, "max_concurrency"):
            fs.max_concurrency = 1  # with more, s3fs asks for the size of an object before it reads it
    return ours, zarrs
