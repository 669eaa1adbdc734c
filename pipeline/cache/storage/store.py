"""Where a cache lies: Zarr arrays with checksums, and group metadata that carries its own digest.

Zarr checks the bytes of a chunk (crc32c), but nobody checks its JSON metadata. Every group of a cache therefore
lists the SHA-256 of its arrays' metadata and seals itself: its attribute `digest` is the SHA-256 of the group's own
`zarr.json` with that digest blanked. A group that is being made says so in exactly one way, which no damage imitates.
"""

import hashlib
import json
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np
import zarr
from zarr.codecs import Crc32cCodec

from ...documents import parse_json
from ...errors import CacheError, StoreError
from ...versions import require_settings
from .folder import Folder, forbidden, gone
from .seals import is_apart, seal_of_file
from .zarr_stores import DiskStore

_BLANK = "0" * 64


class Store(Folder):
    """A cache's folder with its Zarr arrays and groups; see `Folder`."""

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

    def was_finished(self) -> bool:
        """Return whether there is a cache with samples; its feature sets may be incomplete."""
        return self.exists("zarr.json") and not self.is_unfinished("") and not self.is_unfinished("samples")

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
                remedy = f"remove the set with `xret cache rm {quote(self.url)} {name}` and extract it again"
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


def _metadata(name: str) -> str:
    return f"{name}/zarr.json".lstrip("/")


def _group_json(attributes: dict[str, Any]) -> bytes:
    return json.dumps({"zarr_format": 3, "node_type": "group", "attributes": attributes}, indent=2).encode()


_UNFINISHED = _group_json({"unfinished": True})
