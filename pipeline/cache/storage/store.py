"""Where a cache lies: Zarr arrays with checksums, and group metadata that carries its own digest.

Zarr checks the bytes of a chunk (crc32c), but nobody checks its JSON metadata. Every group of a cache therefore
lists the SHA-256 of its arrays' metadata and seals itself: its attribute `digest` is the SHA-256 of the group's own
`zarr.json` with that digest blanked. A group that is being made says so in exactly one way, which no damage imitates.
"""

import hashlib
import json
import os
import re
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import zarr
from fsspec.asyn import AsyncFileSystem, sync
from zarr.codecs import Crc32cCodec

from ...documents import parse_json
from ...errors import CacheError, StoreError
from ...files import link, remove_whole, write_bytes
from ...versions import note_version, require_settings
from .seals import is_apart, seal_of_file
from .zarr_stores import LEASE, DiskStore, connect, on_condition, one_sentence, require_holder

PATIENCE = 60.0  # seconds that an object store may take to say whether something exists, with all retries
_BLANK = "0" * 64
_LOCAL = ("file", "local")
GENERATIONS = "generations"  # in a cache's folder; see `generations`
_GENERATION = re.compile(rf"(.+)/{GENERATIONS}/([1-9][0-9]*)/?")


class Store:
    """A cache's folder at a local path, or an fsspec URL such as ``s3://bucket/coco.zarr``.

    Attributes:
        writer: on an object store, who writes; each write then asks first whether the lease is still theirs.
    """

    def __init__(self, url: str, writer: str | None = None) -> None:
        note_version("zarr")
        require_settings()
        self.url, self.writer = str(url), writer
        if not self.url:
            raise CacheError("the name of the store is empty; give a local path or an fsspec URL")
        try:
            self.fs, self.root = fsspec.core.url_to_fs(self.url)
        except (ValueError, ImportError) as error:
            raise CacheError(
                f"{url} cannot be a store ({str(error).rstrip('.')}); give a local path, or a URL that fsspec can write"
            ) from error
        self.is_local = not isinstance(self.fs.protocol, str) and self.fs.protocol[0] in _LOCAL
        if not self.is_local:
            self.fs, self._objects = connect(self.url, os.getpid())
        # Whoever writes a generation holds the lease of the whole cache.
        self._lease = f"{home_of(self.root)[0]}/{LEASE}"

    @property
    def absolute_url(self) -> str:
        """The URL, good in any working folder."""
        return str(self.root) if self.is_local else self.url

    def path(self, name: str) -> str:
        """Return the full path of `name` below the store."""
        return f"{self.root}/{name}" if name else self.root

    def exists(self, name: str) -> bool:
        """Return whether a file or folder `name` is there.

        Raises:
            StoreError: as all methods here, an object store does not answer, or wants credentials.
        """
        with self._answering():
            if isinstance(self.fs, AsyncFileSystem):
                return bool(sync(self.fs.loop, self.fs._exists, self.path(name), timeout=PATIENCE))
            return bool(self.fs.exists(self.path(name)))

    def is_written(self, name: str) -> bool:
        """Return whether there is a file `name` that is not empty."""
        with self._answering():
            try:
                info = self.fs.info(self.path(name))
            except (FileNotFoundError, NotADirectoryError):
                return False
        return bool(info["type"] == "file" and info["size"] > 0)

    def names(self, name: str) -> list[str]:
        """Return the names directly below the folder `name`, sorted, without partial files; none if it is absent."""
        if not self.exists(name):
            return []
        with self._answering():
            entries = (Path(entry).name for entry in self.fs.ls(self.path(name), detail=False))
            return sorted(entry for entry in entries if not entry.endswith(".partial"))

    def remove(self, name: str) -> None:
        """Delete the file or folder `name` and all below it, if it is there; on a disk in one step."""
        self._require_lease()
        if not self.exists(name):
            return
        if self.is_local:
            remove_whole(Path(self.path(name)))
            return
        with self._answering():
            self.fs.rm(self.path(name), recursive=True)

    def read_bytes(self, name: str) -> bytes:
        """Return the content of the file `name`.

        Raises:
            CacheError: it is missing, or a disk cannot read it.
        """
        data = self.find_bytes(name)
        if data is None:
            raise CacheError(f"{self.url}: '{name}' is missing; `xret cache verify` lists what is affected")
        return data

    def find_bytes(self, name: str) -> bytes | None:
        """Return the content of the file `name`; None where there is none, or a disk cannot read it."""
        with self._answering():
            try:
                return bytes(self.fs.cat_file(self.path(name)))
            except FileNotFoundError:
                return None
            except OSError as error:
                if not self.is_local:
                    raise
                if isinstance(error, PermissionError):
                    raise forbidden(self.path(name)) from error
                return None  # damaged, for whoever asks

    def write_bytes(self, name: str, data: bytes) -> None:
        """Write the file `name` in one step: it is there whole, or as it was before."""
        if self.is_local:
            write_bytes(Path(self.path(name)), data)
            return
        self._require_lease()
        with self._answering():
            self.fs.pipe_file(self.path(name), data)

    def link(self, name: str, there: "Store", source: str) -> None:
        """Let `name` be what `source` is in `there`, a store on the same file system, in one step.

        Of a disk both share the bytes where it can do that; else they are copied.

        Raises:
            FileNotFoundError: there is no such file.
        """
        if self.is_local:
            link(Path(there.path(source)), Path(self.path(name)))
            return
        self._require_lease()
        if not there.is_written(source):
            raise FileNotFoundError(there.path(source))
        with self._answering():
            self.fs.cp_file(there.path(source), self.path(name))

    def create_bytes(self, name: str, data: bytes) -> bool:
        """Write the file `name` of an object store unless there is one; return whether it now holds `data`."""
        return self._write_if(name, data, mode="create")

    def replace_bytes(self, name: str, before: bytes, data: bytes) -> bool:
        """Write the file `name` of an object store if it begins with `before`; return whether it now holds `data`.

        On S3 nothing is overwritten that another writes meanwhile; other object stores have no such condition.
        """
        on_s3 = "s3" in self.fs.protocol
        with self._answering():
            try:
                tag = self.fs.info(self.path(name))["ETag"] if on_s3 else None
            except FileNotFoundError:
                return False
        # Read after the tag: what is there now may be newer, and then nothing is written.
        held = self.find_bytes(name)
        if held is None or not held.startswith(before):
            return False
        return self._write_if(name, data, **({"IfMatch": tag} if on_s3 else {}))

    def _write_if(self, name: str, data: bytes, **condition: Any) -> bool:
        with self._answering():
            try:
                self.fs.pipe_file(self.path(name), data, **condition)
            except OSError as error:
                if not on_condition(error):
                    raise
                return self.find_bytes(name) == data  # the first of two attempts may have got through
        return True

    def _require_lease(self) -> None:
        if self.writer is not None:
            with self._answering():
                try:
                    held = bytes(self.fs.cat_file(self._lease))
                except FileNotFoundError:
                    held = None
            require_holder(self.url, self.writer, held)

    def size(self, name: str) -> int:
        """Return the bytes of all files below `name`."""
        if not self.exists(name):
            return 0
        with self._answering():
            # Names and sizes at once: a file that is still written beside its place may go between two looks.
            return sum(entry.get("size", 0) for entry in self.fs.find(self.path(name), detail=True).values())

    def _answering(self) -> AbstractContextManager[None]:
        return nullcontext() if self.is_local else one_sentence(self.url)

    # Arrays

    def create_array(
        self,
        name: str,
        shape: tuple[int, ...],
        shard: int,
        dtype: str,
        *,
        inner: int | None = None,
        fill: float = 0,
        apart: bool = False,
    ) -> None:
        """Create an array whose rows, its first axis, are written `shard` at a time, each time into one file.

        Args:
            name: path below the store.
            shape: the full shape.
            shard: rows in a file.
            dtype: NumPy name.
            inner: rows in a checked block inside a file; None: the file is one block.
            fill: value of the rows that are not written yet.
            apart: each step of the second axis has a file of its own, so that one is read without the others.
        """
        row = (1, *shape[2:]) if apart else shape[1:]
        zarr.create_array(
            self._zarr(True),
            name=name,
            shape=shape,
            chunks=(inner or shard, *row),
            shards=(shard, *row) if inner else None,
            dtype=dtype,
            filters=None,
            compressors=[Crc32cCodec()],
            fill_value=fill,
            overwrite=True,
        )
        if zarr.config.get("json_indent") != 2:  # the same bytes whatever the user likes
            metadata = json.loads(self.read_bytes(_metadata(name)))
            self.write_bytes(_metadata(name), json.dumps(metadata, indent=2).encode())

    def write_array(self, name: str, values: np.ndarray) -> list[int]:
        """Create the array `name` with these values, a million rows a file; return the seal of each file."""
        rows = min(1 << 20, max(len(values), 1))
        self.create_array(name, values.shape, rows, values.dtype.name)
        self.open_array(name, writable=True)[...] = values
        return [seal_of_file(name, values, rows, file) for file in range(-(-len(values) // rows))]

    def read_sealed(self, name: str, sealed: list[int], first: int, last: int | None) -> np.ndarray:
        """Return the rows [first, last) of an array that `write_array` made with these seals; as `read_array`.

        Raises:
            CacheError: also, a file holds what was written for another place.
        """
        array = self.open_array(name)
        rows, last = array.chunks[0], array.shape[0] if last is None else last
        begin = first // rows
        values = self.read_array(name, begin * rows, -(-last // rows) * rows)
        for number in range(-(-len(values) // rows)):
            file = begin + number
            if seal_of_file(name, values, rows, number, begin) not in sealed[file : file + 1]:
                raise CacheError(
                    f"{self.url}: file {file} of '{name}' is not what was written there; `xret cache verify` lists"
                    " what is affected"
                )
        return values[first - begin * rows : last - begin * rows]

    def write_shard(self, name: str, shard: int, values: np.ndarray) -> None:
        """Write the files of one shard of the array `name` whole, whatever lies there."""
        array = self.open_array(name, writable=True)
        rows = slice(shard * len(values), (shard + 1) * len(values))
        apart = is_apart(array)
        # Of several files one after another: where writing one fails, Zarr leaves the others under way.
        for step in range(array.shape[1]) if apart else [None]:
            at: Any = rows if step is None else (rows, step)
            part = values if step is None else values[:, step]
            try:
                array[at] = part
            except (ValueError, IsADirectoryError):  # Zarr reads a sharded file before it replaces it: this is damaged
                self.remove(f"{name}/c/{shard}" if step is None else f"{name}/c/{shard}/{step}")
                array[at] = part

    def open_array(self, name: str, writable: bool = False) -> "zarr.Array[Any]":
        """Open the array `name`.

        Raises:
            CacheError: it is not there or its metadata cannot be read; or it is to be written, and the folder has gone.
        """
        if writable and self.is_local and not Path(self.root).is_dir():  # Zarr would begin another in its place
            raise gone(self.url)
        try:
            array = zarr.open_array(self._zarr(writable), path=name, mode="r+" if writable else "r", zarr_format=3)
        except (FileNotFoundError, ValueError, KeyError) as error:
            raise CacheError(f"{self.url}: array '{name}' is missing or its zarr.json is damaged") from error
        # Zeros are data: without this a shard of zeros would have no file and look as if it had been lost.
        return array.with_config({"write_empty_chunks": True})

    def read_array(self, name: str, first: int = 0, last: int | None = None) -> np.ndarray:
        """Return the rows [first, last) of the array `name`, by default all.

        Raises:
            CacheError: it is missing, or a checksum does not fit.
        """
        array = self.open_array(name)
        try:
            return np.asarray(array[first:last])
        except StoreError:
            raise
        except PermissionError as error:
            raise forbidden(str(error.filename)) from error
        except Exception as error:  # whatever a damaged file makes a codec raise
            raise CacheError(f"{self.url}: '{name}' is damaged; `xret cache verify` lists what is affected") from error

    def _zarr(self, writable: bool) -> Any:
        require_settings()  # also those of later
        return (
            DiskStore(self.root, read_only=not writable)
            if self.is_local
            else self._objects.of(self.writer, self._lease)
        )

    # Groups

    def start_group(self, name: str) -> None:
        """Write an unfinished group: nothing below it is valid until `seal_group`."""
        self.write_bytes(_metadata(name), _UNFINISHED)

    def is_unfinished(self, name: str) -> bool:
        """Return whether `name` was started and never sealed. Nothing else looks like it, whatever byte is flipped."""
        return self.find_bytes(_metadata(name)) == _UNFINISHED

    def seal_group(self, name: str, attributes: dict[str, Any], arrays: list[str]) -> None:
        """Write the group's attributes with the digests of `arrays` and of itself.

        Raises:
            CacheError: one of the arrays is not there.
        """
        digests = {array: self._sha256(_metadata(f"{name}/{array}")) for array in arrays}
        if lost := [array for array, digest in digests.items() if not digest]:
            raise CacheError(f"{self.url}: '{name}/{lost[0]}' is gone; does another process write there?")
        blank = _group_json({**attributes, "arrays": digests, "digest": _BLANK})
        self.write_bytes(_metadata(name), blank.replace(_BLANK.encode(), hashlib.sha256(blank).hexdigest().encode()))

    def read_group(self, name: str) -> dict[str, Any]:
        """Return the attributes of the sealed group `name`; its ``arrays`` are the digests of its arrays by name.

        Raises:
            CacheError: the group is missing, unfinished or damaged.
        """
        raw = self.find_bytes(_metadata(name))
        if raw == _UNFINISHED:
            raise CacheError(f"{self.url}: '{name or '/'}' was never finished; run the same `xret extract` again")
        attributes, damage = self._inspect(name, raw)
        if damage:
            remedy = "extract into another --store"
            if "/" in name:
                remedy = f"remove the set with `xret cache rm {self.url} {name}` and extract it again"
            raise CacheError(f"{self.url}: {damage[0]}/zarr.json is damaged or missing; restore that file, or {remedy}")
        return {key: value for key, value in attributes.items() if key != "digest"}

    def inspect_group(self, name: str) -> tuple[dict[str, Any], list[str]]:
        """Return the group's attributes and the nodes (the group, its arrays) whose metadata is damaged."""
        return self._inspect(name, self.find_bytes(_metadata(name)))

    def _inspect(self, name: str, content: bytes | None) -> tuple[dict[str, Any], list[str]]:
        """Do the same for what was read of the group."""
        try:
            raw = (content or b"").decode()
            attributes = dict(parse_json(raw)["attributes"])
            if "digest" not in attributes:
                return attributes, [name]
            digest, arrays = attributes["digest"], dict(attributes["arrays"])
            blank = raw.replace(digest, _BLANK, 1) if len(digest) == len(_BLANK) else ""
        except (ValueError, KeyError, TypeError, AttributeError):
            return {}, [name]
        damaged = [] if hashlib.sha256(blank.encode()).hexdigest() == digest else [name]
        paths = {f"{name}/{array}".lstrip("/"): expected for array, expected in arrays.items()}
        return attributes, damaged + [path for path in paths if self._sha256(_metadata(path)) != paths[path]]

    def _sha256(self, name: str) -> str:
        data = self.find_bytes(name)
        return "" if data is None else hashlib.sha256(data).hexdigest()


def home_of(url: str | Path) -> tuple[str, int | None]:
    """Return a cache's URL, and the number of the generation that `url` names in it, if it names one."""
    found = _GENERATION.fullmatch(str(url))
    return (found[1], int(found[2])) if found else (str(url), None)


def gone(url: str) -> CacheError:
    """Return what is raised where a store's folder is no longer there while it is written."""
    return CacheError(f"{url} has gone while it was written; move it back, or name its new place")


def forbidden(path: str) -> CacheError:
    """Return what is raised for a file that may not be read; it is neither missing nor damaged."""
    return CacheError(f"{path} may not be read by you; have its owner allow it")


def _metadata(name: str) -> str:
    return f"{name}/zarr.json".lstrip("/")


def _group_json(attributes: dict[str, Any]) -> bytes:
    return json.dumps({"zarr_format": 3, "node_type": "group", "attributes": attributes}, indent=2).encode()


_UNFINISHED = _group_json({"unfinished": True})
