"""How extraction and ablation speed up with the workers of a Dask cluster, whose encoder or head sleeps as it computes.

    python tests/benchmarks/cluster.py extract
    python tests/benchmarks/cluster.py ablate

Workers are processes of this machine, of one thread each. What sleeps in the place of computing leaves the cores to all
of them. Prints a line of JSON for each number of workers: seconds until workers that have just started have done a
little, seconds of the work, the efficiency against one worker, and the share of the time in which each worker sleeps.
"""

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from distributed import Client
from extraction import same_picture
from sizes import say, small

import xret
from xret.pipeline.data.images import open_image

PICTURE = 0.1  # seconds that a picture takes
_computing = threading.Lock()  # a worker has one device


class Sleeping:
    """Encodes pictures to as many numbers as ResNet-152, and sleeps the while."""

    name, kind, space = "sleeping", "grid", None
    rows, grid, channels, global_channels = 49, (7, 7), 2048, 2048
    extras = ()

    def __init__(self, weights: str, image_size: int, device: str) -> None:
        self.identity = {"weights": weights, "preprocessing": {"stretch": 224}, "layer": None}
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


@contextmanager
def cluster(workers: int) -> Iterator[str]:
    """Give the address of a new scheduler, whose workers are processes that find this file."""
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:

        def start(what: str, *options: str) -> None:
            command = [sys.executable, "-m", "dask", what, "--scheduler-file", f"{folder}/scheduler.json", *options]
            paths = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
            process = subprocess.Popen(command, cwd=folder, env=paths, stderr=subprocess.DEVNULL)
            stack.callback(process.wait)
            stack.callback(process.kill)

        start("scheduler", "--port", "0", "--no-dashboard")
        for _ in range(workers):
            start("worker", "--nthreads", "1", "--no-nanny", "--no-dashboard", "--memory-limit", "0")
        with Client(scheduler_file=f"{folder}/scheduler.json", set_as_default=False) as client:
            client.wait_for_workers(workers)
            yield client.scheduler.address


def measure(numbers: list[int], work: Callable[[str, str, bool], float]) -> None:
    """Print a line for each number of workers.

    `work` takes an address, a name, and whether to do a little alone; it returns the seconds that workers slept.
    """
    alone = 0.0
    for workers in numbers:
        with cluster(workers) as address:
            moments = [time.perf_counter()]
            for little in (True, False):
                slept = work(address, f"{workers}-{little}", little)
                moments.append(time.perf_counter())
        start, seconds = (end - begin for begin, end in pairwise(moments))
        alone = alone or seconds * workers
        rates = {"efficiency": round(alone / workers / seconds, 3), "asleep": round(slept / workers / seconds, 3)}
        say(workers=workers, start=round(start, 1), seconds=round(seconds, 1), **rates)


@main.command()
@click.option("--pictures", default=640)
@click.option("--workers", "numbers", multiple=True, type=int, default=[1, 2, 4])
@small(pictures=60, numbers=[1, 2])
def extract(pictures: int, numbers: list[int]) -> None:
    """Encode pictures on several numbers of workers."""
    with tempfile.TemporaryDirectory() as folder:
        few, many = (same_picture(Path(folder, str(count)), count, side=224) for count in (20, pictures))

        def work(address: str, name: str, little: bool) -> float:
            store = f"{folder}/{name}.zarr"
            xret.extract(few if little else many, store, visual="cluster:Sleeping", text=None, workers=address)
            return PICTURE * pictures

        measure(numbers, work)


if __name__ == "__main__":
    main()
