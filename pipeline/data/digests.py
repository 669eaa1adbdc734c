"""Digests of content tell pictures apart, whatever their names and places; stamps say which may have changed."""

import hashlib
import os
import stat
from pathlib import Path

from ..errors import SampleError
from .images import PictureFile, frame_names, read_picture

BYTES = 16  # of a digest
NONE = bytes(BYTES)  # of a file that cannot be read


def digest(data: bytes) -> bytes:
    """Return the BLAKE2b of some bytes, 16 bytes."""
    return hashlib.blake2b(data, digest_size=BYTES).digest()


def digest_of(picture: PictureFile | Path) -> bytes:
    """Return the digest of a file's bytes; for a folder, of its frames' names and digests; `NONE`: it is unreadable."""
    if isinstance(picture, PictureFile):
        return digest(picture.getvalue())
    try:
        frames = frame_names(picture)
        return digest(b"".join(os.fsencode(name) + b"\0" + digest_of(read_picture(picture / name)) for name in frames))
    except SampleError:
        return NONE


def stamp_of(picture: Path) -> tuple[int, int]:
    """Return a file's bytes and the nanoseconds of its last change; for a folder, the frames' sum and latest.

    Zeros: it cannot be read.
    """
    try:
        status = picture.stat()
        if not stat.S_ISDIR(status.st_mode):
            return status.st_size, status.st_mtime_ns
        frames = [(picture / name).stat() for name in frame_names(picture)]
        return sum(one.st_size for one in frames), max(one.st_mtime_ns for one in frames)
    except (OSError, ValueError, SampleError):
        return 0, 0
