"""The stores that Zarr reads and writes: a folder of a disk, or an object store through fsspec.

To an object store we have a connection of our own as well; the errors of both become one sentence.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from functools import lru_cache
from typing import Any, cast

import fsspec
from zarr.core.buffer import Buffer
from zarr.storage import FsspecStore, LocalStore

from ...errors import CacheError, StoreError
from ...files import write_bytes


class DiskStore(LocalStore):
    """A folder for the accesses that Zarr makes itself; what it writes is on the disk when it returns."""

    async def set(self, key: str, value: Buffer) -> None:
        """Write a file in one step."""
        self._check_writable()
        await asyncio.to_thread(self.set_sync, key, value)

    def set_sync(self, key: str, value: Buffer) -> None:
        """Write a file in one step."""
        self._check_writable()
        if not isinstance(value, Buffer):
            raise TypeError(f"'{key}': a Buffer is written, not {type(value).__name__}")
        write_bytes(self.root / key, value.as_buffer_like())

    async def set_if_not_exists(self, key: str, value: Buffer) -> None:
        """Write a file unless it is there."""
        if not (self.root / key).exists():
            await self.set(key, value)


LEASE = "writer.partial"  # the object whose content begins with the id of the only process that may write; see `lease`


class ObjectStore(FsspecStore):
    """An object store for the accesses that Zarr makes itself.

    Attributes:
        writer: who writes, and may do so while the lease is theirs; None: not looked at.
        lease: path of the object that says so.
    """

    writer: str | None = None
    lease: str = LEASE

    async def get(self, *args: Any, **options: Any) -> Any:
        """Return an object, or None.

        Raises:
            StoreError: the store does not answer.
        """
        with one_sentence(self.path):
            return await super().get(*args, **options)

    async def set(self, *args: Any, **options: Any) -> None:
        """Write an object.

        Raises:
            CacheError: the lease is another's.
            StoreError: the store does not answer.
        """
        with one_sentence(self.path):
            await self._require_lease()
            await super().set(*args, **options)

    async def delete_dir(self, prefix: str) -> None:
        """Delete all objects below; errors as for `set`."""
        with one_sentence(self.path):
            await self._require_lease()
            await super().delete_dir(prefix)

    def of(self, writer: str | None, lease: str) -> "ObjectStore":
        """Return the same for a writer, whose lease is the object of that path."""
        store = copy(self)
        store.writer, store.lease = writer, lease
        return store

    async def _require_lease(self) -> None:
        if self.writer is not None:
            try:
                held = bytes(await self.fs._cat_file(self.lease))
            except FileNotFoundError:
                held = None
            require_holder(self.path, self.writer, held)


@lru_cache(16)  # of the stores that are in use
def connect(url: str, _process: int) -> tuple[fsspec.AbstractFileSystem, ObjectStore]:
    """Return our and Zarr's connection, one a process, where fsspec would make one a thread."""
    ours, zarrs = fsspec.core.url_to_fs(url)[0], cast(ObjectStore, ObjectStore.from_url(url))
    for fs in (ours, zarrs.fs):
        fs.dircache.use_listings_cache = False  # the other connection, or another process, makes a listing stale
        if hasattr(fs, "max_concurrency"):
            fs.max_concurrency = 1  # with more, s3fs asks for the size of an object before it reads it
    return ours, zarrs


def require_holder(where: str, writer: str, held: bytes | None) -> None:
    """Refuse to write where the lease, which holds `held`, is not the writer's; CacheError says who writes there."""
    if held is None or not held.startswith(writer.encode()):
        raise CacheError(
            f"another process took {where} over while this one could not reach it; run the same command again,"
            " once that one has ended"
        )


def on_condition(error: OSError) -> bool:
    """Return whether an object was not written because of the condition that its writer made."""
    answer = getattr(error.__cause__, "response", None) or {}
    codes = "PreconditionFailed", "ConditionalRequestConflict", "NoSuchKey"
    return isinstance(error, FileExistsError) or answer.get("Error", {}).get("Code") in codes


@contextmanager
def one_sentence(where: str) -> Iterator[None]:
    """Turn what an object store raises into a `StoreError`; each kind of store has errors of its own."""
    try:
        yield
    except (CacheError, StoreError):
        raise
    except Exception as error:
        reason = " ".join(str(getattr(error, "strerror", None) or error).split()).rstrip(".")
        raise StoreError(
            f"{where} does not answer as it should ({reason or 'no answer in time'}); fix that and run the same"
            " command again"
        ) from error
