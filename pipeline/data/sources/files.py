"""The files that a source lies in: local paths or fsspec URLs, their sizes and stamps."""

import itertools
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from glob import glob
from pathlib import Path
from typing import Any, BinaryIO, cast

import fsspec

from ...errors import ManifestError
from ...wording import in_bytes, reason

_MOST = 1_000_000  # files that a pattern may name
_AT_ONCE = 32  # files that are looked at together: each may be a request to an object store
_STAMPS = ("ETag", "etag", "mtime", "LastModified", "updated", "created")  # by which file systems tell a change


@dataclass(frozen=True, slots=True)
class File:
    """A file as it was when it was looked through: its name as the manifest has it, its bytes, and its stamp.

    The stamp is the file system's ETag, else the time of its last change.
    """

    name: str
    size: int
    stamp: str


def find_files(folder: str | Path, pattern: str) -> list[File]:
    """Return the files that a pattern names: ``{000..127}`` and ``{a,b}`` in their order, ``*`` in that of the names.

    Args:
        folder: where relative names start.
        pattern: a local path or an fsspec URL.

    Raises:
        ManifestError: a file is missing or cannot be read, or none fits.
    """
    return look_at_all(folder, itertools.chain.from_iterable(_matching(folder, one) for one in expand(pattern)))


def expand(pattern: str) -> list[str]:
    """Expand the braces of a pattern.

    >>> expand("{train,val}-{08..10}.tar")
    ['train-08.tar', 'train-09.tar', 'train-10.tar', 'val-08.tar', 'val-09.tar', 'val-10.tar']
    """
    parts: list[list[str]] = []
    for number, text in enumerate(re.split(r"\{([^{}]*)\}", pattern)):
        span = re.fullmatch(r"([0-9]{1,9})\.\.([0-9]{1,9})", text) if number % 2 else None
        if span:
            first, last, digits = int(span[1]), int(span[2]), len(span[1])
            if last - first >= _MOST:
                raise ManifestError(f"{pattern}: it names more than {_MOST:,} files; correct it.")
            parts.append([f"{one:0{digits}d}" for one in range(first, last + 1)])
        else:
            parts.append(text.split(",") if number % 2 else [text])
    return ["".join(chosen) for chosen in itertools.islice(itertools.product(*parts), _MOST)]


def look_at(folder: str | Path, name: str) -> File:
    """Return the size and stamp that a file has now; ManifestError where there is none."""
    url = url_of(folder, name)
    try:
        fs, path = fsspec.core.url_to_fs(url)
        fs.invalidate_cache(path)  # a listing of before would hide a change
        info: dict[str, Any] = fs.info(path)
        size = info["size"]
    except Exception as error:  # whatever a file system raises
        raise _unreadable(url, error) from error
    if info["type"] != "file" or not isinstance(size, int):
        raise ManifestError(f"{url}: this is no file; name files.")
    stamp = next((info[key] for key in _STAMPS if info.get(key)), "")
    if isinstance(stamp, float):
        stamp = datetime.fromtimestamp(stamp, UTC)
    return File(name, size, stamp.isoformat() if isinstance(stamp, datetime) else str(stamp))


def look_at_all(folder: str | Path, names: Iterable[str]) -> list[File]:
    """Return the sizes and stamps that files have now, in the order of their names; errors as of `look_at`."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(partial(look_at, folder), names))


def open_file(folder: str | Path, file: File) -> BinaryIO:
    """Open a file for reading at any place.

    Raises:
        ManifestError: it is missing, cannot be read, or is no longer the file that was looked through.
    """
    url = url_of(folder, file.name)
    require_same(folder, file, look_at(folder, file.name))
    try:
        if not is_url(url):
            return Path(url).open("rb")
        fs, path = fsspec.core.url_to_fs(url)
        return cast(BinaryIO, fs.open(path, "rb"))
    except Exception as error:
        raise _unreadable(url, error) from error


def require_same(folder: str | Path, file: File, now: File) -> None:
    """Refuse a file that has changed."""
    if now != file:
        how = ", or copy it with its time (cp -p, rsync -t)" if now.size == file.size else ""
        raise ManifestError(
            f"{url_of(folder, file.name)}: it has changed since it was looked through ({in_bytes(file.size)} of"
            f" {file.stamp} then, {in_bytes(now.size)} of {now.stamp} now); put the file back{how}, or extract again"
            " with --update."
        )


def url_of(folder: str | Path, name: str) -> str:
    """Return the path or URL of a file; an absolute name and a URL stay as they are."""
    return name if is_url(name) else str(Path(folder, name))


def is_url(name: str) -> bool:
    """Return whether a name is an fsspec URL."""
    return "://" in name or "::" in name


def read_all(folder: str | Path, file: File) -> bytes:
    """Return the content of a small file; errors as of `open_file`."""
    with open_file(folder, file) as opened:
        return opened.read()


def _matching(folder: str | Path, name: str) -> Iterable[str]:
    if not re.search(r"[*?\[]", name):
        return [name]
    url = url_of(folder, name)
    try:
        if is_url(name):
            fs, path = fsspec.core.url_to_fs(url)
            found = [name] if fs.isfile(path) else [fs.unstrip_protocol(one) for one in sorted(fs.glob(path))]
        else:
            there = glob(name, root_dir=folder, recursive=True)  # noqa: PTH207 -- names may be absolute
            found = [name] if Path(url).is_file() else sorted(str(Path(one)) for one in there)
    except Exception as error:
        raise _unreadable(url, error) from error
    if not found:
        raise ManifestError(f"{url}: no file fits this; correct the manifest, or give its folder as --data-root.")
    return found


def _unreadable(url: str, error: Exception) -> ManifestError:
    if isinstance(error, FileNotFoundError):
        return ManifestError(f"{url}: there is no such file; correct the manifest, or give its folder as --data-root.")
    why = getattr(error, "strerror", None) or reason(error)
    return ManifestError(f"{url}: this cannot be read ({why}); correct the manifest, or restore the file.")
