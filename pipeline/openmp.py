"""How OpenMP's threads wait for one another: awake while each has a core, asleep beside other busy processes.

GNU's OpenMP, which torch uses on Linux, lets a thread spin for milliseconds after each operation, so that the next one
begins at once. Beside a busy process the scheduler soon puts two of them on one core, where the one that spins keeps
the other from the work that it waits for: a small training step takes fifteen times as long. Threads that sleep wait
well there, but wake too slowly where cores are free. OpenMP itself lets them sleep in a process that has more of them
than there are cores. So idle ones are added while threads lack a core; as many compute as before, with equal numbers.
"""

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

_TICK = 0.05  # seconds between two looks
_SHARE = 0.5  # of that time, in which threads lacked a core
_SHORT, _LONG = 0.5, 4.0  # seconds asleep until they spin again: longer each time that they lack one soon after
_TASKS = Path("/proc/self/task")
_watching = threading.Lock()  # one watcher a process is enough


@contextmanager
def waiting_well() -> Iterator[None]:
    """Let OpenMP's threads spin or sleep while they wait, whichever suits what else runs on this machine."""
    threads, caller = torch.get_num_threads(), threading.get_native_id()
    if threads == 1 or not (_TASKS / f"{caller}/schedstat").exists() or not _watching.acquire(blocking=False):
        yield
        return
    ended = threading.Event()
    # Each idle thread has a team as large as the caller's. OpenMP counts cores by affinity, whatever a quota says.
    idle = max(0, len(os.sched_getaffinity(0)) - threads) // (threads - 1) + 1
    try:
        with ThreadPoolExecutor(1, "openmp") as pool:
            pool.submit(_watch, ended, caller, idle)
            try:
                yield
            finally:
                ended.set()
    finally:
        _watching.release()


def _watch(ended: threading.Event, caller: int, idle: int) -> None:
    """Let threads sleep whenever they have lacked a core for most of a while, until `ended`."""
    pause = _SHORT
    began = seen = time.monotonic()
    before = _lacked(caller)
    while not ended.wait(_TICK):
        now, lacked = time.monotonic(), _lacked(caller)
        if lacked - before > _SHARE * (now - seen):
            _sleep(ended, idle, pause)
            pause = min(2 * pause, _LONG) if now - began < _LONG else _SHORT
            began = now = time.monotonic()
            lacked = _lacked(caller)
        seen, before = now, lacked


def _sleep(ended: threading.Event, idle: int, seconds: float) -> None:
    """Let OpenMP's threads sleep while they wait, for so long."""
    over = threading.Event()

    def hold() -> None:
        torch.zeros(1 << 17, device="cpu").add_(1)  # large enough for a team of threads, which ends with this one
        over.wait()

    with ThreadPoolExecutor(idle, "idle") as pool:
        try:
            for _ in range(idle):
                pool.submit(hold)
            ended.wait(seconds)
        finally:
            over.set()


def _lacked(caller: int) -> float:
    """Return for how many seconds the caller and threads that are not Python's have waited for a core so far."""
    others = {str(thread.native_id) for thread in threading.enumerate()} - {str(caller)}
    nanoseconds = 0
    for task in _TASKS.iterdir():
        with suppress(OSError, IndexError):  # it has ended
            nanoseconds += 0 if task.name in others else int((task / "schedstat").read_bytes().split()[1])
    return nanoseconds / 1e9
