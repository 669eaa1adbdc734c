"""Groups and arrays of a store as Zarr keeps them: uncompressed chunks with checksums, and sealed metadata."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import google_crc32c
import zarr
from zarr.codecs import Crc32cCodec

from .folder import Folder


def create_array(
    group: zarr.Group,
    name: str,
    dimensions: tuple[str, ...],
    shape: tuple[int, ...],
    rows: int,
    dtype: str,
    fill: float = 0,
) -> "zarr.Array[Any]":
    """Create an array, uncompressed, each chunk of so many rows with a crc32c."""
    return group.create_array(
        name,
        shape=shape,
        chunks=(max(1, rows), *shape[1:]),
        dtype=dtype,
        fill_value=fill,
        filters=None,
        compressors=[Crc32cCodec()],
        chunk_key_encoding={"name": "default", "separator": "."},
        dimension_names=dimensions,
        config={"write_empty_chunks": True},
        overwrite=True,
    )


def seal(folder: Folder, group: zarr.Group, attributes: Mapping[str, Any]) -> None:
    """Write a group's attributes, which mark it as whole, with a checksum of its metadata and its arrays'."""
    arrays = list(attributes.get("arrays", ()))
    folder.sync([group.path, *(f"{group.path}/{name}".lstrip("/") for name in arrays)])
    with folder.answering():
        group.attrs.put({**attributes, "checksum": 0})
    name = f"{group.path}/zarr.json".lstrip("/")
    number = checksum(folder, group.path, arrays)
    folder.write(name, (folder.read(name) or b"").replace(b'"checksum": 0', b'"checksum": %d' % number))


def checksum(folder: Folder, path: str, arrays: Sequence[str]) -> int:
    """Return the crc32c of the metadata of a group, its own checksum blanked, and of these arrays of its."""
    files = [folder.read("/".join(filter(None, (path, name, "zarr.json")))) or b"" for name in ("", *arrays)]
    files[0] = re.sub(rb'"checksum": \d+', b'"checksum": 0', files[0])
    return int(google_crc32c.value(b"\0".join(files)))
