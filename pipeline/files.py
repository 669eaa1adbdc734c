"""Places to write to are looked at before the work begins, not when it is done."""

import os
from pathlib import Path

from .errors import OutputError


def require_writable(path: Path, option: str) -> None:
    """Refuse a path at which nothing can be written; folders above it may be missing, they are made when it is.

    Args:
        path: of the file or folder to write.
        option: that names it, for the message.

    Raises:
        OutputError: a file or a broken link is in its way, or the nearest folder that is there may not be written.
    """
    # Not `Path.exists`, which raises where a folder above may not be searched.
    there = next(place for place in (path, *path.absolute().parents) if os.path.lexists(place))
    if not there.exists():
        raise OutputError(f"{there} is a link to nothing; remove it, or choose another {option}")
    if there != path and not there.is_dir():
        raise OutputError(f"{path} cannot be made, because {there} is a file; choose another {option}")
    if not os.access(there, os.W_OK | (os.X_OK if there.is_dir() else 0)):
        raise OutputError(f"{path} cannot be written: you may not write to {there}; choose another {option}")


def require_new(path: Path, *, folder: bool) -> None:
    """Refuse an ``--out`` that is there already, or cannot be written.

    Args:
        path: of what shall be made.
        folder: whether that is a folder, or a file.

    Raises:
        OutputError: something is there, or nothing can be written there.
    """
    if path.is_dir() and not folder:
        raise OutputError(f"{path} is a folder, and a file is written; name a new file in it as --out")
    if path.exists():
        raise OutputError(f"{path} exists already; name another --out, or remove it")
    require_writable(path, "--out")
