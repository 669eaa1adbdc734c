"""Kill an extraction at random moments until it is through, and compare every byte with one that nobody disturbed.

    PYTHONPATH=tests/support python tests/benchmarks/kill_rounds.py tiny.yaml EMPTY_FOLDER --rounds 200

With ``--from`` and ``--source`` an import is killed instead. The encoder takes a millisecond, all else is as ever. The
processes are forked from one that has imported everything and started no thread, so that a start costs nothing.
"""

import argparse
import os
import random
import shutil
import signal
import time
from functools import partial
from pathlib import Path

import small_encoder
from small_extraction import SMALL, files

from xret.pipeline.data.manifest import load_manifest
from xret.pipeline.exchange.importers.importing import ImportOptions, import_features
from xret.pipeline.extraction import schedule as engine  # noqa: F401  (torch and Dask are imported once, here)
from xret.pipeline.extraction.extraction import extract


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("manifest")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--from", dest="format_")
    parser.add_argument("--source", type=Path)
    given = parser.parse_args()
    small_encoder.use()
    manifest, dice = load_manifest(given.manifest), random.Random(given.seed)
    work = partial(extract, manifest, options=SMALL)
    if given.format_:
        options = ImportOptions(given.format_, given.source, on_error="skip")
        work = partial(import_features, manifest, options=options)
    began = time.monotonic()
    if not finishes(work, given.folder / "whole.zarr"):
        raise SystemExit("the undisturbed extraction failed")
    seconds = time.monotonic() - began
    whole = files(given.folder / "whole.zarr")
    kills = 0
    for number in range(given.rounds):
        url, most = given.folder / "killed.zarr", seconds
        shutil.rmtree(url, ignore_errors=True)
        while not finishes(work, url, dice.uniform(0, most)):
            kills, most = kills + 1, 1.05 * most  # it comes to its end also on a machine that has become slower
            check_marks(files(url), whole)
        if files(url) != whole:
            raise SystemExit(f"round {number}: the store differs from the undisturbed one")
    print(f"{given.rounds} rounds, {kills} kills, no file differs")


def finishes(work, url, kill_after=None):
    """Return whether the work ended by itself before it was killed."""
    child = os.fork()
    if not child:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        try:
            work(url=str(url))
        except BaseException as error:
            print(f"the extraction failed: {error!r}", flush=True)
            os._exit(1)
        os._exit(0)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        raise SystemExit("an extraction ended in an error")
    return os.WIFEXITED(status)


def check_marks(there, whole):
    """Stop if a shard is marked as done and not all of it is there."""
    for mark in (name for name in there if "/done/c/" in name):
        group, shard = mark.split("/done/c/")
        for name, data in whole.items():
            if name.startswith(f"{group}/") and f"/c/{shard}/" in f"{name}/" and there.get(name) != data:
                raise SystemExit(f"{mark} is there, and {name} is not")


if __name__ == "__main__":
    main()
