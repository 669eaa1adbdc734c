"""Running shard tasks: on threads of this process, or on an existing Dask cluster. The tasks are the same."""

import asyncio
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError
from importlib.metadata import version
from itertools import islice
from queue import Empty, SimpleQueue
from statistics import median
from typing import TYPE_CHECKING, Any

from dask.base import compute
from dask.callbacks import Callback
from dask.delayed import Delayed, delayed

from ..errors import CacheError
from ..wording import in_time, some_of
from .shards import Receipt

if TYPE_CHECKING:
    from distributed import Client, Future

PATIENCE = 10.0  # seconds that a scheduler may take to answer
WAVE = 1024  # tasks under way at once: a data set of any size needs no larger graph
# A cluster stalls when no receipt has come for so many times what a task usually takes, but at least for so many
# seconds, of which there are more before the first: encoders are loaded, perhaps downloaded. Each further time it gets
# twice as long.
USUAL, SILENCE, FIRST_SILENCE = 10, 60.0, 1800.0
ATTEMPTS = 4  # to get a receipt out of a cluster that stalls

Record = Callable[[Receipt], object]
Task = Callable[[int, int], Delayed]  # gives the task of a shard; its key is another for each attempt


def shard_task(work: Callable[[Any, int], Receipt], job_of: Callable[[int], Any], set_name: str) -> Task:
    """Return what gives the Dask task of a shard; `job_of` gives what that task is told."""
    task = delayed(work, pure=False)

    def of(shard: int, attempt: int) -> Delayed:
        again = f"-again-{attempt}" if attempt else ""
        found: Delayed = task(job_of(shard), shard, dask_key_name=f"{set_name}-shard-{shard}{again}")
        return found

    return of


def run_here(tasks: Iterable[Delayed], workers: int, record: Record) -> None:
    """Compute the tasks on threads of this process and hand each receipt to `record` as it comes."""
    tasks = iter(tasks)
    while wave := list(islice(tasks, WAVE)):
        with Callback(posttask=lambda _key, result, *_: record(result) if isinstance(result, Receipt) else None):
            compute(*wave, scheduler="threads", num_workers=workers, optimize_graph=False)


def run_on_cluster(task: Task, shards: Iterable[int], address: str, record: Record) -> None:
    """Compute the tasks of shards on the cluster at `address`; where workers declare a resource GPU, only they get any.

    A task whose worker dies runs again elsewhere, and so do those of a cluster that stalls; they write the same bytes.
    Only receipts travel.

    Raises:
        CacheError: as for `count_workers`, or the scheduler went away, a task killed several workers, or the cluster
            stalls again and again.
    """
    with connect(address) as client:
        print(f"Dask dashboard: {client.dashboard_link}", file=sys.stderr)
        workers = workers_of(client, address)
        _require_same_version(client, address)
        gpu = any("GPU" in worker["resources"] for worker in workers.values())
        _Cluster(client, address, {"GPU": 1} if gpu else None, task).run(iter(shards), record)


class _Cluster:
    """The tasks that are under way on a cluster."""

    def __init__(self, client: "Client", address: str, resources: dict[str, int] | None, task: Task) -> None:
        self.client, self.address, self.resources, self.task = client, address, resources, task
        self.under_way: dict[Future[Receipt], int] = {}  # and their shards; a receipt of another future is of no use
        self.ended: SimpleQueue[Future[Receipt]] = SimpleQueue()
        self.seconds: deque[float] = deque(maxlen=100)  # that the tasks of the last receipts took
        self.stalls = 0  # since the last receipt
        self.attempt = 0  # counts all of them: a key that Dask has lost stays lost

    def run(self, shards: Iterator[int], record: Record) -> None:
        self.submit(islice(shards, WAVE))
        while self.under_way:
            try:
                future = self.ended.get(timeout=self.patience)
            except Empty:
                self.start_again()
                continue
            if self.under_way.pop(future, None) is None:
                continue
            receipt = self.receipt_of(future)
            self.stalls = 0
            self.seconds.append(receipt.duration)
            record(receipt)
            future.release()
            self.submit(islice(shards, 1))

    @property
    def patience(self) -> float:
        """How long to wait for the next receipt, in seconds."""
        usual = max(SILENCE, USUAL * median(self.seconds)) if self.seconds else FIRST_SILENCE
        return float(usual * 2**self.stalls)

    def submit(self, shards: Iterable[int]) -> None:
        for shard in shards:
            future = self.client.compute(self.task(shard, self.attempt), resources=self.resources)
            self.under_way[future] = shard
            future.add_done_callback(self.ended.put)

    def receipt_of(self, future: "Future[Receipt]") -> Receipt:
        from distributed import KilledWorker

        try:
            receipt: Receipt = future.result()
        except KilledWorker as error:
            raise CacheError(
                f"a task killed every worker it ran on ({future.key}); look into the workers' logs, give them more"
                " memory, or choose a smaller --shard-images"
            ) from error
        except CancelledError as error:
            raise _gone(self.address) from error
        return receipt

    def start_again(self) -> None:
        """Say what waits where, and submit it anew: Dask may have lost a task while one worker stole it of another."""
        silence, (futures, shards) = in_time(self.patience), zip(*self.under_way.items(), strict=True)
        places = where_tasks_are(self.client, self.address, [str(one.key) for one in futures])
        waiting = "; ".join(some_of([f"{key} {where}" for key, where in places.items()]))
        self.stalls += 1
        self.attempt += 1
        if self.stalls == ATTEMPTS:
            raise CacheError(
                f"the workers of {self.address} have finished no shard for {silence}, in the last of {ATTEMPTS}"
                f" attempts ({waiting}); look into their logs, start them anew and run the same command again: it goes"
                " on where it was"
            )
        print(f"Note: no shard was finished for {silence}; tried again: {waiting}.", file=sys.stderr)
        self.under_way.clear()
        self.client.cancel(futures, force=True)
        self.submit(shards)


def where_tasks_are(client: "Client", address: str, keys: Iterable[str]) -> dict[str, str]:
    """Return where each of these tasks is, by what the scheduler knows; CacheError where it does not answer."""
    scheduler: Any = client.scheduler
    try:
        held = client.sync(scheduler.processing, workers=None, callback_timeout=PATIENCE)
    except (OSError, TimeoutError) as error:
        raise _gone(address) from error
    places = {key: worker for worker, tasks in held.items() for key in tasks}
    return {key: f"on {places.get(key, 'no worker')}" for key in keys}


def _gone(address: str) -> CacheError:
    return CacheError(
        f"the Dask scheduler at {address} has gone, or cancelled the tasks; start one and run the same command again:"
        " it goes on where it was"
    )


def count_workers(address: str) -> int:
    """Return how many workers of the cluster at `address` would get tasks.

    Raises:
        CacheError: no scheduler answers, or it has no worker, or one without this version of xret.
    """
    with connect(address) as client:
        workers = workers_of(client, address).values()
        _require_same_version(client, address)
        return sum("GPU" in worker["resources"] for worker in workers) or len(workers)


def connect(address: str) -> "Client":
    """Return a client of the Dask scheduler at `address`; CacheError where none answers."""
    from distributed import Client

    _greet(address)
    try:
        return Client(address, timeout=PATIENCE, set_as_default=False)
    except (OSError, ValueError) as error:
        raise _unanswered(address) from error


def workers_of(client: "Client", address: str) -> dict[str, Any]:
    """Return what the scheduler knows of its workers, by their addresses; CacheError where it has none."""
    workers: dict[str, Any] = client.scheduler_info(n_workers=-1)["workers"]
    if not workers:
        raise CacheError(f"the Dask scheduler at {address} has no worker; start some with `dask worker {address}`")
    return workers


def _greet(address: str) -> None:
    """Raise CacheError unless a scheduler answers; a `Client` would hang, or print a traceback."""
    from distributed.comm.addressing import parse_address
    from distributed.comm.core import connect

    async def shake_hands() -> None:
        await (await connect(address, timeout=PATIENCE)).close()

    if parse_address(address)[0] != "tcp":  # a TLS handshake takes the user's certificates
        return
    try:
        asyncio.run(asyncio.wait_for(shake_hands(), PATIENCE + 1))
    except Exception as error:  # whatever Dask makes of an answer that is none
        raise _unanswered(address) from error


def _unanswered(address: str) -> CacheError:
    return CacheError(f"no Dask scheduler answers at {address}; start one, or correct --scheduler")


def _require_same_version(client: "Client", address: str) -> None:
    own = version("xret")
    try:
        found = set(client.run(version, "xret").values())
    except Exception as error:  # whatever a worker without xret makes of it
        raise CacheError(f"the workers of {address} cannot import xret; install xret {own} there") from error
    if found != {own}:
        raise CacheError(f"the workers of {address} have xret {', '.join(sorted(found))}; install {own} there")
