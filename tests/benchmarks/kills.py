"""Kill commands at random moments, resume them, and compare the values that they leave with an undisturbed command's.

    PYTHONPATH=tests/support OMP_NUM_THREADS=1 python tests/benchmarks/kills.py --kills 40
    PYTHONPATH=tests/support OMP_NUM_THREADS=1 python tests/benchmarks/kills.py --kills 40 --only extract,ablate

Values are compared through the public interface, not files: features, weights, losses, scores. All processes are
forked from one that has imported the libraries and started no thread.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path

import torch
import torchvision  # noqa: F401  (what takes long to import is imported once, here)
import unchanged
import zarr  # noqa: F401
from safetensors.numpy import load_file

import xret

MOST_IN_ROUND = 6  # kills, after which it is let through
# Of 0.9 MB a picture, so that there are several chunks.
LARGE = {"visual": "mobilenet_v3_small", "visual_weights": "random:0", "views": "dihedral:8", "dtype": "float32"}
SMALL = {"model.dim": 16, "data.batch_size": 12, "schedule.epochs": 4}


@dataclass(frozen=True)
class Given:
    """What the commands read."""

    folder: Path

    @property
    def manifest(self):
        return self.folder / "data" / "pictures.yaml"

    @property
    def store(self):
        return self.folder / "training.zarr"

    def prepare(self, names):
        manifest = unchanged.make_pictures(self.folder / "data", 20, 6)
        if names == ["extract"]:
            return
        models = unchanged.make_models(self.folder / "models")
        unchanged.extract(manifest, self.store, models, visual="hf:{vit}", text="words", dtype="float32")


def extract(given, out):
    unchanged.extract(given.manifest, out / "s.zarr", **LARGE, text="words")


def train(given, out):
    xret.train(given.store, recipe="setdiv", out=out / "run", settings=SMALL, device="cpu", seed=1, resume=True)


def ablate(given, out):
    vary = {"loss.triplet.margin": [0.1, 0.2]}
    settings = {**SMALL, "schedule.epochs": 2}
    found = xret.ablate(given.store, recipe="vsepp", out=out / "cells", vary=vary, settings=settings, device="cpu")
    (out / "table.txt").write_text(str(found).replace(str(out), "OUT"))


CASES = {"extract": extract, "train": train, "ablate": ablate}


def outcome(out):
    """Return the values below a folder: of stores, of weights, of metrics without times, and tables."""
    found = {}
    for store in sorted(out.glob("*.zarr")):
        cache = xret.FeatureCache.open(str(store))
        for path in cache.set_paths():
            found[path, "status"] = cache.set_at(path).status.tolist()
        found |= {
            (store.name, key): sha256(array.tobytes()).hexdigest() for key, array in unchanged.arrays_of(store).items()
        }
    for path in sorted(out.rglob("*")):
        name = str(path.relative_to(out))
        if path.name == "table.txt":
            found[name] = path.read_text()
        elif path.name == "metrics.jsonl":
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            found[name] = [(line["epoch"], line["loss"], line["rsum"]) for line in lines]
        elif path.suffix == ".safetensors":
            found[name] = {key: sha256(value.tobytes()).hexdigest() for key, value in load_file(path).items()}
    if not found:
        raise SystemExit(f"{out}: nothing is there")
    return found


def attack(name, given, folder, kills, dice, loud):
    """Kill a command so many times; print its line, and return in how many rounds the outcome was another."""
    work, whole, began = partial(CASES[name], given), folder / "whole", time.monotonic()
    if finish(work, whole, loud) != 0:
        raise SystemExit(f"{name} fails without any kill; --loud shows why")
    seconds, expected = time.monotonic() - began, outcome(whole)
    rounds = different = done = 0
    while done < kills:
        out, ended, in_round = folder / "killed", None, 0
        shutil.rmtree(out, ignore_errors=True)
        while ended is None:
            last = done == kills or in_round == MOST_IN_ROUND
            ended = finish(work, out, loud, None if last else dice.uniform(0, seconds))
            done, in_round = done + (ended is None), in_round + (ended is None)
        rounds += 1
        if ended != 0:
            print(f"{name}: ended with an error after {in_round} kills", flush=True)
        if ended != 0 or (now := outcome(out)) != expected:
            different += 1
            there = {key: value for key, value in now.items() if expected.get(key) != value} if ended == 0 else {}
            print(f"{name}: differs after {in_round} kills: {sorted(map(str, there))[:5]}", flush=True)
    print(f"{name:10} {seconds:8.2f} s {rounds:7} {done:6} {rounds - different:6}", flush=True)
    return different


def finish(work, out, loud, kill_after=None):
    """Return the exit code of some work, or None if it was killed before it ended."""
    out.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    child = os.fork()
    if not child:
        if not loud:
            for stream in (1, 2):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        try:
            work(out)
        except BaseException as error:
            print(f"failed: {error!r}", flush=True)
            os._exit(1)
        os._exit(0)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else None


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=40, help="of all commands together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="extract,train,ablate", help=f"of {', '.join(CASES)}; separated by commas")
    parser.add_argument("--loud", action="store_true", help="let the commands print")
    parser.add_argument("--small", action="store_true", help="three kills of one command")
    asked = parser.parse_args()
    if asked.small:
        asked.kills, asked.only = 3, "extract"
    torch.set_num_threads(1)
    names, dice = asked.only.split(","), random.Random(asked.seed)
    with tempfile.TemporaryDirectory() as folder:
        given = Given(Path(folder) / "given")
        if finish(lambda _: given.prepare(names), given.folder, asked.loud) != 0:
            raise SystemExit("what the commands read cannot be made; --loud shows why")
        print(f"{'command':10} {'seconds':>10} {'rounds':>7} {'kills':>6} {'equal':>6}", flush=True)
        different = 0
        for number, name in enumerate(names):
            kills = asked.kills // len(names) + (number < asked.kills % len(names))
            different += attack(name, given, Path(folder) / name, kills, dice, asked.loud)
    raise SystemExit(f"{different} rounds ended otherwise" if different else 0)


if __name__ == "__main__":
    main()
