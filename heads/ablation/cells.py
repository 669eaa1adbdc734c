"""The cells of an ablation: how one is trained and evaluated, and several at once, on this machine or on a cluster."""

import json
import multiprocessing
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path

import torch

from ...pipeline.cache.feature_cache import FeatureCache
from ...pipeline.device import cores, pick_device, within_memory
from ...pipeline.errors import CacheError, XretError
from ...pipeline.reading.placement import Resident
from ...pipeline.wording import counted
from ..evaluation.evaluation import Result, evaluate
from ..model import build_model, feature_facts
from ..recipes.blocks import Recipe
from ..runs.features import batches_of, views_to_draw
from ..runs.run import write_json
from ..training.preparation import placement_of
from ..training.training import train

# Weights and batches are drawn from torch's global generator, which two cells in one process would share.
_one_at_a_time = threading.Lock()


@dataclass(frozen=True)
class Cell:
    """A variant with a seed: all that whoever trains it must know. The paths of `run` and `store` are absolute."""

    run: str
    store: str
    recipe: Recipe
    seed: int
    split: str
    device: str
    views: bool = False  # whether it is evaluated by the mean over all views of an image

    @property
    def title(self) -> str:
        """The cell as a line of progress names it."""
        return "/".join(Path(self.run).parts[-2:])

    def results(self) -> tuple[Result, ...] | None:
        """Return the results of a finished cell, or None."""
        try:
            content = json.loads((Path(self.run) / "eval.json").read_text(encoding="utf-8"))
            results = tuple(Result(**result) for result in content["results"])
            other = (content.get("views", 1) > 1) != self.views
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return None if other or not results or any(result.split != self.split for result in results) else results


Outcome = tuple[Result, ...] | str  # what a finished cell came to, or the sentence that it ended in
Record = Callable[[Cell, Outcome], None]


def run_cell(cell: Cell, resident: Resident | None = None) -> Outcome:
    """Train a cell, or go on with it, and evaluate it; where that fails, return the sentence.

    `resident` has the features that other cells have in memory.
    """
    run = Path(cell.run)
    if not (run.parents[1] / "ablation.json").is_file():
        return f"{run.parents[1]} is missing on {socket.gethostname()}: --out must be a folder that all workers share"
    with _one_at_a_time:
        try:
            train(cell.store, cell.recipe, run, device=cell.device, seed=cell.seed, resume=True, resident=resident)
            evaluation = evaluate(run, store=cell.store, split=cell.split, device=cell.device, views=cell.views)
            write_json(run / "eval.json", evaluation.to_dict())
        except XretError as error:
            return str(error)
        except Exception as error:  # whatever happens to one cell, the others are trained
            return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return evaluation.results


def at_once(jobs: int, device: torch.device) -> int:
    """Return how many of `jobs` cells can be trained at once; say so where it is fewer.

    On a CPU a cell computes with as many threads as it would alone, because its numbers depend on them. Without cores
    for all of these threads, cells at once would take longer than one after another.
    """
    threads = torch.get_num_threads()
    here = cores()
    fitting = jobs if device.type != "cpu" else min(jobs, max(1, here // threads))
    if fitting < jobs:
        alone = f"; OMP_NUM_THREADS=1 makes room for {min(jobs, here)}" if threads > 1 else ""
        print(
            f"--jobs {jobs}: {fitting} at once, because a cell takes {counted(threads, 'thread')} and this machine has "
            f"{counted(here, 'core')}{alone}",
            file=sys.stderr,
        )
    return fitting


def load_features(cells: Sequence[Cell]) -> Resident:
    """Put into memory what the cells train on, for their processes to share."""
    resident, loaded = Resident(), set()
    for cell in cells:
        cache, data = FeatureCache.open(cell.store), cell.recipe.data
        sets = cache.image_set(data.image), cache.caption_set(data.text)
        with torch.device("meta"):
            model = build_model(cell.recipe, feature_facts(sets[0]), feature_facts(sets[1]))
        views = views_to_draw(sets[0], cell.recipe)
        wanted = (*(one.name for one in sets), *sorted(model.image_fields), *sorted(model.caption_fields), len(views))
        target = pick_device(cell.device)
        with suppress(Exception), within_memory(target):  # the cell itself reports what goes wrong
            placement = placement_of(cell.run, cell.recipe, resume=True)
            if (placement, wanted) not in loaded and placement != "stream":
                loaded.add((placement, wanted))
                batches_of(sets, model, "train", target, placement, resident, views)
    return resident


def in_processes(cells: Sequence[Cell], jobs: int, record: Record) -> None:
    """Train the cells in `jobs` processes, which share their features, and hand each outcome to `record` as it comes.

    A process that dies, for lack of memory or because someone killed it, takes one cell with it; another takes its
    place.

    Raises:
        RunError: the memory that processes share does not suffice for the features.
    """
    resident, waiting = load_features(cells), list(reversed(cells))
    context = multiprocessing.get_context("spawn")  # a fork would inherit torch's threads and the GPU's state
    busy: dict[Connection, tuple[SpawnProcess, Cell]] = {}

    def start() -> tuple[Connection, SpawnProcess]:
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs, torch.get_num_threads(), resident))
        process.start()
        theirs.close()  # the end of the process then ends what is received
        return ours, process

    def give(connection: Connection, process: SpawnProcess) -> None:
        cell = waiting.pop()
        connection.send(cell)
        busy[connection] = process, cell

    try:
        for _ in range(min(jobs, len(waiting))):
            give(*start())
        while busy:
            ready = wait(list(busy))
            for connection in [one for one in busy if one in ready]:
                process, cell = busy.pop(connection)
                try:
                    record(cell, connection.recv())
                except (EOFError, ConnectionResetError):
                    process.join()
                    record(cell, f"its process ended with exit code {process.exitcode}; see {cell.run}.log")
                    if waiting:
                        connection, process = start()
                if waiting:
                    give(connection, process)
                else:
                    connection.close()
                    process.join()
    finally:
        for process, _ in busy.values():
            process.terminate()
            process.join()


def _work(cells: Connection, threads: int, resident: Resident) -> None:
    """Train what comes through the connection until it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group, and the parent ends this process
    threading.Thread(target=_die_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    while True:
        try:
            cell = cells.recv()
        except EOFError:
            return
        log = Path(f"{cell.run}.log")
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w", encoding="utf-8") as file, redirect_stderr(file):
            cells.send(run_cell(cell, resident))


def _die_with_parent() -> None:
    """End this process when the one that started it is gone: else two would train a cell after a new start."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def on_cluster(cells: Sequence[Cell], address: str, record: Record) -> None:
    """Let the workers of a Dask cluster train the cells; only their tables travel.

    Raises:
        CacheError: no scheduler answers, it has no worker, or they have another version of this package.
    """
    from distributed import Client, as_completed

    from ...pipeline.extraction.schedule import count_workers

    count_workers(address)
    with Client(address, set_as_default=False) as client:
        print(f"Dask dashboard: {client.dashboard_link}", file=sys.stderr)
        workers = client.scheduler_info(n_workers=-1)["workers"].values()
        resources = {"GPU": 1} if any("GPU" in worker["resources"] for worker in workers) else None
        futures = {client.submit(run_cell, cell, pure=False, resources=resources): cell for cell in cells}
        for future in as_completed(futures, loop=client.loop):
            cell = futures[future]
            if future.status == "finished":
                record(cell, future.result())
            elif future.status == "cancelled":
                raise CacheError(
                    f"the Dask scheduler at {address} has gone, or cancelled the cells; start one and run the same "
                    "command again: it goes on where it was"
                )
            else:
                record(cell, f"on the cluster: {str(future.exception()).partition(chr(10))[0]}")
