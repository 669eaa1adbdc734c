"""Work on the workers of a Dask cluster: few tasks at a time, for a small scheduler; errors name the worker."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from importlib.metadata import version
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from .errors import CacheError, OutputError, SampleError, XretError
from .wording import reason

if TYPE_CHECKING:
    from distributed import Client

PATIENCE = 10  # seconds until a scheduler must have answered
T = TypeVar("T")


@contextmanager
def connect(address: str) -> "Iterator[Client]":
    """Give a client of the Dask scheduler at `address`: the current one, which may have certificates, or a new one.

    CacheError: it does not answer or has no workers, or one of them has another version of xret.
    """
    from distributed import Client

    log = logging.getLogger("distributed.client")
    with ExitStack() as opened:
        opened.callback(log.setLevel, log.level)
        log.setLevel(logging.CRITICAL)  # it would print that a connection is lost
        client = None
        with suppress(ValueError):  # there is no current one
            client = Client.current()
        if client is None or client.scheduler.address != address:
            try:
                client = opened.enter_context(Client(address, set_as_default=False, timeout=PATIENCE))
            except (OSError, ValueError, TypeError) as error:  # TypeError: without the certificates that it needs
                raise CacheError(
                    f"no Dask scheduler answers at {address} ({reason(error)}); start one, or correct the address"
                ) from error
        workers = client.scheduler_info(n_workers=-1)["workers"]
        if not workers:
            raise CacheError(f"the Dask scheduler at {address} has no workers; start one with `dask worker {address}`")
        versions: Any = client.get_versions(packages=["xret"])
        for worker, of in versions["workers"].items():
            _require_version(of["packages"]["xret"], workers.get(worker, {}).get("name", worker))
        yield client


async def prepare(module: str) -> None:
    """Import a module, as a worker does beside its tasks where a client runs this."""
    await asyncio.to_thread(import_module, module)


def run_tasks(
    client: "Client", work: Callable[[T], Any], tasks: Iterable[T], *, each: int = 1, **how: Any
) -> Iterator[tuple[T, Any]]:
    """Yield each task with what `work` returns, as they end; KilledWorker where workers died under it again and again.

    A worker has `each` tasks at once, or fewer if it has fewer threads; `tasks` is asked for the next when one is free.
    `how` goes to `Client.submit`. CacheError: the scheduler went away. What `work` raises is raised.
    """
    from distributed import as_completed
    from distributed.comm.core import CommClosedError
    from distributed.scheduler import KilledWorker

    left, sent, ended = iter(tasks), dict[Any, T](), as_completed([], loop=client.loop)

    def send() -> None:
        room = sum(min(each, threads) for threads in client.nthreads().values()) - len(sent)
        for task in islice(left, max(room, not sent)):
            future = client.submit(_on_worker, version("xret"), work, task, pure=False, **how)
            sent[future] = task
            ended.add(future)

    try:
        send()
        for future in ended:
            error = future.exception() if future.status == "error" else None
            if error is not None and not isinstance(error, KilledWorker):
                raise error
            yield sent.pop(future), error or future.result()
            send()
    except (CommClosedError, CancelledError) as error:
        raise CacheError("the Dask scheduler went away; run the same command again to go on") from error
    finally:
        client.cancel([*sent])


def _on_worker(expected: str, work: Callable[[T], Any], task: T) -> Any:
    """Do a task on a worker, and add the worker's name to an error."""
    from distributed import get_worker

    name = get_worker().name
    _require_version(version("xret"), name, expected)
    try:
        return work(task)
    except SampleError as error:
        raise SampleError(error.sample, f"{error.reason} (worker {name})") from error
    except XretError as error:
        raise type(error)(f"{error} (worker {name})") from error
    except OSError as error:
        raise OutputError(f"{error.filename}: {error.strerror} (worker {name})") from error


def _require_version(found: str | None, worker: str, expected: str = version("xret")) -> None:
    if found != expected:
        has = f"xret {found}" if found else "no xret"
        raise CacheError(f"worker {worker} has {has} and not {expected}; install xret {expected} there, or stop it")
