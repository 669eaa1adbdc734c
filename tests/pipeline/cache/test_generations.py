"""What else reads and writes stores, of several generations: each takes the current one."""

from dataclasses import replace

import h5py
import pytest
from changing_data import OPTIONS, Picture, content, pictures, use, write
from small_extraction import files

from xret.pipeline.cache.feature_cache import FeatureCache
from xret.pipeline.cache.storage.generations import free_old
from xret.pipeline.cache.storage.lease import alone
from xret.pipeline.cache.storage.store import Store
from xret.pipeline.cache.upkeep.contents import describe, remove_set, stores_at
from xret.pipeline.cache.upkeep.merge import merge
from xret.pipeline.cache.upkeep.verify import verify
from xret.pipeline.errors import CacheError
from xret.pipeline.exchange.exporters.export import export
from xret.pipeline.extraction.extraction import extract

DATA = [*pictures(), Picture("new.png", 50, "test", ("a new one",))]


@pytest.fixture
def store(monkeypatch, tmp_path):
    use(monkeypatch)
    url = str(tmp_path / "s.zarr")
    extract(write(tmp_path / "data", pictures()), url, OPTIONS)
    extract(write(tmp_path / "data", DATA), url, replace(OPTIONS, update=True))
    return url


@pytest.mark.parametrize("freed", [False, True])
def test_the_current_one_is_read(store, tmp_path, freed):
    if freed:
        free_old(store)
    assert stores_at(str(tmp_path)) == [store]
    assert stores_at(f"{store}/generations/2") == [f"{store}/generations/2"]
    assert describe(f"{store}/generations/2").generation == 2
    assert describe(store).images == 21
    export(store, "hdf5", tmp_path / "e.h5", sets=(), splits=("test",))
    with h5py.File(tmp_path / "e.h5") as file:
        assert len(file["images/id"]) == 5
    merge(str(tmp_path / "merged.zarr"), [store])
    assert content(tmp_path / "merged.zarr") == content(store)


def test_the_current_one_is_written(store, tmp_path):
    first = content(store, generation=1)
    manifest = write(tmp_path / "data", DATA)
    extract(manifest, store, replace(OPTIONS, dtype="float32", text=None))
    assert len(FeatureCache.open(store).set_names("images")) == 2
    part = str(tmp_path / "part.zarr")
    extract(manifest, part, replace(OPTIONS, visual=None, text="words"))
    merge(store, [part])
    remove_set(store, "captions/texts")
    assert content(store, generation=1) == first
    assert verify(store).ok
    with pytest.raises(CacheError, match="is the store to merge into"):
        merge(store, [f"{store}/generations/2"])


def test_one_process_writes_all_generations(store, tmp_path):
    with alone(Store(store)):
        for work in (
            lambda: extract(write(tmp_path / "data", DATA[1:]), store, replace(OPTIONS, update=True)),
            lambda: free_old(store),
            lambda: remove_set(f"{store}/generations/2", "captions/texts"),
        ):
            with pytest.raises(CacheError, match="another process is writing to"):
                work()


@pytest.mark.parametrize("number", [1, 3, 9])
def test_a_number_that_is_not_there_is_not_made(store, tmp_path, number):
    manifest = write(tmp_path / "data", DATA if number > 1 else pictures())
    free_old(store)
    before, named = files(store), f"{store}/generations/{number}"
    part = str(tmp_path / "part.zarr")
    extract(manifest, part, replace(OPTIONS, text=None))
    for work in (lambda: extract(manifest, named, OPTIONS), lambda: merge(named, [part])):
        with pytest.raises(CacheError, match=f"has no generation {number}, or it was freed; it has 2: name one as"):
            work()
    assert files(store) == before


@pytest.mark.parametrize("number", [1, 2])
def test_a_folder_may_be_called_like_a_generation(monkeypatch, tmp_path, number):
    use(monkeypatch)
    manifest = write(tmp_path / "data", pictures(4, 0, 0))
    url = str(tmp_path / "exp" / "generations" / str(number))
    extract(manifest, url, OPTIONS)
    assert [path.name for path in (tmp_path / "exp").iterdir()] == ["generations"]
    extract(write(tmp_path / "data", pictures(5, 0, 0)), url, replace(OPTIONS, update=True))
    assert describe(url).generation == 2 and describe(url).images == 5
    assert verify(f"{url}/generations/1").ok and describe(f"{url}/generations/1").images == 4


def test_a_slash_at_the_end_names_the_same_store(monkeypatch, tmp_path):
    use(monkeypatch)
    url = f"memory://{tmp_path.name}/s.zarr"
    extract(write(tmp_path / "data", pictures(4, 0, 0)), f"{url}/", replace(OPTIONS, text=None))
    extract(write(tmp_path / "data", pictures(5, 0, 0)), f"{url}//", replace(OPTIONS, text=None, update=True))
    assert describe(f"{url}/").images == describe(f"{url}/generations/2/").images == 5
    assert describe(url).generation == 2 and FeatureCache.open(f"{url}/").url == url
    assert free_old(f"{url}/").generations == (1,)
    assert verify(f"{url}/").ok
