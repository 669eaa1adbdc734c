"""A store on a real S3 server: few requests, the same values whatever fails on the way, and one writer."""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import pytest
from s3_server import S3Server
from small_store import make_store

from xret.pipeline.errors import CacheError, StoreError
from xret.pipeline.store import FeatureCache, object_lock
from xret.pipeline.store.folder import Folder
from xret.pipeline.store.inspect import describe, remove_set, verify

# aiobotocore leaves its connections to the garbage collector.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

SIZES = {"train": 40, "val": 8, "test": 0}


@pytest.fixture(scope="module")  # s3fs keeps its connections
def server():
    server = S3Server()
    yield server
    server.stop()


@pytest.fixture
def bucket(server, monkeypatch):
    return server.new_bucket(monkeypatch.setenv)


@pytest.fixture
def url(bucket):
    """Where no store is yet."""
    return f"{bucket}/deep/s.zarr"


@pytest.fixture(scope="module")
def store(server):
    """A store that is left as it is."""
    with pytest.MonkeyPatch.context() as patch:
        yield make_store(f"{server.new_bucket(patch.setenv)}/deep/s.zarr", **SIZES)


def contents(url):
    """Return the bytes of every file of a store."""
    folder = Folder(url)
    files = sorted(path.removeprefix(f"{folder.root}/") for path in folder.fs.find(folder.root))
    return dict(zip(files, folder.read(*files), strict=True))


def test_a_store_is_that_of_a_disk(url, tmp_path):
    here = FeatureCache.open(make_store(tmp_path / "s.zarr", **SIZES))
    there = FeatureCache.open(make_store(url, **SIZES))
    rows = np.random.default_rng(0).permutation(48)
    assert np.array_equal(here.image_set().local(rows), there.image_set().local(rows))
    assert np.array_equal(here.caption_set().token(rows), there.caption_set().token(rows))
    assert verify(url).ok
    assert describe(url)["images"] == 48
    path = there.image_set().path
    there.folder.remove(f"{path}/zarr.json")  # as a removal leaves it that was stopped
    assert FeatureCache.open(url).set_names("images") == []
    remove_set(url, path)
    assert there.folder.names("images") == ["zarr.json"]


def test_a_further_chunk_is_a_request_for_each_array(server, store):
    images = FeatureCache.open(store).image_set()
    arrays = {chunk: images.read_chunk(chunk) for chunk in (1, 2)}
    images.write(1, arrays[1])
    before = len(server.requests)
    images.write(2, arrays[2])
    assert len(server.requests) - before == len(images.array_names)


def test_the_chunks_of_a_batch_are_read_at_once(server, store):
    """They take little longer than one, and each is asked for once."""
    images, chunks = FeatureCache.open(store).image_set(), 6
    images.local(np.arange(1))
    began, before, server.latency = time.monotonic(), len(server.requests), 1.0
    images.local(np.random.default_rng(0).permutation(8 * chunks))
    server.latency = 0
    assert len(server.requests) - before == chunks - 1
    assert time.monotonic() - began < 4


def test_a_server_that_refuses_is_one_sentence(server, store):
    with server.refusing(), pytest.raises(StoreError, match=r"does not answer \(.*\); run the same command again"):
        FeatureCache.open(store)


def first_times(share):
    """Return whether a request is the first one for its path, of so many paths one, and the list of these."""
    seen, chosen = set(), []

    def when(environ):
        key = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        is_first, _ = key not in seen, seen.add(key)
        if is_first and "/c." in key[1] and len(seen) % share == 0:
            chosen.append(key)
        return is_first and key in chosen

    return when, chosen


@pytest.mark.parametrize("how", ["busy", "cut"])
def test_what_fails_once_is_tried_again(server, bucket, tmp_path, how):
    here, there = make_store(tmp_path / "s.zarr", **SIZES), f"{bucket}/s.zarr"
    when, chosen = first_times(8)
    with server.refusing("SlowDown", when) if how == "busy" else server.cutting(when):
        make_store(there, **SIZES)
        rows = np.arange(48)
        read = [FeatureCache.open(url).image_set().local(rows) for url in (here, there)]
    assert np.array_equal(*read)
    assert {method for method, _ in chosen} == {"GET", "PUT"} and len(chosen) > 5
    assert contents(there) == contents(here)


@pytest.mark.parametrize("requests", [30, 60])
def test_a_store_whose_credentials_expire_is_completed_by_the_next_run(server, bucket, tmp_path, quick_locks, requests):
    url, last = f"{bucket}/s.zarr", len(server.requests) + requests
    with (
        server.refusing("ExpiredToken", lambda _: len(server.requests) >= last),
        pytest.raises(StoreError, match=r"does not answer \(.*\); run the same command again"),
    ):
        make_store(url, **SIZES)
    make_store(url, **SIZES)
    assert contents(url) == contents(make_store(tmp_path / "s.zarr", **SIZES))


# The lock


@pytest.fixture
def quick_locks(monkeypatch):
    monkeypatch.setattr(object_lock, "RENEWAL", 0.2)
    monkeypatch.setattr(object_lock, "PATIENCE", 1.0)


def test_one_writes_at_a_time(url, quick_locks):
    with Folder(url).one_writer():
        time.sleep(0.5)  # it is written again
        with pytest.raises(CacheError, match=r"another process is writing to s3://.*: process \d+ on"):
            Folder(url).one_writer().__enter__()
    with Folder(url).one_writer():
        pass
    assert ".lock" not in Folder(url).names("")


def test_two_that_find_the_lock_of_a_dead_writer_do_not_both_write(url, quick_locks):
    Folder(url).write({".lock": [b'{"owner": "process 1 on afar", "since": "then"}']})
    writing = []

    def write(_):
        with suppress(CacheError), Folder(url).one_writer():
            writing.append(1)
            time.sleep(1)
            assert len(writing) == 1

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(write, range(2)))
    assert writing == [1]


@pytest.mark.parametrize("answers", [True, False])
def test_a_writer_whose_lock_is_taken_over_says_so(url, quick_locks, monkeypatch, answers):
    with pytest.raises(CacheError, match="taken over or removed"), Folder(url).one_writer():
        Folder(url).write({".lock": [b"{}"]})
        time.sleep(0.5)
        if not answers:  # at the end
            monkeypatch.setattr(Folder(url).fs, "cat_file", None)


@pytest.mark.parametrize("how", ["refused", "ignored", "unknown"])
def test_a_store_without_conditional_writes_is_named(server, url, monkeypatch, caplog, how):
    if how == "unknown":  # to the file system
        pipe = Folder(url).fs.pipe_file
        monkeypatch.setattr(Folder(url).fs, "pipe_file", lambda path, data: pipe(path, data))

    def when(environ):
        return environ.pop("HTTP_IF_NONE_MATCH", None) is not None and how == "refused"

    with server.refusing("NotImplemented", when), Folder(url).one_writer():
        pass
    assert "has no conditional writes; let only one process write there" in caplog.text
    assert ".lock" not in Folder(url).names("")
