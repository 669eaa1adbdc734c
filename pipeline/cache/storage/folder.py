"""The files of a cache by their names: below a folder of a disk, or the objects of an fsspec URL."""

import os
import re
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import fsspec
from fsspec.asyn import AsyncFileSystem, sync

from ...errors import CacheError
from ...files import link, remove_whole, write_bytes
from ...versions import note_version, require_settings
from .zarr_stores import LEASE, connect, on_condition, one_sentence, require_holder

PATIENCE = 60.0  # seconds that an object store may take to say whether something exists, with all retries
_LOCAL = ("file", "local")
GENERATIONS = "generations"  # in a cache's folder; see `generations`
_GENERATION = re.compile(rf"(.+)/{GENERATIONS}/([1-9][0-9]*)")


class Folder:
    """A cache's folder at a local path, or an fsspec URL such as ``s3://bucket/coco.zarr``.

    Attributes:
        writer: on an object store, who writes; each write then asks first whether the lease is still theirs.
    """

    def __init__(self, url: str, writer: str | None = None) -> None:
        note_version("zarr")
        require_settings()
        self.url, self.writer = _plain(url), writer
        if not self.url:
            raise CacheError("the name of the store is empty; give a local path or an fsspec URL")
        try:
            self.fs, self.root = fsspec.core.url_to_fs(self.url)
        except (ValueError, ImportError) as error:
            raise CacheError(
                f"{url} cannot be a store ({str(error).rstrip('.')}); give a local path, or a URL that fsspec can write"
            ) from error
        self.is_local = not isinstance(self.fs.protocol, str) and self.fs.protocol[0] in _LOCAL
        if not self.is_local:
            self.fs, self._objects = connect(self.url, os.getpid())

    @cached_property
    def _lease(self) -> str:
        """Where the lease is; whoever writes a generation holds that of the whole cache."""
        number = home_of(self.url)[1]
        return f"{self.root.removesuffix(f'/{GENERATIONS}/{number}')}/{LEASE}"

    @property
    def absolute_url(self) -> str:
        """The URL, good in any working folder."""
        return str(self.root) if self.is_local else self.url

    def path(self, name: str) -> str:
        """Return the full path of `name` below the store."""
        return f"{self.root}/{name}" if name else self.root

    def exists(self, name: str) -> bool:
        """Return whether a file or folder `name` is there.

        Raises:
            StoreError: as all methods here, an object store does not answer, or wants credentials.
        """
        with self._answering():
            if isinstance(self.fs, AsyncFileSystem):
                return bool(sync(self.fs.loop, self.fs._exists, self.path(name), timeout=PATIENCE))
            return bool(self.fs.exists(self.path(name)))

    def is_written(self, name: str) -> bool:
        """Return whether there is a file `name` that is not empty."""
        with self._answering():
            try:
                info = self.fs.info(self.path(name))
            except (FileNotFoundError, NotADirectoryError):
                return False
        return bool(info["type"] == "file" and info["size"] > 0)

    def names(self, name: str) -> list[str]:
        """Return the names directly below the folder `name`, sorted, without partial files; none if it is absent."""
        if not self.exists(name):
            return []
        with self._answering():
            entries = (Path(entry).name for entry in self.fs.ls(self.path(name), detail=False))
            return sorted(entry for entry in entries if not entry.endswith(".partial"))

    def remove(self, name: str) -> None:
        """Delete the file or folder `name` and all below it, if it is there; on a disk in one step."""
        self._require_lease()
        if not self.exists(name):
            return
        if self.is_local:
            remove_whole(Path(self.path(name)))
            return
        with self._answering():
            self.fs.rm(self.path(name), recursive=True)

    def read_bytes(self, name: str) -> bytes:
        """Return the content of the file `name`.

        Raises:
            CacheError: it is missing, or a disk cannot read it.
        """
        data = self.find_bytes(name)
        if data is None:
            raise CacheError(f"{self.url}: '{name}' is missing; `xret cache verify` lists what is affected")
        return data

    def find_bytes(self, name: str) -> bytes | None:
        """Return the content of the file `name`; None where there is none, or a disk cannot read it."""
        with self._answering():
            try:
                return bytes(self.fs.cat_file(self.path(name)))
            except FileNotFoundError:
                return None
            except OSError as error:
                if not self.is_local:
                    raise
                if isinstance(error, PermissionError):
                    raise forbidden(self.path(name)) from error
                return None  # damaged, for whoever asks

    def write_bytes(self, name: str, data: bytes) -> None:
        """Write the file `name` in one step: it is there whole, or as it was before."""
        if self.is_local:
            write_bytes(Path(self.path(name)), data)
            return
        self._require_lease()
        with self._answering():
            self.fs.pipe_file(self.path(name), data)

    def link(self, name: str, there: "Folder", source: str) -> None:
        """Let `name` be what `source` is in `there`, a store on the same file system, in one step.

        Of a disk both share the bytes where it can do that; else they are copied.

        Raises:
            FileNotFoundError: there is no such file.
        """
        if self.is_local:
            link(Path(there.path(source)), Path(self.path(name)))
            return
        self._require_lease()
        if not there.is_written(source):
            raise FileNotFoundError(there.path(source))
        with self._answering():
            self.fs.cp_file(there.path(source), self.path(name))

    def create_bytes(self, name: str, data: bytes) -> bool:
        """Write the file `name` of an object store unless there is one; return whether it now holds `data`."""
        return self._write_if(name, data, mode="create")

    def replace_bytes(self, name: str, before: bytes, data: bytes) -> bool:
        """Write the file `name` of an object store if it begins with `before`; return whether it now holds `data`.

        On S3 nothing is overwritten that another writes meanwhile; other object stores have no such condition.
        """
        on_s3 = "s3" in self.fs.protocol
        with self._answering():
            try:
                tag = self.fs.info(self.path(name))["ETag"] if on_s3 else None
            except FileNotFoundError:
                return False
        # Read after the tag: what is there now may be newer, and then nothing is written.
        held = self.find_bytes(name)
        if held is None or not held.startswith(before):
            return False
        return self._write_if(name, data, **({"IfMatch": tag} if on_s3 else {}))

    def _write_if(self, name: str, data: bytes, **condition: Any) -> bool:
        with self._answering():
            try:
                self.fs.pipe_file(self.path(name), data, **condition)
            except OSError as error:
                if not on_condition(error):
                    raise
                return self.find_bytes(name) == data  # the first of two attempts may have got through
        return True

    def _require_lease(self) -> None:
        if self.writer is not None:
            with self._answering():
                try:
                    held = bytes(self.fs.cat_file(self._lease))
                except FileNotFoundError:
                    held = None
            require_holder(self.url, self.writer, held)

    def size(self, name: str) -> int:
        """Return the bytes of all files below `name`."""
        if not self.exists(name):
            return 0
        with self._answering():
            # Names and sizes at once: a file that is still written beside its place may go between two looks.
            return sum(entry.get("size", 0) for entry in self.fs.find(self.path(name), detail=True).values())

    def _answering(self) -> AbstractContextManager[None]:
        return nullcontext() if self.is_local else one_sentence(self.url)


def home_of(url: str | Path) -> tuple[str, int | None]:
    """Return a cache's URL, and the number of the generation that `url` names in it, if it names one.

    ``generations/N`` is a folder as any other where the one that it lies in is no cache.
    """
    plain = _plain(url)
    found = _GENERATION.fullmatch(plain)
    if found:
        home = Folder(found[1])
        if home.exists("zarr.json") or home.exists(f"{GENERATIONS}/zarr.json"):
            return home.url, int(found[2])
    return plain, None


def _plain(url: str | Path) -> str:
    """Return a URL without slashes at its end; the root of a file system keeps its own."""
    plain = str(url).rstrip("/")
    return str(url) if plain == "" or plain.endswith(":") else plain


def gone(url: str) -> CacheError:
    """Return what is raised where a store's folder is no longer there while it is written."""
    return CacheError(f"{url} has gone while it was written; move it back, or name its new place")


def forbidden(path: str) -> CacheError:
    """Return what is raised for a file that may not be read; it is neither missing nor damaged."""
    return CacheError(f"{path} may not be read by you; have its owner allow it")
