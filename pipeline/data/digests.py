"""Digests of content tell pictures and captions apart, whatever their names and places."""

import hashlib
import os
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
