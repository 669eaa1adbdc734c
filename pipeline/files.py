"""Files and folders appear whole, and are on the disk before anything says that they are there.

They are written beside their place, brought to the disk, renamed into it, and the name is brought to the disk. Whoever
returns from a function here may therefore count on what it wrote, also after a power failure; and what is written in a
certain order is there in that order. What a killed process leaves is called ``.NAME.XXXXXXXX.partial``: nobody reads
it, `partials` finds it, and `making`, `making_file` and `write_text` remove it when the same name is written again.
"""

import errno
import glob
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from .errors import OutputError, XretError


@contextmanager
def writing(path: Path, failure: type[XretError] | None = None, remedy: str = "") -> Iterator[Path]:
    """Give a temporary path beside `path`; the file or folder made there becomes `path` when the block ends.

    Missing folders above are made, a file at `path` is replaced in one step, and a link is followed. After an error
    nothing is left of what was written, and `path` is as it was. A device or a pipe is written in place.

    Args:
        path: of the file or folder.
        failure: raised, instead of OSError, when `path` cannot be written or is a folder that is not empty.
        remedy: what to do then; it ends the sentence.
    """
    place = path.resolve()
    partial = place.with_name(f".{place.name}.{os.urandom(4).hex()}.partial")
    try:
        if place.exists() and not (place.is_file() or place.is_dir()):
            yield place
            return
        with suppress(FileExistsError):  # a file above is reported where it is in the way
            make_folders(place.parent)
        yield partial
        _all_to_disk(partial)
        partial.replace(place)
        to_disk(place.parent)
    except BaseException as error:
        remove(partial)
        if failure is None or not isinstance(error, (OSError, SafetensorError)):
            raise
        reason = getattr(error, "strerror", None) or error
        raise failure(f"{path} cannot be written: {reason}{remedy and f'; {remedy}'}") from error


@contextmanager
def making(folder: Path, failure: type[XretError] | None = None, remedy: str = "") -> Iterator[Path]:
    """Give a new folder that becomes `folder`, which must be absent or empty, when the block ends; like `writing`.

    What killed processes left of `folder` is removed first. What a living one writes is locked, and stays.
    """
    with _claiming(folder, Path.mkdir, failure, remedy) as partial:
        yield partial


@contextmanager
def making_file(path: Path, failure: type[XretError] | None = None, remedy: str = "") -> Iterator[Path]:
    """Give an empty file, to be filled in its place, that becomes `path` when the block ends; else like `making`."""
    with _claiming(path, Path.touch, failure, remedy) as partial:
        yield partial


def write_bytes(path: Path, data: "bytes | bytearray | memoryview[int]") -> None:
    """Write a file in one step; errors of `writing`."""
    with writing(path) as partial:
        partial.write_bytes(data)


def link(source: Path, path: Path) -> None:
    """Let `path` be another name of the file `source`, or where the disk cannot do that a copy of it, in one step.

    Raises:
        OSError: there is no such file, or `path` cannot be written.
    """
    if path.exists() and path.samefile(source):  # a rename of one name of a file to another leaves both
        to_disk(path.parent)
        return
    with writing(path) as partial:
        try:
            os.link(source, partial)
        except FileNotFoundError:
            raise
        except OSError:
            shutil.copyfile(source, partial)


def write_text(path: Path, text: str, failure: type[XretError] | None = None, remedy: str = "") -> None:
    """Write a text as UTF-8 in one step, as `making_file` does; arguments and errors of `writing`."""
    with making_file(path, failure, remedy) as partial:
        partial.write_bytes(text.encode())


def partials(path: Path) -> list[Path]:
    """Return what killed writers of the file or folder `path` left beside it."""
    place = path.resolve()
    return list(place.parent.glob(f".{glob.escape(place.name)}.????????.partial"))


def partials_in(folder: Path) -> list[Path]:
    """Return what killed writers left in a folder and below it."""
    return list(folder.rglob("*.partial"))


def remove(path: Path) -> None:
    """Delete a file, or a folder and all below it, if it is there and can be deleted."""
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def remove_abandoned(partial: Path) -> None:
    """Delete what a process was writing, unless that process still lives, or nobody can tell."""
    with suppress(OSError):
        handle = os.open(partial, os.O_RDONLY)
        try:
            if _lock(handle, wait=False):
                remove(partial)
        finally:
            os.close(handle)


def make_folders(folder: Path) -> None:
    """Make a folder and those above it that are missing; FileExistsError where a file is in the way."""
    if folder.is_dir():
        return
    make_folders(folder.parent)
    folder.mkdir(exist_ok=True)  # another thread may have made it meanwhile
    to_disk(folder.parent)


def remove_whole(path: Path) -> None:
    """Delete a file or folder in one step: after a power failure it is there as it was, or not at all.

    Raises:
        OSError: it is not there or cannot be deleted.
    """
    partial = path.with_name(f".{path.name}.{os.urandom(4).hex()}.partial")
    path.rename(partial)
    to_disk(path.parent)
    remove(partial)


def to_disk(path: Path) -> None:
    """Have the system write a file, or a folder's list of names, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some file systems of a network cannot do that for folders
            raise
    finally:
        os.close(handle)


def _all_to_disk(path: Path) -> None:
    """Bring a file, or a folder and all below it, to the disk, for others to read as the umask says.

    Some libraries, as safetensors, make files that only their owner may read.
    """
    if path.is_symlink():
        return
    if path.is_dir():
        for below in list(path.iterdir()):
            _all_to_disk(below)
    else:
        mode = stat.S_IMODE(path.stat().st_mode)
        if not mode & 0o077:
            path.chmod(mode | _usual_mode(path))
    to_disk(path)


@contextmanager
def _claiming(path: Path, make: Callable[[Path], None], failure: type[XretError] | None, remedy: str) -> Iterator[Path]:
    for left in partials(path):
        remove_abandoned(left)
    with ExitStack() as held, writing(path, failure, remedy) as partial:
        if partial.exists():  # a device or a pipe
            yield partial
            return
        while True:
            make(partial)
            with suppress(FileNotFoundError):
                _hold(partial, held, wait=True)
            if os.path.lexists(partial):  # else another process took it for abandoned before it was locked
                break
        yield partial
        _hold(partial, held, wait=False)  # safetensors puts a file of its own there


def _hold(partial: Path, held: ExitStack, *, wait: bool) -> None:
    """Lock what is written until `held` ends."""
    handle = os.open(partial, os.O_RDONLY)
    held.callback(os.close, handle)
    _lock(handle, wait=wait)


def _lock(handle: int, *, wait: bool) -> bool:
    """Lock an open file or folder until it is closed, also by a kill; return whether it is locked now."""
    try:
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except (ImportError, OSError):  # another system, a file system without locks, or another process has it
        return False
    return True


def _usual_mode(path: Path) -> int:
    """Return the mode of a new file beside `path`; to ask for the umask would change it for other threads."""
    probe = path.with_name(f".{path.name}.{os.urandom(4).hex()}.partial")
    try:
        probe.touch()
        return stat.S_IMODE(probe.stat().st_mode)
    finally:
        remove(probe)


@contextmanager
def locked(folder: str | Path, busy: Exception) -> Iterator[None]:
    """Lock an existing folder; the system unlocks it however the process ends.

    Args:
        folder: which.
        busy: raised if another process or thread has locked it.
    """
    import fcntl

    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise busy from error
        yield
    finally:
        os.close(handle)


def require_writable(path: Path, option: str) -> None:
    """Refuse a path at which nothing can be written; folders above it may be missing.

    Args:
        path: the file or folder to write.
        option: the option that names it, for the message.

    Raises:
        OutputError: a file or a broken link is in the way, or the nearest existing folder may not be written to.
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
    """Refuse an ``--out`` that exists already or cannot be written; `folder`: it will be a folder, not a file.

    Raises:
        OutputError: something exists there, or nothing can be written there.
    """
    if path.is_dir() and not folder:
        raise OutputError(f"{path} is a folder, and a file is written; name a new file in it as --out")
    if path.exists():
        raise OutputError(f"{path} exists already; name another --out, or remove it")
    require_writable(path, "--out")
