"""Search in a gallery that outgrows a machine: an index a shard, on the workers of an existing Dask cluster.

A shard is an index of a run over one store. Every worker opens the shards that it is asked for, from a path that all
machines see, and answers with its own k best; these are merged, so that the result is that of one large index with
the same candidates. Without a scheduler the shards are searched here, one after the other.
"""

from collections.abc import Callable
from collections.abc import Sequence as Several
from dataclasses import replace
from heapq import merge
from itertools import islice
from pathlib import Path
from typing import Any

from ....pipeline.errors import RunError
from ....pipeline.extraction.schedule import connect, count_workers, workers_of
from ...modules.embedding import Embedding
from ..hits import Hit
from .exact import Compare
from .folder import RECORD, Facts
from .search import Index

# The indexes that are open in this process by their folder, each with the time of its record and the facts it has; the
# first opened first. Those of a worker outlive the search, as the next one is likely to be in the same gallery.
_open: dict[str, tuple[tuple[int, Facts], Index]] = {}
KEPT = 256


def shards_of(folder: str | Path) -> list[Path]:
    """Return the folders of the shards below a folder, in order; none where it holds a single index."""
    return sorted(Path(folder).glob("shard-*"))


class ShardedSearch:
    """The shards of one modality of a gallery, opened.

    Args:
        folders: the indexes.
        facts: that every shard must have, such as ``{"weights": ...}``.
        compare: takes Q queries and N samples to ``[Q, N]``; it must be picklable where there is a scheduler.
        scheduler: the address of a Dask scheduler whose workers see the folders; None: search here.

    Attributes:
        parts: the facts of what was put into the shards, in their order, as of `Index`.

    Raises:
        RunError: a shard is missing, damaged, or of something else.
        CacheError: no scheduler answers, or it has no worker, or one without this version of xret.
    """

    def __init__(
        self, folders: Several[str | Path], facts: Facts, compare: Compare, scheduler: str | None = None
    ) -> None:
        self._folders = [str(Path(folder).resolve()) for folder in folders]
        self._facts, self._compare, self._workers = facts, compare, ShardWorkers(scheduler)
        try:
            self.parts: list[Facts] = [part for parts in self._each(_parts) for part in parts]
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return sum(part["samples"] for part in self.parts)

    def close(self) -> None:
        """Leave the cluster, and the indexes that were opened here."""
        self._workers.close()
        for folder in self._folders:
            _open.pop(folder, None)

    def hits(self, query: Embedding, k: int) -> list[Hit]:
        """Return the k best answers of all shards, best first, equal ones in the order of the shards and their rows.

        Raises:
            RunError: a shard has changed into something else or is damaged, or a task killed its workers.
            CacheError: there is no worker any more.
        """
        found = merge(*self._each(_hits, query, k, self._compare), key=lambda hit: -hit.score)
        return [replace(hit, rank=rank) for rank, hit in enumerate(islice(found, k), 1)]

    def _each(self, work: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Return what `work` gives for every shard."""
        return self._workers.run(work, [(folder, self._facts, *arguments) for folder in self._folders])


class ShardWorkers:
    """Those of the Dask cluster at an address, or, where that is None, this process alone.

    A task's shard goes to the same worker each time, so that it is open there already.
    """

    def __init__(self, address: str | None) -> None:
        self._address = address
        self._client: Any = None
        if address is not None:
            count_workers(address)  # refuses workers that could not run a task
            self._client = connect(address)

    def close(self) -> None:
        """Leave the cluster."""
        if self._client is not None:
            self._client.close()

    def run(self, work: Callable[..., Any], tasks: list[tuple[Any, ...]]) -> list[Any]:
        """Return `work` of each task's arguments, in order.

        Raises:
            RunError: a task killed its workers, or the scheduler went away; else what `work` raised.
            CacheError: as for `workers_of`.
        """
        if self._address is None:
            return [work(*task) for task in tasks]
        from distributed import KilledWorker
        from distributed.client import FutureCancelledError

        workers = sorted(workers_of(self._client, self._address))
        futures = [
            self._client.submit(
                work, *task, workers=[workers[number % len(workers)]], allow_other_workers=True, pure=False
            )
            for number, task in enumerate(tasks)
        ]
        try:
            return list(self._client.gather(futures))
        except KilledWorker as error:
            raise RunError(f"a shard killed every worker it ran on ({error}); give the workers more memory") from error
        except FutureCancelledError as error:
            raise RunError(f"the Dask scheduler at {self._address} has gone; start one and try again") from error


def _parts(folder: str, facts: Facts) -> list[Facts]:
    return _opened(folder, facts).parts


def _hits(folder: str, facts: Facts, query: Embedding, k: int, compare: Compare) -> list[Hit]:
    return _opened(folder, facts).hits(query, k, compare)


def _opened(folder: str, facts: Facts) -> Index:
    """Return an index, opened and checked once a process as long as its record stays as it is."""
    record = Path(folder, RECORD)
    state = record.stat().st_mtime_ns if record.is_file() else 0, facts
    found = _open.get(folder)
    if found is None or found[0] != state:
        found = _open[folder] = state, Index(folder, facts)
        for first in list(_open)[:-KEPT]:
            _open.pop(first, None)
    return found[1]
