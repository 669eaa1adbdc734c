"""Files and folders appear whole, and are on the disk before anything says that they are there.

They are written beside their place, synced, renamed into it, and the folder's list of names is synced: after a kill or
a power failure there is the old content or the new one, and what was written in a certain order is there in that order.
A killed process leaves ``.NAME.XXXXXXXX.partial``, which is never read; the next writer of that name removes it.
"""

import errno
import fcntl
import glob
import logging
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from .errors import CacheError, OutputError, RunError, XretError

_without_locks = set[int]()  # devices that were named

log = logging.getLogger("xret")


def walk(
    folder: Path, onerror: Callable[[OSError], object] | None = None
) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield what `os.walk` does, and also goes into folders that are links: each real folder once.

    A folder that is reached in several ways has its own path, if that is below `folder`.
    """
    seen, left = set(), [str(folder)]
    while left:
        for path, folders, names in os.walk(left.pop(0), onerror=onerror):
            if (real := Path(path).resolve()) in seen:
                folders.clear()
                continue
            seen.add(real)
            yield path, folders, names
            left += sorted(str(below) for name in folders if (below := Path(path, name)).is_symlink())


@contextmanager
def writing(
    path: Path, failure: type[XretError] | None = None, remedy: str = "", make: Callable[[Path], None] | None = None
) -> Iterator[Path]:
    """Give a temporary path beside `path`; the file or folder made there becomes `path` when the block ends.

    A file is replaced in one step; a folder must be absent or empty. Missing folders above are made, a link is
    followed, and a device or a pipe is written in place. After an error nothing is left of what was written; if `path`
    cannot be written it is a `failure`, whose sentence ends with the `remedy`, instead of OSError.

    `make` makes the temporary file or folder, which is then locked; what killed writers of `path` left is removed.
    """
    place = path.resolve()
    partial = beside(place)
    try:
        if place.exists() and not (place.is_file() or place.is_dir()):
            yield place
            return
        with suppress(FileExistsError):  # a file above is reported where it is in the way
            make_folders(place.parent)
        with ExitStack() as held:
            if make is not None:
                for left in partials(place):
                    with suppress(OSError), locked(left, strict=True):  # a living writer holds the lock
                        remove(left)
                make(partial)
                with suppress(OSError):  # a file system without locks
                    held.enter_context(locked(partial, strict=True))
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


def making(folder: Path, failure: type[XretError] | None = None, remedy: str = "") -> AbstractContextManager[Path]:
    """Give a new folder that becomes `folder` when the block ends; arguments and errors of `writing`."""
    return writing(folder, failure, remedy, Path.mkdir)


def making_file(path: Path, failure: type[XretError] | None = None, remedy: str = "") -> AbstractContextManager[Path]:
    """Give an empty file that becomes `path` when the block ends; arguments and errors of `writing`."""
    return writing(path, failure, remedy, Path.touch)


def write_text(path: Path, text: str, failure: type[XretError] | None = None, remedy: str = "") -> None:
    """Write a text as UTF-8 in one step; arguments and errors of `writing`."""
    with making_file(path, failure, remedy) as partial:
        partial.write_bytes(text.encode())


def partials(path: Path) -> list[Path]:
    """Return what killed writers of the file or folder `path` left beside it."""
    place = path.resolve()
    return list(place.parent.glob(f".{glob.escape(place.name)}.????????.partial"))


def remove(path: Path) -> None:
    """Delete a file, or a folder and all below it, if it is there and can be deleted."""
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def remove_whole(path: Path) -> None:
    """Delete a file or folder in one step: after a power failure it is there as it was, or not at all."""
    partial = beside(path)
    path.rename(partial)
    to_disk(path.parent)
    remove(partial)


def to_disk(path: Path) -> None:
    """Sync a file, or a folder's list of names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot sync folders
            raise
    finally:
        os.close(handle)


def beside(path: Path) -> Path:
    """Return a temporary name beside a path."""
    return path.with_name(f".{path.name}.{os.urandom(4).hex()}.partial")


def make_folders(folder: Path) -> None:
    """Make a folder and those above that are missing, and bring their names to the disk."""
    if not folder.is_dir():
        make_folders(folder.parent)
        folder.mkdir(exist_ok=True)  # another thread may have made it meanwhile
        to_disk(folder.parent)


@contextmanager
def locked(
    path: str | Path, busy: Exception | None = None, how: int = fcntl.LOCK_EX | fcntl.LOCK_NB, *, strict: bool = False
) -> Iterator[int]:
    """Lock an existing file or folder as `fcntl.flock` does, and give its descriptor.

    The system unlocks it however the process ends. `busy` is raised, or else BlockingIOError, if another process or
    thread has locked it and `how` does not wait. A file system without locks is named once; `strict`: it is an OSError.
    """
    path = Path(path).resolve()
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)  # NFS locks files that are open for writing
    try:
        try:
            fcntl.flock(handle, how)
        except BlockingIOError as error:
            raise busy or error from error
        except OSError as error:
            if strict:
                raise
            if (device := os.fstat(handle).st_dev) not in _without_locks:
                _without_locks.add(device)
                way = "let only one process write there at a time"
                log.warning("%s: its file system has no locks (%s); %s", path, error.strerror, way)
        yield handle
    finally:
        os.close(handle)


def require_store(url: str | Path) -> None:
    """Raise CacheError where a local path holds no feature store; this imports no library."""
    if "://" not in str(url) and not Path(url, "zarr.json").exists():
        raise no_store(url)


def no_store(url: str | Path) -> CacheError:
    """Return the error that says that there is no feature store."""
    path = Path(url)
    if "://" in str(url) or not path.exists():
        return CacheError(f"{url}: there is no feature store; check the path, or run `xret extract … --store {url}`")
    if path.is_dir() and not any(path.glob("[!.]*")):
        return CacheError(f"{url} holds nothing yet; run `xret extract … --store {url}`, again if it was stopped")
    return CacheError(f"{url} is no feature store; name the folder that `xret extract … --store` wrote")


def require_run(path: str | Path) -> None:
    """Raise RunError where a folder is no run; this imports no library."""
    folder = Path(path)
    if (folder / "run.json").is_file():
        return
    inside = next(folder.glob("[!.]*/run.json"), None) or next(folder.glob("[!.]*/*/run.json"), None)
    way = f"make one with `xret train-head … --out {path}`"
    if folder.exists():
        way = "name the folder of a run" + ("" if inside is None else f", such as {inside.parent}")
    elif re.fullmatch(r"[\w.]+:\w+", str(path)):
        way = "a model of your own is given in Python, to xret.evaluate or xret.load"
    raise RunError(f"{path} is no run: it has no run.json; {way}")


def require_writable(path: Path, option: str) -> None:
    """Raise OutputError where nothing can be written at `path`; `option` names it in the message."""
    # `Path.exists` raises where a folder above may not be searched.
    there = next(place for place in (path, *path.absolute().parents) if os.path.lexists(place))
    if not there.exists():
        raise OutputError(f"{there} is a link to nothing; remove it, or choose another {option}")
    if there != path and not there.is_dir():
        raise OutputError(f"{path} cannot be made, because {there} is a file; choose another {option}")
    if not os.access(there, os.W_OK | (os.X_OK if there.is_dir() else 0)):
        raise OutputError(f"{path} cannot be written: permission denied: {there}; choose another {option}")


def require_new(path: Path, *, folder: bool) -> None:
    """Raise OutputError for an ``--out`` that exists or cannot be written; `folder`: it will be one, not a file."""
    if path.is_dir() and not folder:
        raise OutputError(f"{path} is a folder, and a file is written; name a new file in it as --out")
    if path.exists():
        raise OutputError(f"{path} exists already; name another --out, or remove it")
    require_writable(path, "--out")


def _all_to_disk(path: Path) -> None:
    """Sync a file, or a folder and all below it; the umask says who may read them."""
    if path.is_symlink():
        return
    if path.is_dir():
        for below in list(path.iterdir()):
            _all_to_disk(below)
    elif not stat.S_IMODE(path.stat().st_mode) & 0o077:  # safetensors lets only the owner read its files
        probe = beside(path)  # to ask for the umask would change it for other threads
        probe.touch()
        path.chmod(stat.S_IMODE(probe.stat().st_mode))
        remove(probe)
    to_disk(path)
