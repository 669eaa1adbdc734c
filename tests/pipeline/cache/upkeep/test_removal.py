"""Removing a feature set: the one that was meant, whole, and never half."""

import pytest
from parts import sound_store
from small_extraction import files

from xret.pipeline.cache.feature_cache import FeatureCache, choose_set
from xret.pipeline.cache.layout import alone, find_set
from xret.pipeline.cache.storage.store import Store
from xret.pipeline.cache.upkeep.contents import Removal, remove_set, set_to_remove
from xret.pipeline.cache.upkeep.verify import Verification, verify
from xret.pipeline.errors import CacheError

PATHS = ["images/resnet18@aaaa1111", "images/resnet18@aaaa2222", "images/resnet18_wsl@bbbb", "captions/bert@cccc"]


@pytest.mark.parametrize(
    ("prefix", "path"),
    [
        ("resnet18_", PATHS[2]),
        ("resnet18@aaaa2", PATHS[1]),
        ("images/resnet18@aaaa1111", PATHS[0]),
        ("captions/b", PATHS[3]),
        ("b", PATHS[3]),
    ],
)
def test_a_unique_beginning_is_enough(prefix, path):
    assert choose_set("s.zarr", prefix, PATHS) == path


def test_a_whole_name_goes_before_a_longer_one():
    assert choose_set("s.zarr", "resnet18", [PATHS[0], *PATHS[2:]]) == PATHS[0]


@pytest.mark.parametrize("prefix", ["resnet18", "resnet", "resnet18@aaaa", "images/r"])
def test_several_are_listed(prefix):
    with pytest.raises(CacheError, match=f"s.zarr: several feature sets fit '{prefix}': {PATHS[0]}, {PATHS[1]}"):
        choose_set("s.zarr", prefix, PATHS)


@pytest.mark.parametrize("prefix", ["", "images/", "captions/resnet18@aaaa1111", "auto", "../images/resnet18_wsl@bbbb"])
def test_none_is_said_with_what_there_is(prefix):
    with pytest.raises(CacheError, match=r"no feature set fits .*there: .*captions/bert@cccc"):
        choose_set("s.zarr", prefix, PATHS)


def test_a_slip_is_corrected():
    with pytest.raises(CacheError, match=r"did you mean 'bert@cccc'\?"):
        choose_set("s.zarr", "brt@cccc", PATHS)
    with pytest.raises(CacheError, match="there is none at all"):
        choose_set("s.zarr", "bert", [])


@pytest.fixture
def store(tmp_path):
    """A store with two image sets and one of captions."""
    sound_store(tmp_path / "s", weights="a", train=8, val=3, test=0)
    return sound_store(tmp_path / "s", weights="b", train=8, val=3, test=0)


def grids(url):
    return FeatureCache.open(url).set_names("images")


def test_only_the_set_is_removed(store):
    before = files(store)
    first, second = grids(store)
    path = f"images/{first}"
    size = sum(len(data) for name, data in before.items() if name.startswith(f"{path}/"))
    assert remove_set(store, first) == Removal(path, size)
    assert files(store) == {name: data for name, data in before.items() if not name.startswith(f"{path}/")}
    assert grids(store) == [second]
    assert verify(store).ok
    remove_set(store, "captions/states")
    remove_set(store, "grid")
    assert verify(store) == Verification(0, (), ())


def test_stopped_anywhere_nothing_half_is_left(store, monkeypatch):
    first, second = grids(store)
    real, rounds, finished = Store.remove, 0, False
    while not finished:
        left = [rounds]

        def stopping(self, name, left=left):
            if left[0] == 0:
                raise KeyboardInterrupt
            left[0] -= 1
            real(self, name)

        monkeypatch.setattr(Store, "remove", stopping)
        try:
            remove_set(store, first)
            finished = True
        except KeyboardInterrupt:
            assert grids(store) == [second]
            assert verify(store).ok
            assert set_to_remove(store, first).removed == f"images/{first}"  # it can be removed for good
            rounds += 1
        finally:
            monkeypatch.undo()
    assert rounds == 4  # six arrays: none, one, two and three more of them were gone
    assert find_set(FeatureCache.open(store), f"images/{first}") is None


def test_what_a_stopped_removal_left_is_cleared_by_an_extraction(store, monkeypatch):
    first, _ = grids(store)
    monkeypatch.setattr(Store, "remove", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        remove_set(store, first)
    monkeypatch.undo()
    assert find_set(FeatureCache.open(store), f"images/{first}") is None
    assert not Store(store).exists(f"images/{first}")


def test_an_empty_folder_is_no_set(store):
    (Store(store).fs).makedirs(f"{store}/images/begun@1234")
    assert len(grids(store)) == 2
    assert verify(store).ok
    assert remove_set(store, "begun") == Removal("images/begun@1234", 0)


def test_a_damaged_set_can_be_removed(store):
    first, second = grids(store)
    Store(store).fs.rm(f"{store}/images/{first}/zarr.json")
    assert not verify(store).ok
    with pytest.raises(CacheError, match=rf"or remove the set with `xret cache rm {store} images/{first}` and extract"):
        FeatureCache.open(store).image_set(first)
    remove_set(store, first)
    assert verify(store).ok
    assert grids(store) == [second]


def test_mistakes_remove_nothing(store, tmp_path):
    before = files(store)
    with pytest.raises(CacheError, match="several feature sets fit 'grid': images/grid@"):
        remove_set(store, "grid")
    with alone(Store(store)), pytest.raises(CacheError, match="another process is writing"):
        remove_set(store, "states")
    assert files(store) == before
    with pytest.raises(CacheError, match="no feature cache is there"):
        remove_set(str(tmp_path / "none"), "grid")
    assert not (tmp_path / "none").exists()


def test_an_object_store(store):
    from xret.pipeline.cache.upkeep.merge import merge

    url = "memory://removal.zarr"
    try:
        merge(url, [store])
        remove_set(url, grids(store)[0])
        assert grids(url) == grids(store)[1:]
        assert verify(url).ok
    finally:
        Store(url).remove("")
