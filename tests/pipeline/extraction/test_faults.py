"""Faults caused on purpose: kills, writes that fail, damage anywhere. What is marked stays true, and all resumes."""

import contextlib
import errno
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import small_encoder
from distributed import Client
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_extraction import SMALL, files

from xret.pipeline.data.manifest import load_manifest
from xret.pipeline.errors import CacheError, SampleError
from xret.pipeline.extraction import schedule as engine
from xret.pipeline.extraction.extraction import extract
from xret.pipeline.store import FeatureCache
from xret.pipeline.store.upkeep.verify import Damage, verify

TESTS = Path(__file__).parents[2]
PATHS = os.pathsep.join([str(TESTS / "support"), os.environ.get("PYTHONPATH", "")])


def run(*words, **how):
    """Run Python with the tests' helpers at hand; return what it said."""
    environment = {**os.environ, "PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1"}
    result = subprocess.run([*words], capture_output=True, text=True, env=environment, **how)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


# --- Files that are no pictures


@pytest.mark.timeout(60)
def test_what_is_no_file_fails_as_a_picture_does_and_the_rest_goes_on(tiny_dataset, tmp_path):
    manifest = load_manifest(tiny_dataset())
    odd = [manifest.images / f"{number}.jpg" for number in range(4)]
    for path in odd:
        path.unlink()
    os.mkfifo(odd[0])
    odd[1].symlink_to("/dev/zero")
    with odd[2].open("wb") as file:
        file.truncate(40_000_000_000)
    odd[3].mkdir()
    summary = extract(manifest, str(tmp_path / "s.zarr"), replace(SMALL, on_error="skip"))
    no_file = "this is a folder, a pipe or a device, and not a regular file"
    reasons = [no_file, no_file, "the file has 40.0 GB, and a picture at most 500.0 MB", no_file]
    assert sorted(summary.sets[0].reasons) == [f"{n}.jpg: {reason}" for n, reason in enumerate(reasons)]
    with pytest.raises(SampleError, match="not a regular file; repair or remove it, or go on with --on-error skip"):
        extract(manifest, str(tmp_path / "t.zarr"), SMALL)


# --- Killed; see also `test_unchanged`


@pytest.fixture
def dask(tmp_path):
    """Start a scheduler and a worker as processes of their own: `dask()` gives the first and the address."""
    started = []

    def start():
        file = tmp_path / f"scheduler-{len(started)}.json"
        cli = [sys.executable, "-m", "distributed.cli.dask_"]
        scheduler = [*cli[:2], f"{cli[2]}scheduler", "--port=0", "--no-dashboard", f"--scheduler-file={file}"]
        worker = [*cli[:2], f"{cli[2]}worker", f"--scheduler-file={file}", "--nthreads=1", "--no-nanny"]
        worker += ["--no-dashboard", f"--preload={TESTS / 'support' / 'small_encoder.py'}"]
        environment = {**os.environ, "PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1"}
        for words in (scheduler, worker):
            with (tmp_path / "log").open("a") as log:
                started.append(subprocess.Popen(words, env=environment, stdout=log, stderr=log))
            while not file.exists():
                time.sleep(0.01)
        address = json.loads(file.read_text())["address"]
        with Client(address, set_as_default=False) as client:
            client.wait_for_workers(1, timeout=60)
        return started[-2], address

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_scheduler_killed_in_the_middle_is_a_sentence_and_another_goes_on(dask, tiny_dataset, tmp_path, monkeypatch):
    small_encoder.use(monkeypatch)
    monkeypatch.setattr(engine, "PATIENCE", 3.0)
    manifest = load_manifest(tiny_dataset(train=400, val=8, test=8))
    whole, url = tmp_path / "whole.zarr", tmp_path / "s.zarr"
    extract(manifest, str(whole), SMALL)
    scheduler, address = dask()

    def kill():
        while len(list(url.glob("images/*/done/c/*"))) < 3:
            time.sleep(0.005)
        scheduler.kill()

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    with pytest.raises(CacheError, match=f"the Dask scheduler at {address} has gone.*run the same command again"):
        extract(manifest, str(url), replace(SMALL, scheduler=address))
    killer.join()
    marks = len(list(url.glob("images/*/done/c/*")))
    assert 3 <= marks < 52
    summary = extract(manifest, str(url), replace(SMALL, scheduler=dask()[1]))
    assert summary.sets[0].shards_before == marks
    assert files(url) == files(whole)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_scheduler_that_hangs_is_a_sentence(dask, tiny_dataset, tmp_path, monkeypatch):
    small_encoder.use(monkeypatch)
    monkeypatch.setattr(engine, "PATIENCE", 3.0)
    monkeypatch.setattr(engine, "SILENCE", 2.0)
    scheduler, address = dask()

    def suspend():
        while not list((tmp_path / "s.zarr").glob("images/*/done/c/*")):
            time.sleep(0.005)
        scheduler.send_signal(signal.SIGSTOP)

    threading.Thread(target=suspend, daemon=True).start()
    manifest = load_manifest(tiny_dataset(train=400, val=8, test=8))
    with pytest.raises(CacheError, match=f"the Dask scheduler at {address} has gone.*run the same command again"):
        extract(manifest, str(tmp_path / "s.zarr"), replace(SMALL, scheduler=address))


# --- Writes that fail


@pytest.fixture
def images(tiny_dataset, monkeypatch):
    """Return a small manifest; every image encoder takes a millisecond."""
    small_encoder.use(monkeypatch)
    return load_manifest(tiny_dataset(train=10, val=2))


@pytest.mark.parametrize(
    "first", [3, 45, 64, *(pytest.param(n, marks=pytest.mark.slow) for n in range(0, 90) if n not in (3, 45, 64))]
)
def test_a_disk_that_fills_up_at_any_write_costs_no_more_than_that_shard(images, tmp_path, monkeypatch, first):
    whole, url = str(tmp_path / "whole.zarr"), str(tmp_path / "s.zarr")
    extract(images, whole, SMALL)
    left, real = first, Path.replace

    def replace_unless_full(path, target):
        nonlocal left
        if str(target).startswith(url):
            left -= 1
            if left < 0:
                path.write_bytes(path.read_bytes()[:7])
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return real(path, target)

    monkeypatch.setattr(Path, "replace", replace_unless_full)
    with contextlib.suppress(OSError):
        extract(images, url, SMALL)
    assert left < 0 or files(url) == files(whole)
    monkeypatch.setattr(Path, "replace", real)
    there, expected = files(url), files(whole)
    for mark in (name for name in there if "/done/c/" in name):
        group, shard = mark.split("/done/c/")
        of_shard = [name for name in expected if name.startswith(f"{group}/") and f"/c/{shard}/" in f"{name}/"]
        assert all(there.get(name) == expected[name] for name in of_shard)
    extract(images, url, SMALL)
    assert files(url) == expected


@pytest.mark.slow
def test_a_real_disk_that_is_full(tiny_dataset, tmp_path):
    mount = ["unshare", "--user", "--map-root-user", "--mount"]
    disk = tmp_path / "disk"
    disk.mkdir()
    try:
        subprocess.run([*mount, "mount", "-t", "tmpfs", "tmpfs", str(disk)], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no file system can be mounted here: unshare is missing or not permitted")
    said = run(*mount, sys.executable, str(TESTS / "support" / "full_disk.py"), str(tiny_dataset()), str(disk))
    assert "refused 0 times" not in said
    assert said.endswith("the store is whole\n")


# --- Damage anywhere


@pytest.fixture
def sound(images, tmp_path):
    """Return a finished store and its files."""
    extract(images, str(tmp_path / "s.zarr"), SMALL)
    return tmp_path / "s.zarr", files(tmp_path / "s.zarr")


def flip(data, dice):
    at = dice.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << dice.randrange(8))]) + data[at + 1 :]


def truncate(data, dice):
    return data[: dice.randrange(len(data))]


def fill_with_zeros(data, _dice):
    return bytes(len(data))


def lengthen(data, dice):
    return data + dice.randbytes(dice.randrange(1, 20))


def swap(data, dice):
    """Exchange two stretches, as a confused disk does."""
    middle = dice.randrange(1, len(data))
    return data[middle:] + data[:middle]


def delete(_data, _dice):
    return None


DAMAGE = [flip, truncate, fill_with_zeros, lengthen, swap, delete]


@pytest.mark.parametrize("examples", [20, pytest.param(600, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_damage_anywhere_is_found_and_repaired_or_explained(sound, images, examples):
    store, whole = sound

    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.sampled_from(sorted(whole)), st.sampled_from(DAMAGE), st.integers(0, 2**32))
    def damage(name, kind, seed):
        broken = kind(whole[name], random.Random(seed))
        if broken == whole[name]:
            return
        path = store / name
        path.unlink() if broken is None else path.write_bytes(broken)
        try:
            check(name, kind)
        finally:
            for file, data in whole.items():
                (store / file).write_bytes(data)

    def check(name, kind):
        node = name.split("/c/")[0].removesuffix("zarr.json").rstrip("/")
        if kind is delete and "/done/c/" in name:  # it says that the shard is to be computed, which is no damage
            assert verify(str(store)).shards == 5
        else:
            named = named_by_verify(store)
            assert named & {node or "/", node.rpartition("/")[0] or "/"}, (name, named)
        if name.endswith("zarr.json") and not name.startswith(("samples", "images/zarr", "captions/zarr")):
            with pytest.raises(CacheError, match=r"restore that file|no feature cache is there|is not empty and holds"):
                extract(images, str(store), replace(SMALL, repair=True))
        else:
            extract(images, str(store), replace(SMALL, repair=True))
            assert files(store) == whole

    damage()
    assert files(store) == whole


def named_by_verify(store):
    try:
        report = verify(str(store))
    except CacheError as error:  # of the root there is nothing to go on from
        assert "no feature cache is there" in str(error)
        return {"/"}
    assert not report.ok
    return {damage.array for damage in report.damaged}


def test_damage_names_the_samples(sound):
    store, whole = sound
    cache = FeatureCache.open(str(store))
    spans = {"images": [(0, 8), (8, 10), (10, 12)]}
    starts = [*cache.caption_start.tolist(), cache.captions]
    spans["captions"] = [(starts[first], starts[last]) for first, last in spans["images"]]
    for name in (name for name in whole if "/c/" in name and not name.startswith("samples")):
        array, _, rest = name.partition("/c/")
        shard = int(rest.split("/")[0])
        (store / name).write_bytes(flip(whole[name], random.Random(name)))
        samples = spans[array.split("/")[0]][shard]
        assert verify(str(store)).damaged == (Damage(array, shard, samples),)
        (store / name).write_bytes(whole[name])


def test_a_store_that_is_moved_meanwhile_is_not_begun_again_in_its_place(tiny_dataset, tmp_path, monkeypatch):
    small_encoder.use(monkeypatch)
    manifest, url = load_manifest(tiny_dataset()), tmp_path / "s.zarr"
    encode, calls = small_encoder.SmallEncoder.encode, []

    def moving(self, pixels):
        calls.append(1)
        if len(calls) == 3:
            url.rename(tmp_path / "moved.zarr")
        return encode(self, pixels)

    monkeypatch.setattr(small_encoder.SmallEncoder, "encode", moving)
    with pytest.raises(CacheError, match=r"s\.zarr has gone while it was written; move it back, or name its new place"):
        extract(manifest, str(url), replace(SMALL, workers=1))
    assert not url.exists()
    extract(manifest, str(tmp_path / "moved.zarr"), SMALL)
    assert verify(str(tmp_path / "moved.zarr")).ok
