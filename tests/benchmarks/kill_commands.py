"""Kill every command that writes at random moments, again and again until it is through, and compare the outcome.

    PYTHONPATH=tests/support OMP_NUM_THREADS=1 python tests/benchmarks/kill_commands.py EMPTY_FOLDER --rounds 100

A round begins anew and ends when the command ends by itself. Its outcome is that of a command that nobody disturbed,
byte by byte but for times. ``--only extract-tar,index`` takes some of the commands. All processes are forked from one
that has imported everything and started no thread.
"""

import argparse
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from small_extraction import files
from small_runs import HEAD, make_pictures, make_run, make_store

from xret.cli import main as xret
from xret.heads.training import training  # noqa: F401  (what commands import is imported once, here)
from xret.pipeline.extraction import schedule  # noqa: F401

TRAIN = [*(f"--set={value}" for value in HEAD), "--device=cpu", "--seed=1"]
TUNE = ["--set=schedule.epochs=3", "--set=finetune.image_lr=0.1", "--visual-weights=random:0"]
TIMES = ("seconds", "duration", "datetime")


@dataclass(frozen=True)
class Case:
    """A command that writes below OUT; `begin` prepares OUT, `resume` are words that it goes on with."""

    words: list[str]
    outcome: Callable[[Path], object]
    begin: Callable[[Path, Path], None] = lambda _given, _out: None
    resume: tuple[str, ...] = ()
    once: bool = False  # it refuses to write again what is there


def damaged(given, out):
    """Copy the store, with a file of each of two sets damaged."""
    copied(given, out)
    for path in sorted((out / "s.zarr").glob("*/*/*/c/1*"))[:2]:
        file = path if path.is_file() else next(one for one in sorted(path.rglob("*")) if one.is_file())
        file.write_bytes(file.read_bytes()[:-1] + b"?")


def copied(given, out):
    """Copy the store."""
    shutil.copytree(given / "s.zarr", out / "s.zarr")


def without_times(value):
    if isinstance(value, dict):
        return {key: without_times(one) for key, one in value.items() if not key.startswith(TIMES)}
    return [without_times(one) for one in value] if isinstance(value, list) else value


def learnt(out):
    """What a training leaves: its weights and its numbers."""
    found = {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("*.safetensors"))}
    for path in sorted(out.rglob("metrics.jsonl")):
        lines = [without_times(json.loads(line)) for line in path.read_text().splitlines()]
        found[str(path.relative_to(out))] = json.dumps(lines).encode()
    return found


def cases(given):
    """Return the commands by name; `given` holds what they read."""
    store, run, manifest = str(given / "s.zarr"), str(given / "run"), str(given / "data" / "pictures.yaml")
    network = ["--visual=mobilenet_v3_small", "--visual-weights=random:0", "--image-size=64", "--text=words"]
    written = ["--store=OUT/s.zarr", *network, "--shard-images=4"]
    extract = ["extract", manifest, *written]
    packed = {form: str(given / "packed" / f"{form}.yaml") for form in ("tar", "parquet", "saved")}
    changed = str(given / "changed" / "pictures.yaml")
    arrays = "local=images/local,length=images/length,id=images/file_name"
    source = ["--from=hdf5", f"--source={given / 'e.h5'}", f"--arrays={arrays}"]
    data = f"--data-root={given / 'data'}"
    return {
        "extract": Case(extract, files),
        **{f"extract-{form}": Case(["extract", path, *written], files) for form, path in packed.items()},
        "update": Case(["extract", changed, *written, "--update"], files, copied),
        "repair": Case([*extract, "--repair"], files, damaged),
        "merge": Case(["cache", "merge", "OUT/m.zarr", store], files),
        "import": Case(["import", manifest, "--store=OUT/i.zarr", *source], files),
        "export-npy": Case(["cache", "export", store, "--to=npy", "--out=OUT/npy"], files, once=True),
        "export-hdf5": Case(["cache", "export", store, "--to=hdf5", "--out=OUT/e.h5"], files, once=True),
        "export": Case(["export", run, "--out=OUT/e.safetensors", "--device=cpu"], files, once=True),
        "index": Case(["index", run, "--out=OUT/index", "--device=cpu"], files, once=True),
        "report": Case(["report", run, data, "--out=OUT/r.html", "--device=cpu"], lambda out: len(files(out))),
        "train-head": Case(
            ["train-head", store, "--recipe=vsepp", *TRAIN, "--set=schedule.epochs=4", "--out=OUT/run"],
            learnt,
            resume=("--resume",),
        ),
        "finetune": Case(
            ["finetune", run, data, "--reattach=image", *TUNE, "--device=cpu", "--out=OUT/run"],
            learnt,
            resume=("--resume",),
        ),
        "ablate": Case(
            ["ablate", store, "--recipe=vsepp", *TRAIN[:-1], "--vary=loss.triplet.margin=0.1,0.2", "--out=OUT/cells"],
            learnt,
        ),
        "tune": Case(
            ["tune", store, "--recipe=vsepp", *TRAIN, "--set=schedule.epochs=2", "--trials=3", "--out=OUT/tuned"],
            learnt,
        ),
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=100, help="of all commands together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="commands, separated by commas")
    parser.add_argument("--loud", action="store_true", help="let the commands print")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    given = asked.folder.resolve() / "given"
    if wait(fork(lambda: prepare(given), loud=True)) != 0:
        raise SystemExit("what the commands read cannot be made")
    chosen = {name: case for name, case in cases(given).items() if not asked.only or name in asked.only.split(",")}
    dice, bad = random.Random(asked.seed), 0
    print(f"{'command':16} {'seconds':>8} {'rounds':>7} {'kills':>6} {'equal':>6} {'left over':>9}", flush=True)
    for number, (name, case) in enumerate(chosen.items()):
        rounds = asked.rounds // len(chosen) + (number < asked.rounds % len(chosen))
        bad += attack(name, case, given, asked.folder.resolve() / name, rounds, dice, asked.loud)
    raise SystemExit(f"{bad} rounds ended otherwise" if bad else 0)


def prepare(given):
    """Make what the commands read."""
    from packed_data import PackedData  # of libraries that only this process needs

    manifest = make_pictures(given / "data")
    store = make_store(manifest, given / "s.zarr", shard_images=4)
    make_pictures(given / "changed", train=14)
    make_run(store, given / "run")
    data = PackedData(given / "packed")
    data.as_tars(), data.as_parquet(), data.as_saved()
    xret(["cache", "export", store, "--to=hdf5", f"--out={given / 'e.h5'}"], standalone_mode=False)


def attack(name, case, given, folder, rounds, dice, loud):
    """Print the line of a command; return in how many rounds the outcome was another."""
    whole, began = folder / "whole", time.monotonic()
    start(case, given, whole)
    began = time.monotonic()
    if finish(case, whole, loud) != 0:
        print(f"{name:16} fails without any kill", flush=True)
        return 1
    seconds, expected = time.monotonic() - began, case.outcome(whole)
    kills = equal = left = 0
    for _ in range(rounds):
        out = folder / "killed"
        start(case, given, out)
        ended, most = None, seconds
        while ended is None:
            ended = finish(case, out, loud, dice.uniform(0, most))
            kills += ended is None
            most *= 1.05  # it comes to its end also on a machine that has become slower
            if ended is None and case.once and any(path.suffix != ".partial" for path in out.iterdir()):
                ended = 0  # it was through, but for its last words
        equal += ended == 0 and case.outcome(out) == expected
        left += len(list(out.rglob("*.partial")))
    print(f"{name:16} {seconds:8.2f} {rounds:7} {kills:6} {equal:6} {left:9}", flush=True)
    return rounds - equal


def start(case, given, out):
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    case.begin(given, out)


def finish(case, out, loud, kill_after=None):
    """Return the exit code of a command, or None if it was killed before it ended."""
    words = [word.replace("OUT", str(out)) for word in (*case.words, *case.resume)]
    child = fork(lambda: xret(words, standalone_mode=False), loud)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)
    return wait(child)


def fork(work, loud):
    """Start a process that does this; return its id."""
    child = os.fork()
    if not child:
        if not loud:
            for stream in (1, 2):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        try:
            work()
        except BaseException as error:
            print(f"failed: {error!r}", flush=True)
            os._exit(1)
        os._exit(0)
    return child


def wait(child):
    status = os.waitpid(child, 0)[1]
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else None


if __name__ == "__main__":
    main()
