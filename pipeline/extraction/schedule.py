"""Running shard tasks: on threads of this process, or on an existing Dask cluster. The tasks are the same."""

import asyncio
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError
from importlib.metadata import version
from itertools import islice
from typing import TYPE_CHECKING, Any

from dask.base import compute
from dask.callbacks import Callback
from dask.delayed import Delayed, delayed

from ..errors import CacheError
from .shards import Receipt

if TYPE_CHECKING:
    from distributed import Client

PATIENCE = 10.0  # seconds that a scheduler may take to answer
WAVE = 1024  # tasks under way at once: a data set of any size needs no larger graph

Record = Callable[[Receipt], object]


def shard_tasks(
    work: Callable[[Any, int], Receipt], job_of: Callable[[int], Any], set_name: str, shards: Iterable[int]
) -> Iterator[Delayed]:
    """Yield one Dask task a shard; `job_of` gives what the task of a shard is told."""
    task = delayed(work, pure=False)
    for shard in shards:
        yield task(job_of(shard), shard, dask_key_name=f"{set_name}-shard-{shard}")


def run_here(tasks: Iterable[Delayed], workers: int, record: Record) -> None:
    """Compute the tasks on threads of this process and hand each receipt to `record` as it comes."""
    tasks = iter(tasks)
    while wave := list(islice(tasks, WAVE)):
        with Callback(posttask=lambda _key, result, *_: record(result) if isinstance(result, Receipt) else None):
            compute(*wave, scheduler="threads", num_workers=workers, optimize_graph=False)


def run_on_cluster(tasks: Iterable[Delayed], address: str, record: Record) -> None:
    """Compute the tasks on the cluster at `address`; where workers declare a resource GPU, only they get tasks.

    A task whose worker dies runs again elsewhere; it writes the same bytes. Only receipts travel.

    Raises:
        CacheError: as for `count_workers`, or the scheduler went away, or a task killed several workers.
    """
    from distributed import KilledWorker, as_completed

    with connect(address) as client:
        print(f"Dask dashboard: {client.dashboard_link}", file=sys.stderr)
        workers = workers_of(client, address)
        _require_same_version(client, address)
        gpu = any("GPU" in worker["resources"] for worker in workers.values())
        waiting, running = iter(tasks), as_completed(loop=client.loop)

        def submit(count: int) -> None:
            for task in islice(waiting, count):
                running.add(client.compute(task, resources={"GPU": 1} if gpu else None))

        submit(WAVE)
        for future in running:
            try:
                receipt = future.result()
            except KilledWorker as error:
                raise CacheError(
                    f"a task killed every worker it ran on ({future.key}); look into the workers' logs, give them more"
                    " memory, or choose a smaller --shard-images"
                ) from error
            except CancelledError as error:
                raise CacheError(
                    f"the Dask scheduler at {address} has gone, or cancelled the tasks; start one and run the same"
                    " command again: it goes on where it was"
                ) from error
            record(receipt)
            future.release()
            submit(1)


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
