"""What tells pictures and captions apart, whatever their names and places: a digest of their content."""

import hashlib
import stat
from pathlib import Path

from ..errors import SampleError
from .images import MOST_BYTES, frame_names

BYTES = 16  # of a digest
NONE = bytes(BYTES)  # of what cannot be read


def digest(data: bytes) -> bytes:
    """Return the BLAKE2b of some bytes, 16 bytes."""
    return hashlib.blake2b(data, digest_size=BYTES).digest()


def digest_of(path: Path) -> bytes:
    """Return the digest of a file's bytes; of a folder, of its frames' names and digests; `NONE`: it cannot be read."""
    try:
        if path.is_dir():
            return digest(b"".join(name.encode() + b"\0" + digest_of(path / name) for name in frame_names(path)))
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > MOST_BYTES:
            return NONE
        with path.open("rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=BYTES)).digest()
    except (OSError, SampleError, UnicodeEncodeError):
        return NONE
