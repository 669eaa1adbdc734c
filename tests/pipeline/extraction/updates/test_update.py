"""Stores that grow: what an update computes, and that it ends as a fresh extraction of the changed data set."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from changing_data import OPTIONS, Picture, content, pictures, write
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from small_checkpoints import save_image_model

from xret.pipeline.cache.earlier import image_keys
from xret.pipeline.cache.feature_cache import FeatureCache
from xret.pipeline.cache.storage.generations import free_old, generations
from xret.pipeline.cache.storage.store import Store
from xret.pipeline.cache.upkeep.contents import remove_set
from xret.pipeline.cache.upkeep.verify import verify
from xret.pipeline.data import digests
from xret.pipeline.data.manifest import load_manifest
from xret.pipeline.errors import CacheError
from xret.pipeline.extraction.extraction import extract
from xret.pipeline.extraction.options import Options
from xret.pipeline.extraction.plan import plan

UPDATE = replace(OPTIONS, update=True)


def fresh(tmp_path, data, options=OPTIONS):
    """Return what an extraction of a data set from the beginning writes."""
    place = tmp_path / "fresh"
    extract(write(place / "data", data), str(place / "s.zarr"), options)
    found = content(place / "s.zarr")
    shutil.rmtree(place)
    return found


def changed(data):
    """Return a data set with a picture more, one less, one of other bytes, and one caption changed."""
    first, second, *others = data
    return [
        replace(first, captions=("something else",)),
        *others,
        replace(second, content=99),
        Picture("new.png", 50, "val", ("a new one",)),
    ]


def test_what_has_changed_is_said_and_nothing_read_or_written(store, tmp_path, monkeypatch):
    before = content(store)
    monkeypatch.setattr(digests, "digest_at", None)  # nobody may look
    data = [replace(one, split="val") if one.name == "11.png" else one for one in changed(pictures())[:-1]]
    del data[5]
    manifest = write(tmp_path / "data", [*data, Picture("a.png", 60, "test", ("x", "y"))])
    with pytest.raises(CacheError) as caught:
        extract(manifest, store, OPTIONS)
    said = str(caught.value)
    assert "(pictures: 1 new, 1 gone, captions: 2 new, 1 gone, 1 changed, 1 picture in another split; the pict" in said
    assert "; the pictures themselves were not compared); go on" in said
    assert "go on with --update, which computes only what is new" in said
    assert content(store) == before
    assert not Path(store, "generations").exists()


def test_only_what_is_new_is_computed(store, encoded, tmp_path):
    data = changed(pictures())
    extract(write(tmp_path / "data", data), store, UPDATE)
    assert [sum(counts) for counts in encoded] == [2, 2]
    assert content(store) == fresh(tmp_path, data)
    assert verify(store).ok
    assert [one.state for one in generations(store)] == ["old", "current"]
    assert verify(f"{store}/generations/1").ok
    assert FeatureCache.open(store, generation=1).images == 20


def test_whole_shards_are_shared(store, tmp_path):
    data = [*pictures(), Picture("new.png", 50, "train", ("a new one",))]
    data.sort(key=lambda one: ("train", "val", "test").index(one.split))
    extract(write(tmp_path / "data", data), store, UPDATE)
    cache = FeatureCache.open(store)
    for path, array in ((cache.image_set().path, "local/c/{}/0/0"), (cache.caption_set("texts").path, "local/c/{}/0")):
        for there, here in ((0, 0), (2, 2), (3, 4), (4, 5)):  # val and test have moved by a shard
            file = Path(store, path, array.format(there))
            assert file.samefile(Path(cache.store.root, path, array.format(here)))
    assert content(store) == fresh(tmp_path, data)
    assert verify(store).ok


def test_other_bytes_under_an_unchanged_manifest_make_a_generation(store, encoded, tmp_path):
    manifest = write(tmp_path / "data", pictures())
    extract(manifest, store, UPDATE)
    assert not Path(store, "generations").exists()
    data = [replace(one, content=77) if one.name == "3.png" else one for one in pictures()]
    extract(write(tmp_path / "data", data), store, UPDATE)
    assert [sum(counts) for counts in encoded] == [1, 0]
    assert content(store) == fresh(tmp_path, data)


def test_views_are_found_by_id_as_well():

    digests = np.arange(32, dtype=np.uint8).reshape(2, 16)
    one, other = image_keys(digests, ["a", "b"], 2), image_keys(digests, ["a", "c"], 2)
    assert (one == other).tolist() == [True, False]
    assert (image_keys(digests, ["a", "b"], 1) == image_keys(digests, ["a", "c"], 1)).all()


CHANGES = st.lists(
    st.tuples(st.sampled_from(["add", "remove", "bytes", "caption", "split", "swap"]), st.integers(0, 1000)),
    min_size=1,
    max_size=8,
)


def with_changes(data, made):
    data = list(data)
    for number, (kind, dice) in enumerate(made):
        at = dice % len(data)
        if kind == "add":
            data.insert(at, Picture(f"new{number}.png", 200 + dice, ("train", "val", "test")[dice % 3], ("new", "one")))
        elif kind == "remove" and len(data) > 10:
            del data[at]
        elif kind == "bytes":
            data[at] = replace(data[at], content=2000 + dice)
        elif kind == "caption":
            data[at] = replace(data[at], captions=tuple(f"other {dice} {k}" for k in range(1 + dice % 3)))
        elif kind == "split":
            data[at] = replace(data[at], split=("train", "val", "test")[dice % 3])
        elif kind == "swap":
            other = dice * 7 % len(data)
            data[at], data[other] = data[other], data[at]
    return data


@pytest.mark.parametrize("examples", [2, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_any_changes(store, tmp_path, examples):
    shutil.copytree(store, tmp_path / "first.zarr")

    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(CHANGES, min_size=1, max_size=2))
    def check(updates):
        url, data = tmp_path / "copy.zarr", pictures()
        shutil.rmtree(url, ignore_errors=True)
        shutil.copytree(tmp_path / "first.zarr", url)
        for made in updates:
            data = with_changes(data, made)
            extract(write(tmp_path / "data", data), str(url), UPDATE)
            assert content(url) == fresh(tmp_path, data)
        assert verify(str(url)).ok
        free_old(str(url))
        assert verify(str(url)).ok
        assert content(url) == fresh(tmp_path, data)

    check()


class Killed(BaseException):
    """What nobody catches."""


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_at_any_moment_it_goes_on(store, encoded, tmp_path, monkeypatch, step):
    data = changed(pictures())
    manifest, whole = write(tmp_path / "data", data), fresh(tmp_path, data)
    write_bytes, left, begun = Store.write_shard, [0], content(store)

    def dying(*arguments):
        left[0] -= 1
        if left[0] < 0:
            raise Killed
        write_bytes(*arguments)

    monkeypatch.setattr(Store, "write_shard", dying)
    for kills in range(1, 100, step):
        left[0] = kills
        try:
            extract(manifest, store, UPDATE)
            break
        except Killed:
            assert content(store) == begun  # the first stays the current one
    else:
        pytest.fail("it never came to its end")
    assert kills > 1
    assert content(store) == whole
    assert [one.number for one in generations(store)] == [1, 2]
    assert verify(store).ok


def test_what_was_begun_for_other_samples_is_used_and_removed(store, encoded, tmp_path, monkeypatch):
    data = changed(pictures())
    manifest = write(tmp_path / "data", data)
    with monkeypatch.context() as patch:
        patch.setattr("xret.pipeline.extraction.extraction.finish", lambda _: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            extract(manifest, store, UPDATE)
    assert [one.state for one in generations(store)] == ["current", "unfinished"]
    assert free_old(store).generations == ()
    for counts in encoded:
        counts.clear()
    extract(write(tmp_path / "data", data[:-2]), store, UPDATE)
    assert [sum(counts) for counts in encoded] == [0, 0]
    assert [(one.number, one.state) for one in generations(store)] == [(1, "old"), (3, "current")]
    assert content(store) == fresh(tmp_path, data[:-2])


def test_a_set_that_was_left_out_is_named_and_found_again_later(store, encoded, tmp_path, capsys):
    data = changed(pictures())
    manifest = write(tmp_path / "data", data)
    extract(manifest, store, replace(UPDATE, visual=None))
    assert "is in generation 1 of" in capsys.readouterr().err
    assert FeatureCache.open(store).set_names("images") == []
    extract(manifest, store, OPTIONS)
    assert sum(encoded[0]) == 2
    assert content(store) == fresh(tmp_path, data)


def test_weights_in_a_folder_of_another_name_are_known_again(tiny_dataset, tmp_path, capsys):
    path, url = tiny_dataset(train=4, val=2, test=0), str(tmp_path / "s.zarr")
    one = save_image_model(tmp_path / "one", "dinov2")
    options = Options(visual=f"hf:{one}", text=None, device="cpu")
    extract(load_manifest(path), url, options)
    before = FeatureCache.open(url).set_paths()
    Image.new("RGB", (40, 40), "blue").save(path.parent / "images" / "0.jpg")
    two = shutil.copytree(one, tmp_path / "two")
    (foreseen,) = plan(load_manifest(path), url, replace(options, visual=f"hf:{two}", update=True)).sets
    assert (foreseen.name, foreseen.found) == (before[0].rpartition("/")[2], 5)
    summary = extract(load_manifest(path), url, replace(options, visual=f"hf:{two}", update=True))
    assert (summary.sets[0].found, summary.sets[0].samples) == (5, 1)
    assert FeatureCache.open(url).set_paths() == before
    assert "is in generation 1" not in capsys.readouterr().err


def test_damaged_shards_are_computed_again(store, encoded, tmp_path):
    path = Path(store, FeatureCache.open(store).image_set().path, "local/c")
    lost, flipped = path / "0/0/0", path / "4/0/0"
    lost.unlink()
    raw = bytearray(flipped.read_bytes())
    raw[5] ^= 1
    flipped.write_bytes(raw)
    data = pictures()[1:]
    extract(write(tmp_path / "data", data), store, UPDATE)
    assert not verify(store).ok  # a shared file is as damaged as it was
    extract(write(tmp_path / "data", data), store, replace(OPTIONS, repair=True))
    assert verify(store).ok
    assert content(store) == fresh(tmp_path, data)


def test_freeing(store, tmp_path):
    manifest = write(tmp_path / "data", changed(pictures()))
    assert free_old(store).generations == ()
    extract(manifest, store, UPDATE)
    whole = content(store)
    freed = free_old(store)
    assert freed.generations == (1,)
    assert freed.bytes > 0
    assert [one.number for one in generations(store)] == [2]
    assert content(store) == whole
    with pytest.raises(
        CacheError, match=r"has no generation 1, or it was freed; it has 2: name one as .*/generations/N"
    ):
        FeatureCache.open(store, generation=1)
    extract(write(tmp_path / "data", pictures()), store, UPDATE)
    assert [one.number for one in generations(store)] == [2, 3]
    remove_set(store, "images/small")
    assert FeatureCache.open(f"{store}/generations/2").set_names("images") != []


def test_freeing_is_killed(store, tmp_path, monkeypatch):
    extract(write(tmp_path / "data", changed(pictures())), store, UPDATE)
    whole, remove, left = content(store), Store.remove, [0]

    def dying(*arguments):
        left[0] -= 1
        if left[0] < 0:
            raise Killed
        remove(*arguments)

    monkeypatch.setattr(Store, "remove", dying)
    for kills in range(9):
        left[0] = kills
        try:
            free_old(store)
            break
        except Killed:
            assert content(store) == whole
            assert verify(store).ok
    assert kills > 0
    assert sorted(entry.name for entry in Path(store).iterdir()) == ["generations", "zarr.json"]


def test_a_damaged_pointer_is_no_other_generation(store, tmp_path):
    extract(write(tmp_path / "data", changed(pictures())), store, UPDATE)
    Path(store, "generations/zarr.json").unlink()
    with pytest.raises(CacheError, match=r"generations/zarr.json is damaged or missing; restore that file"):
        FeatureCache.open(store)
