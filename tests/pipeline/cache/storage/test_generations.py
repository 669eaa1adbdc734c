"""Generations in an object store: what they share is copied there, and one object makes one of them the current one."""

import json
from dataclasses import replace

import pytest
from changing_data import OPTIONS, Picture, pictures, use, write
from small_extraction import files

from xret.pipeline.cache.feature_cache import FeatureCache
from xret.pipeline.cache.storage.generations import free_old, generations
from xret.pipeline.cache.upkeep.verify import verify
from xret.pipeline.errors import StoreError
from xret.pipeline.extraction.extraction import extract

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
DENIED = 403, "AccessDenied", "Access Denied"
POINTER = "generations/zarr.json"


def test_an_update_is_one_object_from_being_the_current_one(bucket, tmp_path, monkeypatch):
    counts, _ = use(monkeypatch)
    local, images = str(tmp_path / "s.zarr"), replace(OPTIONS, text=None)
    for url in (local, bucket.url):
        extract(write(tmp_path / "data", pictures(4, 2, 0)), url, images)
    data = [*pictures(4, 2, 0), Picture("new.png", 50, "train", ("a new one",))]
    manifest = write(tmp_path / "data", sorted(data, key=lambda one: one.split))
    extract(manifest, local, replace(images, update=True))
    counts.clear()

    written = []

    def no_pointer(method, path):  # the second one, which makes the new generation the current one
        if method == "PUT" and path.endswith(POINTER):
            written.append(path)
        return DENIED if len(written) > 1 else None

    with bucket.server.failing(no_pointer), pytest.raises(StoreError):
        extract(manifest, bucket.url, replace(images, update=True))
    assert FeatureCache.open(bucket.url).images == 6
    assert [one.state for one in generations(bucket.url)] == ["current", "unfinished"]
    extract(manifest, bucket.url, replace(images, update=True))
    assert sum(counts) == 1  # and nothing again
    assert json.loads(bucket.read(f"deep/s.zarr/{POINTER}"))["attributes"]["current"] == 2
    assert FeatureCache.open(bucket.url).images == 7
    assert bucket.files() == files(local)
    assert verify(bucket.url).ok
    assert free_old(bucket.url).generations == (1,)
    assert {name for name in bucket.names() if not name.startswith("generations/")} == {"zarr.json"}
    assert verify(bucket.url).ok
