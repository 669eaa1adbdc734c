"""Runs the parts of an extraction as tasks of Dask: on threads here, or on the workers of a cluster that is there."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial

from dask.threaded import get

from ..device import cores
from ..errors import CacheError
from .filler import Filler, Job, Tally

_TASKS = 8  # at once on this machine at most: while one encodes the others read, lay out and write
PATIENCE = 10  # seconds until a scheduler must have answered


def at_once() -> int:
    """Return how many tasks this machine does at once."""
    return min(_TASKS, max(2, cores() // 2))


def fill_here(filler: Filler, groups: Sequence[Sequence[int]], take: Callable[[Tally], None]) -> None:
    """Fill groups of chunks by threads of this process, and call `take` with what each part of the work has done.

    What a task raises is raised here; no other part is begun then, and those that run have ended.
    """
    turn, taking = threading.Lock(), threading.Lock()

    def task() -> None:
        with turn:
            part = next(parts, None)
        if part is not None:  # another has not failed
            done = filler.fill(part)
            with taking:
                take(done)

    parts, pool = filler.read_ahead(groups), ThreadPoolExecutor(at_once(), "xret-task")
    with closing(parts), pool, closing(filler):
        tasks = {("fill", number): (task,) for number in range(filler.parts(groups))}
        get(tasks, [*tasks], pool=pool)  # `dask.compute` would merge as many graphs, in the square of their number


def fill_on_cluster(job: Job, groups: Sequence[Sequence[int]], address: str, take: Callable[[Tally], None]) -> None:
    """Fill groups of chunks on the workers of the Dask scheduler at `address`, and call `take` likewise.

    CacheError: the scheduler does not answer or has no workers, or workers died under a task again and again.
    """
    from distributed import Client, as_completed
    from distributed.scheduler import KilledWorker

    try:
        client = Client(address, set_as_default=False, timeout=PATIENCE)
    except (OSError, ValueError) as error:
        raise CacheError(f"no Dask scheduler answers at {address}; start one, or correct --workers") from error
    with client:
        if not client.nthreads():
            raise CacheError(f"the Dask scheduler at {address} has no workers; start one with `dask worker {address}`")
        futures = client.map(partial(_on_worker, job), groups, pure=False)
        try:
            for future in as_completed(futures, loop=client.loop):
                if future.status == "cancelled":
                    raise CacheError(f"the Dask scheduler at {address} went away; run the same command again")
                take(future.result())
        except KilledWorker as error:
            raise CacheError(f"workers of {address} died again and again under a task; see their logs") from error
        finally:
            client.cancel(futures)
            client.run(_forget, job)


_fillers: dict[str, Filler] = {}  # of a worker, by the key of their job
_lock = threading.Lock()


def _on_worker(job: Job, chunks: Sequence[int]) -> Tally:
    with _lock:
        if job.key not in _fillers:
            _fillers[job.key] = Filler(job)
        filler = _fillers[job.key]
    tally = Tally()
    for part in filler.read_ahead([chunks], fork=False):  # to fork for each task would cost more than it brings
        tally.update(filler.fill(part))
    return tally


def _forget(job: Job) -> None:
    with _lock:
        filler = _fillers.pop(job.key, None)
    if filler is not None:
        filler.close()
