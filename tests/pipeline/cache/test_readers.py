"""Readers see whole shards only, whatever another process is writing meanwhile."""

import os
import random
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import readers
import small_encoder
from fsspec.implementations.local import LocalFileSystem
from readers import READERS, sees_whole_shards
from s3_server import Bucket

from xret.pipeline.cache.feature_cache import FeatureCache
from xret.pipeline.cache.feature_sets import NOT_DONE
from xret.pipeline.cache.rows import Rows
from xret.pipeline.cache.storage.store import Store
from xret.pipeline.cache.storage.zarr_stores import DiskStore, ObjectStore
from xret.pipeline.errors import CacheError

SUPPORT = Path(__file__).parents[2] / "support"
LOOKS = [(Store, name) for name in ("exists", "is_written", "names", "find_bytes", "size", "open_array", "read_array")]
LOOKS += [(Rows, "_bytes"), (DiskStore, "get"), (ObjectStore, "get")]
PACES = (1, 2, 9, 1000)


@pytest.fixture
def manifest(tiny_dataset, monkeypatch):
    small_encoder.use(monkeypatch)
    monkeypatch.setattr(small_encoder.SmallEncoder, "pause", 0)
    path = tiny_dataset(train=20, val=4)
    (path.parent / "images" / "9.jpg").write_bytes(b"no picture")
    return path


@pytest.fixture
def written(manifest, tmp_path, monkeypatch):
    """Return a finished store, and all files of it in the order in which they were written."""
    whole, log, real = tmp_path / "whole.zarr", [], Path.replace

    def logged(path, target):
        real(path, target)
        log.append((str(Path(target).relative_to(whole)), Path(target).read_bytes()))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", logged)
        readers.write(manifest, whole)
    return whole, log


class Writer:
    """Repeats what was written: after so many looks of a reader at the store so many files at each."""

    def __init__(self, put, log):
        self._put, self._log, self._at, self._wait, self._pace = put, log, 0, 0, 0

    def write(self, files):
        files, self._pace, pace = self._log[self._at : self._at + files], 0, self._pace  # what it looks at is no look
        for name, data in files:
            self._put(name, data)
        self._at, self._pace = self._at + len(files), pace

    @contextmanager
    def writing(self, wait, pace):
        """Write while a reader reads in this block."""
        with pytest.MonkeyPatch.context() as patch:
            for owner, name in LOOKS:
                patch.setattr(owner, name, self._before(getattr(owner, name)))
            self._wait, self._pace = wait, pace
            yield

    def _before(self, look):
        def run(*arguments, **named):
            self._wait -= 1
            if self._wait < 0:
                self.write(self._pace)
            return look(*arguments, **named)

        return run


def put_into(folder):
    def put(name, data):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    return put


def orders(log, number, seed):
    """Draw how much is there when a reader begins, how long the writer waits, and how much it writes at each look."""
    dice = random.Random(seed)
    for _ in range(number):
        yield (
            dice.randrange(len(log) + 1),
            dice.choice([0, dice.randrange(20), dice.randrange(200)]),
            dice.choice(PACES),
        )


def look_on(reader, url, whole, writer, order):
    """Return whether a reader found what it wants while the writer writes in this order."""
    begin, wait, pace = order
    writer.write(begin)
    with writer.writing(wait, pace):
        try:
            return sees_whole_shards(reader, url, whole)
        except Exception as error:
            raise AssertionError(f"{begin} files, then {pace} a look after {wait} looks: {error!r}") from error


@pytest.mark.parametrize("number", [40, pytest.param(2000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
@pytest.mark.parametrize("reader", READERS)
def test_wherever_the_writer_is_when_a_reader_begins_and_whatever_it_writes_meanwhile(
    written, tmp_path, reader, number
):
    whole, log = written
    outcomes = set()
    for order in orders(log, number, seed=1):
        url = tmp_path / "s.zarr"
        outcomes.add(look_on(reader, url, whole, Writer(put_into(url), log), order))
        shutil.rmtree(url, ignore_errors=True)
    assert True in outcomes


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("number", [2, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
@pytest.mark.parametrize("reader", READERS)
def test_the_same_on_an_object_store(written, server, environment, reader, number):
    whole, log = written
    for order in orders(log, number, seed=2):
        bucket = Bucket(server)
        look_on(reader, bucket.url, whole, Writer(bucket.put, log), order)


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("place", ["disk", pytest.param("bucket", marks=pytest.mark.slow)])
def test_another_process_writes(written, manifest, tmp_path, server, environment, place):
    url = str(tmp_path / "s.zarr") if place == "disk" else Bucket(server).url
    script = "import sys, small_encoder, readers; small_encoder.use(); readers.write(*sys.argv[1:])"
    paths = os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(
        [sys.executable, "-c", script, str(manifest), url], env=os.environ | {"PYTHONPATH": paths}
    ) as writer:
        while writer.poll() is None:
            for reader in READERS:
                sees_whole_shards(reader, url, written[0])
    assert writer.returncode == 0
    assert all(sees_whole_shards(reader, url, written[0]) for reader in READERS)


def test_a_shard_that_is_finished_between_its_values_and_its_mark(written, tmp_path, monkeypatch):
    whole, log = written
    writer = Writer(put_into(tmp_path / "s.zarr"), log)
    writer.write(next(at for at, (name, _) in enumerate(log) if "/done/c/" in name))
    real, url = Store.read_array, str(tmp_path / "s.zarr")

    def then_the_rest(store, name, *rows):
        values = real(store, name, *rows)
        if name.endswith("/status"):
            writer.write(len(log))
        return values

    monkeypatch.setattr(Store, "read_array", then_the_rest)
    features = FeatureCache.open(url).image_set()
    assert NOT_DONE in features.status
    assert features.done().all()
    assert (
        FeatureCache.open(url).image_set().status.tolist() == FeatureCache.open(str(whole)).image_set().status.tolist()
    )


def test_a_group_that_is_finished_while_it_is_read(tmp_path, monkeypatch):
    store, real = Store(str(tmp_path)), Store.find_bytes
    store.start_group("samples")

    def then_it_is_sealed(store, name):
        found = real(store, name)
        monkeypatch.setattr(Store, "find_bytes", real)
        store.seal_group("samples", {}, [])
        return found

    monkeypatch.setattr(Store, "find_bytes", then_it_is_sealed)
    with pytest.raises(CacheError, match="'samples' was never finished"):
        store.read_group("samples")
    assert store.read_group("samples") == {"arrays": {}}


def test_sizes_while_a_file_goes(tmp_path, monkeypatch):
    partial, real = tmp_path / ".a.00000000.partial", LocalFileSystem.info
    (tmp_path / "a").write_bytes(b"12345")
    partial.write_bytes(b"123")

    def renamed_when_first_seen(self, path, **named):
        found = real(self, path, **named)
        if found["name"] == str(partial):
            partial.unlink()
        return found

    monkeypatch.setattr(LocalFileSystem, "info", renamed_when_first_seen)
    assert Store(str(tmp_path)).size("") in (5, 8)
    assert not partial.exists()
