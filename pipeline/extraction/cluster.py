"""Runs the parts of an extraction as tasks of Dask: on threads here, or on the workers of a cluster that is there."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from dask.threaded import get

from ..data.sources import missing_from
from ..device import cores
from ..errors import CacheError, ManifestError
from ..workers import run_tasks
from .filler import Filler, Job, Tally

if TYPE_CHECKING:
    from distributed import Client

Groups = Sequence[Sequence[int]]  # of chunks

_TASKS = 8  # at once on this machine at most: while one encodes the others read, lay out and write
_EACH = 2  # tasks that a worker has at once: while one begins or ends the other encodes
SECONDS = 10  # that a task of a cluster takes: long beside a scheduler's work, short beside what a death loses


def at_once() -> int:
    """Return how many parts this machine does at once."""
    return min(_TASKS, max(2, cores() // 2))


def fill_here(filler: Filler, groups: Groups, take: Callable[[Tally], None], *, on_worker: bool = False) -> None:
    """Fill groups of chunks by threads of this process, and call `take` with what each part of the work has done.

    What a task raises is raised here; no other part is begun then, and those that run have ended. The filler is closed;
    a worker of a cluster keeps it, has other tasks beside this one, and may not fork.
    """
    turn, taking = threading.Lock(), threading.Lock()

    def task() -> None:
        with turn:
            part = next(parts, None)
        if part is not None:  # another has not failed
            done = filler.fill(part)
            with taking:
                take(done)

    threads = max(2, at_once() // _EACH) if on_worker else at_once()
    parts, pool = filler.read_ahead(groups, fork=not on_worker), ThreadPoolExecutor(threads, "xret-task")
    with closing(parts), pool, nullcontext() if on_worker else closing(filler):
        tasks = {("fill", number): (task,) for number in range(filler.parts(groups))}
        get(tasks, [*tasks], pool=pool)  # `dask.compute` would merge as many graphs, in the square of their number


def fill_on_cluster(job: Job, groups: Groups, client: "Client", take: Callable[[Tally], None]) -> None:
    """Fill groups of chunks on the workers of a Dask cluster, and call `take` likewise.

    CacheError: the scheduler went away, or workers died under a task again and again.
    """
    from distributed.scheduler import KilledWorker

    seconds, count, left = 0.0, 0, len(groups)

    def tasks() -> Iterator[Groups]:
        """Yield some ten seconds of work each; towards the end less, so that no worker is left with much of it."""
        nonlocal left
        while left > 0:
            workers = len(client.nthreads())
            size = max(1, int(min(SECONDS * count / seconds if count else 1, left / (2 * _EACH * max(1, workers)))))
            yield groups[len(groups) - left :][:size]
            left -= size

    try:
        for task, done in run_tasks(client, partial(_fill_on_worker, job), tasks(), each=_EACH):
            if isinstance(done, KilledWorker):
                last = done.last_worker.name
                raise CacheError(f"workers died under a task again and again, worker {last} the last; see its log")
            seconds, count = seconds + done.pop("task") / 1e9, count + len(task)
            take(done)
    finally:
        with suppress(OSError):  # the scheduler went away
            client.run(_forget, job, on_error="ignore")


_fillers: dict[str, Filler] = {}  # of a worker, by the key of their job
_lock = threading.Lock()


def _fill_on_worker(job: Job, groups: Groups) -> Tally:
    with _lock:
        if job.key not in _fillers:
            if job.seen and missing_from(Path(job.folder), [job.seen]):  # no fault of samples, which would be skipped
                raise ManifestError(f"{job.folder}/{job.seen} is missing; mount the folder at the same path everywhere")
            _fillers[job.key] = Filler(job)
        filler = _fillers[job.key]
    began, tally = time.monotonic_ns(), Tally()
    fill_here(filler, groups, tally.update, on_worker=True)
    tally["task"] = time.monotonic_ns() - began
    return tally


def _forget(job: Job) -> None:
    with _lock:
        filler = _fillers.pop(job.key, None)
    if filler is not None:
        filler.close()
