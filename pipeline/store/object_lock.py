"""The lock of an object store: an object that one writer alone can create, and writes again while it lives.

Nobody else knows whether a writer on another machine is alive. So whoever finds its lock watches it: a lock that is
written again has a writer, and one that stays the same for `PATIENCE` seconds has lost it and is taken over. No clocks
are compared.
"""

import errno
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from threading import Event, Thread
from typing import Any

from ..errors import CacheError

RENEWAL = 10.0  # seconds after which a writer writes its lock again
PATIENCE = 4 * RENEWAL

log = logging.getLogger("xret")


@contextmanager
def object_lock(fs: Any, path: str, url: str) -> Iterator[None]:
    """Hold the lock at `path` of a file system of fsspec, for the store at `url`.

    A store without conditional writes is named, and has no lock. CacheError: another process is writing there, or has
    taken the lock over meanwhile, because this one did not write it again.
    """
    lock = _Lock(fs, path)
    if not lock.create() and not lock.is_mine():  # it may be ours, where the first answer was lost
        lock.take_over(url)
    if lock.create():  # although it is there
        lock.remove()
        log.warning("%s has no conditional writes; let only one process write there at a time", url)
        yield
        return
    ended = Event()
    thread = Thread(target=lock.renew, args=(ended,), name="xret-lock", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        with suppress(Exception):  # what ended the block says more
            lock.lost = lock.lost or not lock.is_mine()
            if not lock.lost:
                lock.remove()
    if lock.lost:
        raise CacheError(f"the lock of {url} was taken over or removed during the work; run the same command again")


class _Lock:
    """An object with who writes, and since when."""

    def __init__(self, fs: Any, path: str) -> None:
        self.fs, self.path, self.lost = fs, path, False
        self.facts: dict[str, Any] = {
            "owner": f"process {os.getpid()} on {socket.gethostname()}",
            "since": datetime.now(UTC).isoformat(timespec="seconds"),
            "token": os.urandom(8).hex(),
            "renewals": 0,
        }

    def create(self) -> bool:
        """Return whether there was no lock; also True if the store does not know that condition."""
        try:
            self.fs.pipe_file(self.path, json.dumps(self.facts).encode(), mode="create")
        except (NotImplementedError, TypeError, ValueError):  # a file system that does not know the mode
            return True
        except OSError as error:
            if error.errno == errno.ENOSYS:
                return True
            if not isinstance(error, FileExistsError) and (isinstance(error, PermissionError) or self._read() is None):
                raise  # it is not the condition that failed
            return False
        return True

    def take_over(self, url: str) -> None:
        """Wait until the lock is gone, or for so long that its writer must be dead; CacheError: it is alive."""
        seen, until = self._read(), time.monotonic() + PATIENCE
        who = "{owner} since {since}".format(**{"owner": "somebody", "since": "some time", **_facts(seen)})
        busy = CacheError(f"another process is writing to {url}: {who}; wait until it has ended")
        log.warning("%s is locked by %s; watching for %.0f s at most whether it lives", url, who, PATIENCE)
        while time.monotonic() < until:
            time.sleep(RENEWAL / 10)
            if (now := self._read()) is None:
                break
            if now != seen:
                raise busy
        else:
            self.remove()
        if self.create():
            time.sleep(RENEWAL / 10)  # who took it over at the same moment has removed this lock, and has another
        if not self.is_mine():
            raise busy

    def renew(self, ended: Event) -> None:
        """Write the lock again and again, until the block has ended or another has the lock."""
        while not ended.wait(RENEWAL):
            with suppress(Exception):  # it may answer again
                if not self.is_mine():
                    self.lost = True
                    return
                self.facts["renewals"] += 1
                self.fs.pipe_file(self.path, json.dumps(self.facts).encode())

    def remove(self) -> None:
        with suppress(FileNotFoundError):
            self.fs.rm_file(self.path)

    def is_mine(self) -> bool:
        return bool(_facts(self._read()).get("token") == self.facts["token"])

    def _read(self) -> bytes | None:
        try:
            return bytes(self.fs.cat_file(self.path))
        except FileNotFoundError:
            return None


def _facts(content: bytes | None) -> dict[str, Any]:
    try:
        return dict(json.loads(content or b"{}"))
    except (ValueError, TypeError):
        return {}
