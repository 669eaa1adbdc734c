"""Trainings beside each other on this machine, in processes that share one copy of the features."""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch

from ...pipeline.device import cores, pick_device, within_memory
from ...pipeline.errors import RunError
from ...pipeline.reading.placement import Resident
from ...pipeline.wording import counted
from ..model import build_model, feature_facts
from ..recipes.blocks import Recipe
from ..runs.features import batches_of, sets_named, views_to_draw
from ..training.preparation import cache_of, placement_of

# Weights and batches are drawn from torch's global generator, which two trainings in one process would share.
one_at_a_time = threading.Lock()


class Job(Protocol):
    """A training: all that whoever does it must know, fit to travel."""

    @property
    def run(self) -> str:
        """The run folder, absolute."""

    @property
    def store(self) -> str:
        """The address of a generation of the feature cache."""

    @property
    def recipe(self) -> Recipe:
        """Resolved."""

    @property
    def device(self) -> str:
        """``auto``, ``cpu`` or ``cuda``, where it is trained."""


J = TypeVar("J", bound=Job)
T = TypeVar("T")  # what came of a job


class Series(NamedTuple, Generic[J, T]):
    """What is trained, and what is done with what comes of it.

    Attributes:
        next_job: gives the job to begin now, or None; it may depend on what was recorded before.
        work: does a job, given features that other jobs have in memory; a function of a module, since it travels.
        record: is called with each outcome as it comes.
        lost: is called in the place of `record` with the sentence on a process that died with its job.
    """

    next_job: Callable[[], J | None]
    work: Callable[[J, Resident], T]
    record: Callable[[J, T], None]
    lost: Callable[[J, str], None]


def in_turn(series: Series[J, T]) -> None:
    """Do all jobs in this process, one after another."""
    resident = Resident()
    while (job := series.next_job()) is not None:
        series.record(job, series.work(job, resident))


def at_once(jobs: int, device: torch.device) -> int:
    """Return how many of `jobs` trainings can run at once; say so where it is fewer.

    On a CPU each computes with as many threads as it would alone, because its numbers depend on them. Without cores
    for all of these threads, trainings at once would take longer than one after another.

    Raises:
        RunError: `jobs` is below 1.
    """
    if jobs < 1:
        raise RunError(f"jobs must be at least 1, not {jobs}")
    threads = torch.get_num_threads()
    here = cores()
    fitting = jobs if device.type != "cpu" else min(jobs, max(1, here // threads))
    if fitting < jobs:
        alone = f"; OMP_NUM_THREADS=1 makes room for {min(jobs, here)}" if threads > 1 else ""
        print(
            f"--jobs {jobs}: {fitting} at once, because each takes {counted(threads, 'thread')} and this machine has "
            f"{counted(here, 'core')}{alone}",
            file=sys.stderr,
        )
    return fitting


def load_features(jobs: Sequence[Job]) -> Resident:
    """Put into memory what the jobs train on, for their processes to share."""
    resident, loaded = Resident(), set()
    for job in jobs:
        target = pick_device(job.device)
        with suppress(Exception), within_memory(target):  # the job itself reports what goes wrong
            sets = sets_named(cache_of(job.store, job.run, resume=True), job.recipe)
            with torch.device("meta"):
                model = build_model(job.recipe, feature_facts(sets[0]), feature_facts(sets[1]))
            views = views_to_draw(sets[0], job.recipe)
            wanted = (*(one.name for one in sets), str(model.image_fields), str(model.caption_fields), len(views))
            placement = placement_of(job.run, job.recipe, resume=True)
            if (placement, wanted) not in loaded and placement != "stream":
                loaded.add((placement, wanted))
                batches_of(sets, model, "train", target, placement, resident, views)
    return resident


def in_processes(series: Series[J, T], jobs: int, resident: Resident) -> None:
    """Do all jobs in `jobs` processes, which share the features in `resident`.

    A process that dies, for lack of memory or because someone killed it, takes one job with it; another takes its
    place.

    Raises:
        RunError: the memory that processes share does not suffice for the features.
    """
    context = multiprocessing.get_context("spawn")  # a fork would inherit torch's threads and the GPU's state
    idle: list[tuple[Connection, SpawnProcess]] = []
    busy: dict[Connection, tuple[SpawnProcess, J]] = {}

    def start() -> tuple[Connection, SpawnProcess]:
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, series.work, torch.get_num_threads(), resident))
        process.start()
        theirs.close()  # the end of the process then ends what is received
        return ours, process

    try:
        while True:
            while len(busy) < jobs and (job := series.next_job()) is not None:
                connection, process = idle.pop() if idle else start()
                connection.send(job)
                busy[connection] = process, job
            for connection, process in idle:
                connection.close()
                process.join()
            idle.clear()
            if not busy:
                return
            ready = wait(list(busy))
            for connection in [one for one in busy if one in ready]:
                process, job = busy.pop(connection)
                try:
                    outcome = connection.recv()
                except (EOFError, ConnectionResetError):
                    process.join()
                    series.lost(job, f"its process ended with exit code {process.exitcode}; see {job.run}.log")
                    continue
                idle.append((connection, process))
                series.record(job, outcome)
    finally:
        for process in [*(process for _, process in idle), *(process for process, _ in busy.values())]:
            process.terminate()
            process.join()


def _serve(jobs: Connection, work: Callable[[Any, Resident], Any], threads: int, resident: Resident) -> None:
    """Do what comes through the connection until it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group, and the parent ends this process
    threading.Thread(target=_die_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    while True:
        try:
            job = jobs.recv()
        except EOFError:
            return
        log = Path(f"{job.run}.log")
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w", encoding="utf-8") as file, redirect_stderr(file):
            jobs.send(work(job, resident))


def _die_with_parent() -> None:
    """End this process when the one that started it is gone: else two would do a job after a new start."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
