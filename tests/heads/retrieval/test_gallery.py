"""The gallery: a split's usable samples in the order of the store, and files that never leave their folder."""

import numpy as np
import pytest
import torch
from small_store import make_store

from xret.heads.retrieval.retriever import Retriever
from xret.pipeline.errors import CacheError
from xret.pipeline.store import FAILED, CaptionSet, FeatureCache


@pytest.fixture(scope="module")
def run(trained):
    return trained()


def open_gallery(run, store=None, split="test", **options):
    return Retriever(run, store=store, split=split, device="cpu", **options).gallery


def test_every_picture_with_features_is_searched_unless_a_split_is_chosen(run, tmp_path):
    whole, parts = open_gallery(run, split=None), [open_gallery(run, split=name) for name in ("train", "val", "test")]
    assert (whole.part, parts[2].part) == ("", ", split test")
    for name in ("image_ids", "file_names", "texts", "caption_ids"):
        assert getattr(whole, name) == [one for part in parts for one in getattr(part, name)]
    assert whole.rows_of_splits() == {"train": (0, 48), "val": (48, 60), "test": (60, 72)}
    owners = [whole.image_ids[row] for row in whole.caption_image]
    assert owners == [part.image_ids[row] for part in parts for row in part.caption_image]
    torch.testing.assert_close(whole.images, torch.cat([part.images for part in parts]))
    some = open_gallery(run, make_store(tmp_path / "s.zarr", splits=("val", "test"), broken=(50,)), split=None)
    assert some.image_ids == [str(number) for number in range(48, 72) if number != 50]
    assert (some.part, some.rows_of_splits()) == (", splits val and test", {"val": (0, 11), "test": (11, 23)})


def test_a_split_that_is_half_done_is_no_part_of_a_whole(run, tmp_path):
    store = make_store(tmp_path / "s.zarr")
    cache = FeatureCache.open(store)
    features = cache.image_set()
    features.forget(1)
    with pytest.raises(CacheError, match=r"split 'train' of '.*' lacks 1 of \d+ chunks"):
        open_gallery(run, store, split=None)


def test_failed_images_and_their_captions_are_left_out(run, tmp_path):
    gallery = open_gallery(run, make_store(tmp_path / "s.zarr", broken=(61, 70)))
    kept = [number for number in range(60, 72) if number not in (61, 70)]
    assert gallery.image_ids == [str(number) for number in kept]
    assert gallery.file_names == [f"{number}.jpg" for number in kept]
    captions = [(number, k) for number in kept for k in range(2 + number % 2)]
    assert gallery.caption_ids == [str(10 * number + k) for number, k in captions]
    assert gallery.caption_image.tolist() == [kept.index(number) for number, _ in captions]
    assert (gallery.images.shape, gallery.captions.shape) == ((10, 16), (len(captions), 16))


def test_files_are_found_below_the_folder_of_the_images_and_nowhere_else(run, tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "images/0.jpg").touch()
    assert open_gallery(run, data_root=tmp_path).picture(3) == tmp_path / "images/63.jpg"
    with pytest.raises(CacheError, match="give their folder as `data_root=DIR`"):
        open_gallery(run).picture(0)
    with pytest.raises(CacheError, match="outside of the image folder"):
        open_gallery(run, make_store(tmp_path / "s.zarr", mark="../"), data_root=tmp_path)


@pytest.mark.parametrize("named", [False, True], ids=["numbers stand twice", "named by their files"])
def test_captions_without_numbers_of_their_own_are_counted_in_their_picture(run, monkeypatch, named):
    texts = open_gallery(run, split="val").texts
    if named:
        monkeypatch.setattr(FeatureCache, "ids", FeatureCache.file_names)
    else:
        monkeypatch.setattr(FeatureCache, "sentids", lambda cache, first, end: np.arange(first, end) % 2)
    gallery, cache = open_gallery(run, split="val"), FeatureCache.open(str(run.parent / "small.zarr"))
    rows = np.arange(cache.captions)[cache.caption_set().rows_of("val")]
    counted = [(image, k) for image, count in enumerate(cache.caption_count) for k in range(count)]
    expected = [counted[row] for row in rows]
    assert gallery.caption_ids == [f"{image}{'.jpg' * named}#{k}" for image, k in expected]
    assert gallery.texts == texts == cache.caption_texts(int(rows[0]), int(rows[-1]) + 1)
    failed, whole = [0, 4, len(rows) - 1], CaptionSet.status.func

    def status(captions):
        found = whole(captions)
        found[rows[failed]] = FAILED
        return found

    monkeypatch.setattr(CaptionSet, "status", property(status))
    kept = [f"{image}{'.jpg' * named}#{k}" for place, (image, k) in enumerate(expected) if place not in failed]
    assert open_gallery(run, split="val").caption_ids == kept
