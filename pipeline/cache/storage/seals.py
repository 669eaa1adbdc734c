"""What binds the files of an array to their places.

A checksum says that a file is what was written, and not that it is where it was written: two files may have changed
places. So whoever writes an array writes down what these functions return, and whoever reads it compares.
"""

from itertools import product
from typing import Any

import google_crc32c
import numpy as np
import zarr


def is_apart(array: "zarr.Array[Any]") -> bool:
    """Return whether each step of an array's second axis, a view, has files of its own."""
    return array.ndim > 1 and (array.shards or array.chunks)[1] < array.shape[1]


def seals(array: "zarr.Array[Any]", shard: int, values: np.ndarray) -> list[int]:
    """Return what binds each file of a shard, with these values, to its place: one file, or one a view."""
    parts = [values[:, view] for view in range(values.shape[1])] if is_apart(array) else [values]
    rows = array.chunks[0]
    checksums = [[crc32c(part[at : at + rows]) for at in range(0, len(part), rows)] for part in parts]
    return [seal(array.path, shard, view, np.array(of_part)) for view, of_part in enumerate(checksums)]


def seal(name: str, shard: int, view: int, checksums: np.ndarray) -> int:
    """Return the crc32c of an array's name in its group, a place in it, and the blocks' checksums there, uint32."""
    place = f"{name.rpartition('/')[2]}/{shard}/{view}"
    return int(google_crc32c.value(place.encode() + checksums.astype("<u4").tobytes()))


def crc32c(data: np.ndarray) -> int:
    """Return the checksum of an array's bytes."""
    return int(google_crc32c.value(data.tobytes()))


def seal_of_file(name: str, values: np.ndarray, rows: int, number: int, before: int = 0) -> int:
    """Return the seal of one file of an array; `values` begin after `before` files."""
    part = values[number * rows : (number + 1) * rows]
    return seal(name, before + number, 0, np.array([crc32c(part)]))


def files_of(array: "zarr.Array[Any]", shard: int) -> list[str]:
    """Return the paths, below the store, of the files that hold one shard of an array: one, or one a view."""
    inner = (-(-axis // step) for axis, step in zip(array.shape[1:], (array.shards or array.chunks)[1:], strict=True))
    places = product([shard], *map(range, inner))
    return [f"{array.path}/c/" + "/".join(map(str, place)) for place in places]
