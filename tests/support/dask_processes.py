"""A Dask cluster of processes, each of which may be killed or be another than the others."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from distributed import Client


@contextmanager
def cluster(folder: Path, paths: Sequence[Path | str]) -> Iterator[tuple[str, list[subprocess.Popen[bytes]]]]:
    """Give the address of a new scheduler, its process, and those of its workers ``w0``, ``w1``, …, of one thread each.

    A worker finds modules in its path of these besides.
    """
    file, processes = folder / "scheduler.json", []
    with ExitStack() as stack:
        for number, path in enumerate(("", *paths), -1):
            how = ["worker", "--name", f"w{number}", "--nthreads", "1", "--no-nanny", "--memory-limit", "0"]
            command = [sys.executable, "-m", "dask", *(how if number >= 0 else ["scheduler", "--port", "0"])]
            command += ["--scheduler-file", str(file), "--no-dashboard"]
            environment = {**os.environ, "PYTHONPATH": str(path)}
            process = subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.DEVNULL)
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        with Client(scheduler_file=str(file), set_as_default=False) as client:
            client.wait_for_workers(len(paths))
            address = client.scheduler.address
        yield address, processes
