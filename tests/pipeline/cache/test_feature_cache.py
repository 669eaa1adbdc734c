"""The layout: which rows lie where, and what a cache refuses to be."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_store import make_store

from xret.pipeline.cache import Blocks, FeatureCache, fingerprint
from xret.pipeline.cache.layout import open_for_writing
from xret.pipeline.cache.storage.store import Store
from xret.pipeline.data.manifest import load_manifest
from xret.pipeline.data.samples import read_samples
from xret.pipeline.errors import CacheError


def open_or_create(*args):
    with open_for_writing(*args) as cache:
        return cache


def splits_of(counts):
    bounds = np.cumsum([0, *counts])
    return {f"s{i}": (int(a), int(b)) for i, (a, b) in enumerate(itertools.pairwise(bounds))}


@pytest.mark.parametrize(("rows", "length"), [(7734, 488), (800, 56), (1, 8), (16 * 512, 512), (113_287, 512)])
def test_default_shard_length_follows_the_largest_split(rows, length):
    # DESIGN: min(512, ceil(rows / 16) rounded up to 8)
    assert Blocks.choose({"train": (0, rows), "val": (rows, rows + 1)}).length == length


@given(st.lists(st.integers(1, 40), min_size=1, max_size=4), st.integers(1, 17))
def test_every_image_has_one_place_and_a_split_begins_a_shard(counts, length):
    blocks = Blocks(length, splits_of(counts))
    rows = blocks.array_rows(np.arange(sum(counts)))
    expected, shard = {}, 0
    for first, last in blocks.splits.values():  # the layout said again, by counting
        for start in range(first, last, length):
            for offset, image in enumerate(range(start, min(start + length, last))):
                expected[image] = shard * length + offset
            shard += 1
    assert len(blocks) == shard
    assert rows.tolist() == [expected[i] for i in range(sum(counts))]
    assert [i for s in range(len(blocks)) for i in range(*blocks.images(s))] == list(range(sum(counts)))
    assert [s for split in blocks.splits for s in blocks.of_split(split)] == list(range(len(blocks)))


def test_fingerprint_depends_on_every_part_and_not_on_key_order():
    one = fingerprint({"encoder": "a", "weights": "b"}, "float16")
    assert one == fingerprint({"weights": "b", "encoder": "a"}, "float16")
    assert len({one, fingerprint({"encoder": "a", "weights": "c"}, "float16"), fingerprint({}, "float32")}) == 3


def test_samples_come_back_as_they_were(tiny_dataset, tmp_path):
    samples = read_samples(load_manifest(tiny_dataset(train=5, val=2)))
    cache = open_or_create(str(tmp_path / "s.zarr"), samples, ["full"])
    assert cache.splits == {"train": (0, 5), "val": (5, 7)}
    assert cache.file_names(1, 4) == [image.file_name for image in samples.images[1:4]]
    assert cache.ids(0, 7) == [image.id for image in samples.images]
    texts = [caption.text for image in samples.images for caption in image.captions]
    assert cache.caption_texts(0, cache.captions) == texts
    assert cache.caption_texts(3, 6) == texts[3:6]
    owners = [i for i, image in enumerate(samples.images) for _ in image.captions]
    assert cache.caption_image.tolist() == owners
    assert [owners.index(i) for i in range(7)] == cache.caption_start.tolist()
    assert cache.sentids(0, 2).tolist() == [0, 1]
    assert cache.protocols == ("full",)


@pytest.mark.parametrize("mark", ["../", "/etc/", "a/../../", "\0"])
def test_a_store_names_no_file_outside_the_folder_of_images(tmp_path, mark):
    cache = FeatureCache.open(make_store(tmp_path / "s.zarr", mark=mark))
    with pytest.raises(
        CacheError, match=r"s\.zarr names the image .* which is no file in its folder; extract it again"
    ):
        cache.file_names(0, 5)
    inside = FeatureCache.open(make_store(tmp_path / "t.zarr", mark="..a/b../"))
    assert inside.file_names(0, 1) == ["..a/b../0.jpg"]


def test_texts_that_are_not_utf_8_are_refused(tmp_path):
    cache = FeatureCache.open(make_store(tmp_path / "s.zarr"))
    raw = cache.sample_array("caption").copy()
    raw[3] = 0xFF
    sealed = cache.store.read_group("samples")
    sealed["seals"]["caption"] = cache.store.write_array("samples/caption", raw)
    cache.store.seal_group("samples", sealed, list(sealed["arrays"]))
    cache = FeatureCache.open(cache.url)
    with pytest.raises(CacheError, match="a text of samples/caption is not UTF-8"):
        cache.caption_texts(0, 5)


def test_another_data_set_is_refused(tiny_dataset, tmp_path):
    url = str(tmp_path / "s.zarr")
    open_or_create(url, read_samples(load_manifest(tiny_dataset("one"))), [])
    with pytest.raises(CacheError, match=r"holds other samples: data set 'one'.*choose another store"):
        open_or_create(url, read_samples(load_manifest(tiny_dataset("two", train=3))), [])


def test_no_cache_and_foreign_folders_are_refused(tmp_path, tiny_dataset):
    samples = read_samples(load_manifest(tiny_dataset()))
    with pytest.raises(CacheError, match="no feature cache is there; check the path, or make one with"):
        FeatureCache.open(str(tmp_path / "none"))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("mine")
    empty = open_or_create(str(tmp_path / "begun.zarr"), samples, ["full"])
    for modality, choose in (("images", empty.image_set), ("captions", empty.caption_set)):
        with pytest.raises(
            CacheError, match=rf"begun\.zarr has no features of {modality}; run `xret extract` on it"
        ) as refusal:
            choose()
    assert "run `xret extract` on it, to its end" in str(refusal.value)  # there is no other side to leave alone
    with pytest.raises(CacheError, match="not empty and holds no feature cache"):
        open_or_create(str(tmp_path / "other"), samples, [])
    assert (tmp_path / "other" / "thesis.txt").read_text() == "mine"
    Store(str(tmp_path / "zarr")).seal_group("", {"format": "else"}, [])
    with pytest.raises(CacheError, match="not a feature cache of xret"):
        open_or_create(str(tmp_path / "zarr"), samples, [])
    Store(str(tmp_path / "new")).seal_group("", {"format": "xret", "version": 9}, [])
    with pytest.raises(CacheError, match="version 9, this xret reads version 1"):
        FeatureCache.open(str(tmp_path / "new"))


def test_an_interrupted_creation_is_made_anew(tiny_dataset, tmp_path):
    samples = read_samples(load_manifest(tiny_dataset()))
    store = Store(str(tmp_path / "s.zarr"))
    store.start_group("")
    store.write_array("samples/caption", np.zeros(3, dtype=np.uint8))
    with pytest.raises(CacheError, match="never finished"):
        FeatureCache.open(store.url)
    assert open_or_create(store.url, samples, []).images == len(samples.images)


def test_a_first_file_that_was_cut_off_does_not_block_the_place(tiny_dataset, tmp_path):
    (tmp_path / "s.zarr").mkdir()
    (tmp_path / "s.zarr" / "zarr.json.77.partial").write_text("{")
    assert open_or_create(str(tmp_path / "s.zarr"), read_samples(load_manifest(tiny_dataset())), []).images == 32
    assert not list((tmp_path / "s.zarr").glob("*.partial"))


def test_two_writers_exclude_each_other(tiny_dataset, tmp_path):
    samples, url = read_samples(load_manifest(tiny_dataset())), str(tmp_path / "s.zarr")
    with open_for_writing(url, samples, []):
        with pytest.raises(CacheError, match=r"another process is writing to .*s\.zarr; wait"):
            open_or_create(url, samples, [])
        assert FeatureCache.open(url).images == 32  # readers may
    open_or_create(url, samples, [])


def test_changed_metadata_is_noticed_on_opening(tiny_dataset, tmp_path):
    url = str(tmp_path / "s.zarr")
    open_or_create(url, read_samples(load_manifest(tiny_dataset())), [])
    path = tmp_path / "s.zarr" / "zarr.json"
    root = json.loads(path.read_text())
    root["attributes"]["splits"]["train"] = [0, 19]
    path.write_text(json.dumps(root, indent=2))
    with pytest.raises(CacheError, match=r"zarr\.json is damaged .* extract into another --store"):
        FeatureCache.open(url)


def test_metadata_that_nests_too_deep_is_damaged(tiny_dataset, tmp_path):
    url = str(tmp_path / "s.zarr")
    open_or_create(url, read_samples(load_manifest(tiny_dataset())), [])
    (tmp_path / "s.zarr" / "zarr.json").write_text('{"attributes": ' + "[" * 100_000)
    with pytest.raises(CacheError, match=r"zarr\.json is damaged .* extract into another --store"):
        FeatureCache.open(url)
