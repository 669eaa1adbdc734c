"""Runs tasks on Dask: on threads of this process, or on the workers of a cluster that is there already."""

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from dask.base import compute
from dask.delayed import delayed

from ..errors import CacheError

T = TypeVar("T")
PATIENCE = 10  # seconds until a scheduler must have answered


def run_here(task: Callable[[Any], T], parts: Iterable[Any], tasks: int, take: Callable[[T], None]) -> None:
    """Run a task for each of `parts`, so many at once, and call `take` with what each returns.

    The parts are asked for one by one, by one thread at a time, when a task is free. What a task or `parts` raises is
    raised here; no other part is begun then, and those that run have ended.
    """
    left, lock = iter(parts), threading.Lock()

    def run(_number: int) -> None:
        while True:
            with lock:
                part = next(left, None)
            if part is None:
                return
            take(task(part))

    with ThreadPoolExecutor(tasks, "xret-task") as pool:
        try:
            compute(*map(delayed(run, pure=False), range(tasks)), scheduler="threads", pool=pool)
        finally:
            with lock:
                left = iter(())


def run_on_cluster(
    task: Callable[[Any], T], groups: Sequence[Any], address: str, take: Callable[[T], None], close: Callable[[], None]
) -> None:
    """Run a task for each of `groups` on the workers of the Dask scheduler at `address`; call `close` there at the end.

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
        futures = client.map(task, groups, pure=False)
        try:
            for future in as_completed(futures, loop=client.loop):
                if future.status == "cancelled":
                    raise CacheError(f"the Dask scheduler at {address} went away; run the same command again")
                take(future.result())
        except KilledWorker as error:
            raise CacheError(f"workers of {address} died again and again under a task; see their logs") from error
        finally:
            client.cancel(futures)
            client.run(close)
