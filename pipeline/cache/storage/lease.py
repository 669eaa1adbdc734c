"""One writer at a time: on a disk by a lock, on an object store, which has none, by a lease.

A lease is a small object that its holder keeps changing. That of a killed process stays as it is, and whoever sees that
takes it over. No clocks are compared. To everything else it is a partial file, and so no part of the cache.
"""

import os
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ...errors import CacheError, StoreError
from ...files import make_folders
from .folder import gone
from .store import Store
from .zarr_stores import LEASE

PERIOD = 5.0  # seconds between two signs of life
PATIENCE = 30.0  # seconds without a sign of life after which a lease may be taken over


@contextmanager
def alone(store: Store) -> Iterator[None]:
    """Be the only writer of a store: by `locked` on a disk, by `lease` on an object store.

    Raises:
        CacheError: another process is writing, or took over an object store; or a folder was moved meanwhile.
        StoreError: an object store does not answer.
        OSError: whatever is raised meanwhile, with the store's name if it had none.
    """
    if not store.is_local:
        with lease(store):
            yield
        return
    make_folders(Path(store.root))
    try:
        with locked(store.root, _occupied(store)):
            yield
    except OSError as error:
        if not Path(store.root).is_dir():
            raise gone(store.url) from error
        if error.filename is not None or error.strerror is None:
            raise
        raise OSError(error.errno, error.strerror, store.url) from error  # a full disk does not say which it is


@contextmanager
def locked(folder: str | Path, busy: Exception) -> Iterator[None]:
    """Lock an existing folder of this machine; the system takes the lock back however the process ends.

    Args:
        folder: which.
        busy: raised if another process has locked it.
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


@contextmanager
def lease(store: Store) -> Iterator[None]:
    """Be the only writer of an object store; errors as for `alone`.

    While it lasts the store has a `writer`, and before each of its writes it asks whether the lease is still theirs: a
    process that was away for long, and was taken for dead, at most ends the write that it was at.
    """
    holder = uuid.uuid4().hex
    _take(store, holder)
    over = threading.Event()
    keeper = threading.Thread(target=_keep, args=(store, holder, over), daemon=True)
    keeper.start()
    store.writer = holder
    try:
        yield
    except BaseException:
        with suppress(CacheError):
            _release(store, over, keeper)
        raise
    with suppress(StoreError):  # nobody renews it any more
        _release(store, over, keeper)


def _take(store: Store, holder: str) -> None:
    held = store.find_bytes(LEASE)
    if held is None:
        taken = store.create_bytes(LEASE, _sign(holder))
    else:
        note = f"Another process writes to {store.url}, or was killed while it did"
        print(f"{note}; waiting {PATIENCE:.0f} s to see which.", file=sys.stderr)
        patient_until = time.monotonic() + PATIENCE
        while (now := store.find_bytes(LEASE)) == held and time.monotonic() < patient_until:
            time.sleep(PERIOD / 5)
        if now is None:
            taken = store.create_bytes(LEASE, _sign(holder))
        else:
            taken = store.replace_bytes(LEASE, held, _sign(holder))
    if not taken:
        raise _occupied(store)


def _keep(store: Store, holder: str, over: threading.Event) -> None:
    """Renew the lease until it is over, or another's."""
    while not over.wait(PERIOD):
        with suppress(StoreError):  # whoever writes meanwhile reports it
            if not store.replace_bytes(LEASE, holder.encode(), _sign(holder)):
                return


def _release(store: Store, over: threading.Event, keeper: threading.Thread) -> None:
    """Remove the lease if it is still this writer's; CacheError otherwise."""
    over.set()
    keeper.join()
    try:
        store.remove(LEASE)
    finally:
        store.writer = None


def _sign(holder: str) -> bytes:
    """Return a sign of life, as no other: two are equal only if nobody has written between them."""
    return f"{holder} {uuid.uuid4().hex}".encode()


def _occupied(store: Store) -> CacheError:
    return CacheError(f"another process is writing to {store.url}; wait until it has ended")
