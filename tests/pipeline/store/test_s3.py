"""A store on a real S3 server: few requests a chunk, the same values, and one sentence where it does not answer."""

import numpy as np
import pytest
from s3_server import S3Server
from small_store import make_store

from xret.pipeline.errors import StoreError
from xret.pipeline.store import FeatureCache
from xret.pipeline.store.inspect import describe, remove_set, verify

# aiobotocore leaves its connections to the garbage collector.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(scope="module")  # s3fs keeps its connections
def server():
    server = S3Server()
    yield server
    server.stop()


@pytest.fixture
def url(server, monkeypatch):
    return make_store(f"{server.new_bucket(monkeypatch)}/deep/s.zarr", train=40, val=8, test=0)


def test_a_store_is_that_of_a_disk(url, tmp_path):
    here = FeatureCache.open(make_store(tmp_path / "s.zarr", train=40, val=8, test=0))
    there = FeatureCache.open(url)
    rows = np.random.default_rng(0).permutation(48)
    assert np.array_equal(here.image_set().local(rows), there.image_set().local(rows))
    assert np.array_equal(here.caption_set().token(rows), there.caption_set().token(rows))
    assert verify(url).ok
    assert describe(url)["images"] == 48
    remove_set(url, there.image_set().path)
    assert FeatureCache.open(url).set_names("images") == []


def test_a_further_chunk_takes_few_requests(server, url):
    images = FeatureCache.open(url).image_set()
    arrays = {chunk: images.read_chunk(chunk) for chunk in (1, 2)}
    images.write(1, arrays[1])
    before = len(server.requests)
    images.write(2, arrays[2])
    assert len(server.requests) - before <= 15
    reader = FeatureCache.open(url).image_set()
    reader.local(np.arange(8))
    before = len(server.requests)
    reader.local(np.arange(8, 16))
    assert len(server.requests) - before == 1


def test_a_server_that_refuses_is_one_sentence(server, url):
    with server.refusing(), pytest.raises(StoreError, match=r"does not answer \(.*\); run the same command again"):
        FeatureCache.open(url)
