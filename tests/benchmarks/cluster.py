"""How extraction and ablation speed up with the workers of a Dask cluster, whose encoder or head sleeps as it computes.

    PYTHONPATH=tests/support OMP_NUM_THREADS=1 python tests/benchmarks/cluster.py extract
    PYTHONPATH=tests/support OMP_NUM_THREADS=1 python tests/benchmarks/cluster.py ablate
    PYTHONPATH=tests/support python tests/benchmarks/cluster.py scheduler

Workers are processes of this machine, of one thread each. What sleeps in the place of computing leaves the cores to all
of them. Prints a line of JSON for each number of workers: seconds until workers that have just started have done a
little, those of the tasks and of the whole command, and their efficiency against one worker. `scheduler` sends tasks
that do nothing as an extraction sends its own, and prints what the scheduler holds after so many of them.
"""

import os
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from dask_processes import cluster
from extraction import same_picture
from sizes import say, seconds_of, small
from small_store import make_store

import xret
from xret.heads.modules.aggregators.pooling import Average
from xret.nn import Aggregated
from xret.pipeline.data.images import open_image
from xret.pipeline.workers import connect, run_tasks

# What workers import.
MODULES = os.pathsep.join(map(str, (Path(__file__).parent, Path(__file__).parents[1] / "support")))
PICTURE = 0.1  # seconds that a picture takes
STEP = 0.1  # seconds that a batch of a training takes
_computing = threading.Lock()  # a worker has one device


class Sleeping:
    """Encodes pictures to a vector, and sleeps the while."""

    name, kind, space = "sleeping", "grid", None
    rows, grid, channels, global_channels = 1, (1, 1), 512, 512
    extras = ()

    def __init__(self, weights: str, image_size: int, device: str) -> None:
        self.identity = {"weights": weights, "preprocessing": {"stretch": 32}, "layer": None}
        self.versions: dict[str, str] = {}

    def decode(self, picture: Any) -> tuple[torch.Tensor, tuple[int, int]]:
        """Read a picture at its size."""
        image = open_image(picture)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1), image.size

    def encode(self, pixels: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Take a while for each picture."""
        with _computing:
            time.sleep(PICTURE * len(pixels))
        local = np.ones((len(pixels), self.rows, self.channels), np.float32)
        return local, local[:, 0]


@click.group()
def main() -> None:
    """Benchmarks of clusters."""


def measure(numbers: list[int], work: Callable[[str, str, bool], float]) -> None:
    """Print a line for each number of workers.

    `work` takes an address, a name, and whether to do a little alone; it returns the seconds that tasks took.
    """
    first: dict[str, float] = {}
    for workers in numbers:
        with tempfile.TemporaryDirectory() as folder, cluster(Path(folder), [MODULES] * workers) as (address, _):
            start = seconds_of(partial(work, address, f"{workers}-start", True))
            began = time.perf_counter()
            seconds = {"tasks": work(address, f"{workers}", False), "command": time.perf_counter() - began}
        first = first or {name: workers * value for name, value in seconds.items()}
        efficiency = {name: round(first[name] / workers / value, 3) for name, value in seconds.items()}
        rounded = {name: round(value, 1) for name, value in seconds.items()}
        say(workers=workers, start=round(start, 1), seconds=rounded, efficiency=efficiency)


@main.command()
@click.option("--pictures", default=1280)
@click.option("--workers", "numbers", multiple=True, type=int, default=[1, 2, 4])
@small(pictures=60, numbers=[1, 2])
def extract(pictures: int, numbers: list[int]) -> None:
    """Encode pictures on several numbers of workers."""
    with tempfile.TemporaryDirectory() as folder:
        few, many = (same_picture(Path(folder, str(count)), count, side=32) for count in (64, pictures))

        def work(address: str, name: str, little: bool) -> float:
            store = f"{folder}/{name}.zarr"
            data = few if little else many
            return xret.extract(data, store, visual="cluster:Sleeping", text=None, workers=address).sets[0].seconds

        measure(numbers, work)


class SlowMean(Average):
    """The mean of the rows, which takes a while."""

    def forward(self, local: torch.Tensor, length: torch.Tensor, global_: torch.Tensor) -> Aggregated:
        """Wait, and average."""
        time.sleep(STEP)
        return super().forward(local, length, global_)


@main.command()
@click.option("--cells", default=8)
@click.option("--epochs", default=3)
@click.option("--workers", "numbers", multiple=True, type=int, default=[1, 2, 4])
@small(cells=2, epochs=1, numbers=[1, 2])
def ablate(cells: int, epochs: int, numbers: list[int]) -> None:
    """Train cells on several numbers of workers."""
    with tempfile.TemporaryDirectory() as folder:
        store = make_store(f"{folder}/s.zarr", train=480)

        def work(address: str, name: str, little: bool) -> float:
            settings = {"model.dim": 8, "adapter.words.word_dim": 4, "data.batch_size": 48, "schedule.epochs": epochs}
            settings |= {"aggregator.image": "cluster:SlowMean"}
            vary = {"loss.triplet.margin": [(1 + cell) / 100 for cell in range(max(numbers) if little else cells)]}
            if little:
                settings["schedule.epochs"] = 1
            how: dict[str, Any] = {"recipe": "vsepp", "settings": settings, "device": "cpu", "jobs": address}
            began = time.perf_counter()
            found = xret.ablate(store, f"{folder}/{name}", vary=vary, **how)
            if found.failed:
                raise SystemExit(str(found))
            return time.perf_counter() - began

        measure(numbers, work)


def held(process: int) -> int:
    """Return how many MB a process holds that are of no file."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) // 1000 for line in lines if line.startswith("RssAnon:"))


@main.command()
@click.option("--tasks", "numbers", multiple=True, type=int, default=[100, 1000, 10_000])
@small(numbers=[20])
def scheduler(numbers: list[int]) -> None:
    """Send tasks to two workers, and look at the scheduler's memory."""
    for tasks in numbers:
        with (
            tempfile.TemporaryDirectory() as folder,
            cluster(Path(folder), [MODULES] * 2) as (address, processes),
            connect(address) as client,
        ):
            before = held(processes[0].pid)
            done = sum(1 for _ in run_tasks(client, int, range(tasks), each=2))
            say(tasks=done, before_mb=before, after_mb=held(processes[0].pid))


if __name__ == "__main__":
    main()
