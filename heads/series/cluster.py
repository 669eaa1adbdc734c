"""Trainings on a Dask cluster: its workers read the store and write the runs; only what came of them travels."""

import sys
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from ...pipeline.errors import CacheError
from ...pipeline.reading.placement import Resident
from ...pipeline.wording import in_time, reason, some_of
from .processes import J, Series, T

if TYPE_CHECKING:
    from distributed import Future

SILENCE = 1800.0  # seconds without the end of a job, after which a note says which are waited for; then twice as many

_kept: dict[tuple[str, ...], Resident] = {}  # on a worker: the features of the series that it is at


def on_cluster(series: Series[J, T], address: str, name: str, *, all_at_once: bool) -> None:
    """Let the workers of a Dask cluster do all jobs. Those of one worker process share their features.

    Args:
        series: the jobs.
        address: of the scheduler.
        name: of the series, no other's.
        all_at_once: hand out every job now, so that workers that come later take some; otherwise one a worker, and
            the next when one is done.

    Raises:
        CacheError: no scheduler answers, it has no worker, or they have another version of this package.
    """
    from distributed import Client

    from ...pipeline.extraction.schedule import count_workers, where_tasks_are

    workers = count_workers(address)
    with Client(address, set_as_default=False) as client:
        print(f"Dask dashboard: {client.dashboard_link}", file=sys.stderr)
        known = client.scheduler_info(n_workers=-1)["workers"].values()
        resources = {"GPU": 1} if any("GPU" in worker["resources"] for worker in known) else None
        futures: dict[Future[T], J] = {}
        ended: SimpleQueue[Future[T]] = SimpleQueue()
        silence = SILENCE

        def hand_out() -> None:
            while (all_at_once or len(futures) < workers) and (job := series.next_job()) is not None:
                future = client.submit(_work, series.work, job, name, pure=False, resources=resources)
                futures[future] = job
                future.add_done_callback(ended.put)

        hand_out()
        while futures:
            try:
                future = ended.get(timeout=silence)
            except Empty:
                jobs = {str(one.key): job.run for one, job in futures.items()}
                waiting = [f"{jobs[key]} {where}" for key, where in where_tasks_are(client, address, jobs).items()]
                print(
                    f"Note: no training has ended for {in_time(silence)}: {'; '.join(some_of(waiting))}; if its worker"
                    " is idle, stop this and run the same command again: it goes on where it was.",
                    file=sys.stderr,
                )
                silence *= 2
                continue
            silence, job = SILENCE, futures.pop(future)
            if future.status == "finished":
                series.record(job, future.result())
            elif future.status == "cancelled":
                raise CacheError(
                    f"the Dask scheduler at {address} has gone, or cancelled what it had to do; start one and run the "
                    "same command again: it goes on where it was"
                )
            else:
                series.lost(job, f"on the cluster: {reason(future.exception())}")
            hand_out()
        client.run(_forget, on_error="ignore")


def _work(work: Callable[[J, Resident], T], job: J, name: str) -> T:
    """Do a job with the features that jobs of the same series have left in the memory of this process."""
    key = (name, job.store, str(job.recipe.data.image), str(job.recipe.data.text))
    resident = _kept.get(key)
    if resident is None:
        _kept.clear()  # so that a job finds the room that it would have alone
        resident = _kept[key] = Resident()
    return work(job, resident)


def _forget() -> None:
    _kept.clear()
