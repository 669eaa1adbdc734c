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

from ..errors import CacheError, StoreError
from ..files import make_folders
from .store import Store

NAME = "writer.partial"
PERIOD = 5.0  # seconds between two signs of life
PATIENCE = 30.0  # seconds without a sign of life after which a lease may be taken over


@contextmanager
def alone(store: Store) -> Iterator[None]:
    """Be the only writer of a store: by `locked` on a disk, by `lease` on an object store.

    Raises:
        CacheError: another process is writing, or took over an object store.
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
    """Be the only writer of an object store; errors as for `alone`."""
    holder = uuid.uuid4().hex
    _take(store, holder)
    over, lost = threading.Event(), threading.Event()
    keeper = threading.Thread(target=_keep, args=(store, holder, over, lost), daemon=True)
    keeper.start()
    try:
        yield
    finally:
        over.set()
        keeper.join()
        if not lost.is_set():
            with suppress(StoreError):  # nobody renews it any more
                store.remove(NAME)
    if lost.is_set():
        raise CacheError(
            f"another process took {store.url} over while this one could not reach it; run the same command again,"
            " once that one has ended"
        )


def _take(store: Store, holder: str) -> None:
    held = store.find_bytes(NAME)
    if held is not None:
        note = f"Another process writes to {store.url}, or was killed while it did"
        print(f"{note}; waiting {PATIENCE:.0f} s to see which.", file=sys.stderr)
        patient_until = time.monotonic() + PATIENCE
        while (now := store.find_bytes(NAME)) == held and time.monotonic() < patient_until:
            time.sleep(PERIOD / 5)
        if now not in (held, None):
            raise _occupied(store)
        store.remove(NAME)
    if not store.create_bytes(NAME, _sign(holder, 0)):
        raise _occupied(store)


def _keep(store: Store, holder: str, over: threading.Event, lost: threading.Event) -> None:
    signs = 0
    while not over.wait(PERIOD):
        try:
            if store.find_bytes(NAME) != _sign(holder, signs):
                lost.set()
                return
            signs += 1
            store.write_bytes(NAME, _sign(holder, signs))
        except StoreError:  # whoever writes meanwhile reports it
            continue


def _sign(holder: str, signs: int) -> bytes:
    return f"{holder} {signs}".encode()


def _occupied(store: Store) -> CacheError:
    return CacheError(f"another process is writing to {store.url}; wait until it has ended")
