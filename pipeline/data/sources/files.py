"""The files of a source: local paths or fsspec URLs, their sizes and stamps."""

import itertools
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from glob import glob
from pathlib import Path
from typing import Any

import fsspec
from fsspec.utils import glob_translate

from ...documents import reading
from ...errors import ManifestError
from ...files import walk

_AT_ONCE = 32  # files that are looked at together: each may be a request to an object store
_STAMPS = ("ETag", "etag", "mtime", "LastModified", "updated", "created")  # by which file systems tell a change
_RESTORE = "correct the manifest, or give its folder as --data-root"


@dataclass(frozen=True, slots=True)
class File:
    """A file when it was read: its name in the manifest, its bytes, and its ETag or the time of its last change."""

    name: str
    size: int
    stamp: str


def find_files(folder: str | Path, pattern: str) -> list[File]:
    """Return the files that a pattern names: ``{000..127}`` and ``{a,b}`` in their order, ``*`` in that of the names.

    A pattern is a local path, relative to `folder`, or an fsspec URL. ManifestError: a file is missing or cannot be
    read, or none fits.
    """
    return look_at_all(folder, [name for one in expand(pattern) for name in _matching(folder, one)])


def look_at_all(folder: str | Path, names: Iterable[str]) -> list[File]:
    """Return the sizes and stamps that files have now; ManifestError where one is missing."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(partial(look_at, folder), names))


def look_at(folder: str | Path, name: str) -> File:
    """Return the size and stamp that a file has now; ManifestError where there is none."""
    url = url_of(folder, name)
    with reading(url, _RESTORE, Exception):
        fs, path = file_system(url)
        fs.invalidate_cache(path)  # an earlier listing would hide a change
        info: dict[str, Any] = fs.info(path)
    if info["type"] != "file":
        raise ManifestError(f"{url}: this is not a file; name files.")
    return File(name, info["size"], str(next((info[key] for key in _STAMPS if info.get(key)), "")))


def expand(pattern: str) -> list[str]:
    """Expand the braces of a pattern.

    >>> expand("{train,val}-{08..10}.tar")
    ['train-08.tar', 'train-09.tar', 'train-10.tar', 'val-08.tar', 'val-09.tar', 'val-10.tar']
    """
    parts: list[list[str]] = []
    for number, text in enumerate(re.split(r"\{([^{}]*)\}", pattern)):
        span = re.fullmatch(r"(\d{1,9})\.\.(\d{1,9})", text) if number % 2 else None
        if span:
            first, last = int(span[1]), int(span[2])
            numbers = range(first, last + 1) if first <= last else range(first, last - 1, -1)
            parts.append([f"{one:0{len(span[1])}d}" for one in numbers])
        else:
            parts.append(text.split(",") if number % 2 else [text])
    return ["".join(chosen) for chosen in itertools.product(*parts)]


def url_of(folder: str | Path, name: str) -> str:
    """Return the path or URL of a file; an absolute name and a URL stay as they are."""
    return name if is_url(name) else str(Path(folder, name))


def is_url(name: str) -> bool:
    """Return whether a name is an fsspec URL."""
    return "://" in name


def file_system(url: str) -> tuple[Any, str]:
    """Return the fsspec file system of a path or URL, and its name there; ``::`` in a local path is part of a name."""
    if is_url(url):
        return fsspec.core.url_to_fs(url)  # type: ignore[no-any-return]
    return fsspec.filesystem("file"), str(Path(url).absolute())


def _below(folder: str | Path, pattern: str) -> Iterator[str]:
    """Yield what `glob` does of a pattern with ``**``; but of folders that are links, `glob` finds no end in a loop."""
    parts = Path(pattern).parts
    top = Path(*itertools.takewhile(lambda part: not re.search(r"[*?\[]", part), parts))
    fits = re.compile(glob_translate("/".join(parts[len(top.parts) :]))).match
    for above, _, names in walk(Path(folder, top)):
        below = Path(above).relative_to(Path(folder, top))
        for found in (below / name for name in names):
            if fits(found.as_posix()) and not any(part[0] == "." for part in found.parts if f"/{part}" not in pattern):
                yield str(top / found)


def _matching(folder: str | Path, name: str) -> list[str]:
    if not re.search(r"[*?\[]", name):
        return [name]
    with reading(name, _RESTORE, Exception):
        if is_url(name):
            fs, path = file_system(name)
            found = [fs.unstrip_protocol(one) for one in sorted(fs.glob(path))]
        else:
            found = sorted(_below(folder, name) if "**" in name else glob(name, root_dir=folder))  # noqa: PTH207
    if not found:
        raise ManifestError(f"{url_of(folder, name)}: no file fits this; {_RESTORE}.")
    return found
