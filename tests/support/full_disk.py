"""Extract onto a disk that is full, several times, then onto one that is not; run by `test_faults` where it may mount.

Every attempt is a process of its own that goes the way of the command line.
"""

import os
import subprocess
import sys
from pathlib import Path

import small_encoder
from small_extraction import files

from xret.cli import main
from xret.pipeline.extraction import schedule as engine  # noqa: F401  (imported once, here)

WORDS = ["--visual", "resnet18", "--visual-weights", "random:0", "--text", "words", "--shard-images", "8"]


def attempt(manifest, url, said):
    """Extract; return the exit code and what was said on standard error."""
    child = os.fork()
    if not child:
        os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        main(["extract", manifest, "--store", str(url), *WORDS])
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said.read_text()


def run(manifest, disk):
    small_encoder.use()
    code, said = attempt(manifest, disk.parent / "whole.zarr", disk.parent / "said")
    assert code == 0, said
    whole = files(disk.parent / "whole.zarr")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], check=True)
    refusals = 0
    for size in range(64, 2000, 48):
        subprocess.run(["mount", "-o", f"remount,size={size}k", str(disk)], check=True)
        code, said = attempt(manifest, disk / "s.zarr", disk.parent / "said")
        if not code:
            break
        refusals += 1
        sentence = said.strip().splitlines()[-1]
        assert code == 1, said
        assert "Traceback" not in said, said
        assert sentence.startswith(f"Error: No space left on device ({disk / 's.zarr'}"), said
        there = files(disk / "s.zarr")
        for mark in (name for name in there if "/done/c/" in name):
            group, shard = mark.split("/done/c/")
            of_shard = [name for name in whole if name.startswith(f"{group}/") and f"/c/{shard}/" in f"{name}/"]
            assert all(there.get(name) == whole[name] for name in of_shard), mark
    assert files(disk / "s.zarr") == whole
    print(f"refused {refusals} times; the store is whole")


if __name__ == "__main__":
    run(sys.argv[1], Path(sys.argv[2]))
