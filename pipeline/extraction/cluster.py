"""Runs tasks on Dask: on threads of this process, or on the workers of a cluster that is there already."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from ..errors import CacheError

T = TypeVar("T")


def run(
    task: Callable[..., T],
    argument: Any,
    groups: Sequence[Any],
    *,
    cluster: str | None,
    tasks: int,
    close: Callable[[], None],
) -> Iterator[T]:
    """Yield what the tasks return, in the order in which they end.

    Args:
        task: takes `argument` and one of `groups`.
        argument: the same for all.
        groups: one a task.
        cluster: address of a Dask scheduler; None: threads of this process.
        tasks: how many run at once in this process.
        close: called in each process when all have ended, or one has failed.

    Raises:
        CacheError: the scheduler does not answer or has no workers, or workers died under a task three times.
        Exception: whatever a task raises; tasks that have not begun are left out.
    """
    from distributed import Client, as_completed
    from distributed.scheduler import KilledWorker

    try:
        client = (
            Client(cluster, set_as_default=False, timeout=30)
            if cluster
            else Client(
                processes=False,
                n_workers=1,
                threads_per_worker=tasks,
                memory_limit=0,
                dashboard_address="127.0.0.1:0",  # else on port 8787 of all interfaces, with a warning if it is in use
                scheduler_kwargs={"dashboard": False},
                set_as_default=False,
            )
        )
    except (OSError, ValueError) as error:
        raise CacheError(f"no Dask scheduler answers at {cluster}; start one, or correct --workers") from error
    with _quiet(), client:
        if not client.nthreads():
            raise CacheError(f"the Dask scheduler at {cluster} has no workers; start one with `dask worker {cluster}`")
        futures = client.map(lambda group: task(argument, group), groups, pure=False)
        try:
            for future in as_completed(futures, loop=client.loop):
                yield future.result()
        except KilledWorker as error:
            raise CacheError(f"workers of {cluster} died again and again under a task; see their logs") from error
        finally:
            client.cancel(futures)
            client.run(close)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep Dask from reporting every client that closes."""
    loggers = [logging.getLogger(f"distributed.{name}") for name in ("batched", "worker", "core")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
