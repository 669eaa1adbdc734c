"""Pictures and captions that have changed since a store has features of them, and features that are copied."""

import json
import logging
import os
import shutil
from dataclasses import replace

import numpy as np
import pytest
from packed_data import SPLITS
from PIL import Image
from small_extraction import IMAGES, SMALL, captions_of, files

from xret.pipeline.errors import CacheError
from xret.pipeline.extraction.extraction import extract
from xret.pipeline.reading.joined_sets import joined
from xret.pipeline.store import FeatureCache
from xret.pipeline.store.inspect import verify


def test_features_of_the_same_pictures_and_captions_are_copied(manifest, tmp_path, small_bert):
    how = replace(SMALL, text=replace(SMALL.text, name="bert", weights=str(small_bert)))
    extract(manifest, tmp_path / "old.zarr", how)
    content = captions_of(manifest)
    content["images"][3]["sentences"][0]["raw"] = "a new text"
    manifest.captions.write_text(json.dumps(content))
    shutil.copy(manifest.images / "5.jpg", manifest.images / "0.jpg")
    (manifest.images / "1.jpg").write_bytes((manifest.images / "1.jpg").read_bytes() + b"\0")  # other bytes
    new = extract(manifest, tmp_path / "new.zarr", replace(how, reuse=str(tmp_path / "old.zarr")))
    images, captions = new.sets
    assert (images.reused, images.samples) == (31, 1)
    assert (captions.reused, captions.samples) == (79, 1)
    extract(manifest, tmp_path / "plain.zarr", how)
    one, other = (FeatureCache.open(tmp_path / name) for name in ("new.zarr", "plain.zarr"))
    assert np.allclose(one.image_set().local(np.arange(32)), other.image_set().local(np.arange(32)), atol=2e-3)
    assert np.allclose(one.caption_set().local(np.arange(80)), other.caption_set().local(np.arange(80)), atol=2e-3)
    with pytest.raises(CacheError, match=r"holds other samples .* `reuse`"):
        extract(manifest, tmp_path / "old.zarr", how)


@pytest.fixture
def small_bert(tmp_path):
    from small_bert import save_bert

    return save_bert(tmp_path / "bert")


OTHER = replace(IMAGES, visual=replace(IMAGES.visual, weights="random:1"))


def replace_pictures(manifest, *numbers):
    """Put other pictures in the place of these."""
    for number in numbers:
        Image.new("RGB", (48, 40), (number, 9, 9)).save(manifest.images / f"{number}.jpg")


def test_pictures_that_were_replaced_are_refused_and_those_with_another_time_are_not(manifest, tmp_path):
    url = str(tmp_path / "s.zarr")
    extract(manifest, url, replace(IMAGES, splits=("train",)))
    kept, before = {number: (manifest.images / f"{number}.jpg").read_bytes() for number in (3, 30)}, files(url)
    replace_pictures(manifest, 3, 30)  # of train, and of test, which has no features yet
    os.utime(manifest.images / "5.jpg", (1, 1))
    for how in (replace(IMAGES, splits=("train",)), IMAGES, OTHER):
        with pytest.raises(CacheError, match=r"1 picture of 32 changed .*\(3\.jpg\); .*`reuse`"):
            extract(manifest, url, how)
    assert files(url) == before
    extract(manifest, url, replace(SMALL, visual=None))  # captions have no pictures
    (manifest.images / "3.jpg").write_bytes(kept[3])
    extract(manifest, url, IMAGES)
    assert [(one.samples, one.reused, one.chunks) for one in extract(manifest, url, IMAGES).sets] == [(0, 0, 0)]
    (manifest.images / "30.jpg").unlink()  # gone is not changed
    assert [(one.samples, one.reused, one.chunks) for one in extract(manifest, url, IMAGES).sets] == [(0, 0, 0)]
    (manifest.images / "30.jpg").write_bytes(kept[30])
    with pytest.raises(CacheError, match=r"\(30\.jpg\)"):
        extract(manifest, url, IMAGES)


def test_a_second_set_of_other_pictures_is_refused_as_it_is_read(manifest, tmp_path):
    """By their digests, where stamps cannot tell: a file of the same size and time."""
    url = str(tmp_path / "s.zarr")
    picture = manifest.images / "25.jpg"
    picture.write_bytes(picture.read_bytes() + b"\0")
    extract(manifest, url, IMAGES)
    then = picture.stat()
    picture.write_bytes(picture.read_bytes()[:-1] + b"\1")
    os.utime(picture, ns=(then.st_atime_ns, then.st_mtime_ns))
    with pytest.raises(CacheError, match=r"another picture '25\.jpg'.*`reuse`"):
        extract(manifest, url, replace(OTHER, on_error="skip"))
    picture.unlink()  # a file that is lost is a failure
    (images,) = extract(manifest, url, replace(OTHER, on_error="skip")).sets
    assert images.failed == 1 and verify(url).ok


def test_two_sets_of_different_pictures_are_found_and_not_read_together(manifest, tmp_path):
    one, two = tmp_path / "one.zarr", tmp_path / "two.zarr"
    extract(manifest, one, IMAGES)
    replace_pictures(manifest, 3, 30)
    extract(manifest, two, OTHER)
    first, second = (FeatureCache.open(url).set_paths("images")[0] for url in (one, two))
    shutil.copytree(two / second, one / second)  # stores are joined by copying
    found = verify(str(one))
    assert not found.ok and not found.damaged
    (differing,) = found.to_json()["differing"]
    assert {*differing["sets"]} == {first, second} and (differing["images"], differing["example"]) == (2, "3.jpg")
    cache = FeatureCache.open(one)
    with pytest.raises(CacheError, match=r"different pictures \(2 files, such as '3\.jpg'\)"):
        joined([cache.set_at(path) for path in (first, second)])
    with pytest.raises(CacheError, match=r"\(3\.jpg, 30\.jpg\)"):
        extract(manifest, one, OTHER)


def test_a_store_takes_the_protocols_that_its_manifest_names_now(manifest, tmp_path, caplog):
    url, before = tmp_path / "s.zarr", manifest.protocols
    extract(manifest, url, IMAGES)
    caplog.set_level(logging.INFO, "xret")
    (kept,) = extract(replace(manifest, protocols=("1k-folds", "full")), url, IMAGES).sets
    assert FeatureCache.open(url).protocols == ("1k-folds", "full") != before
    assert kept.samples == 0 and verify(str(url)).ok
    assert f"{url} is evaluated by 1k-folds and full from now on" in caplog.text


def test_a_store_keeps_its_own_split_and_hands_it_on_with_reuse(manifest, tmp_path):
    content = captions_of(manifest)
    for image in content["images"]:
        del image["split"]

    def splits(name, *images, **how):
        manifest.captions.write_text(json.dumps({"images": [*content["images"], *images]}))
        extract(manifest, tmp_path / name, replace(IMAGES, **how))
        cache = FeatureCache.open(tmp_path / name)
        return {name: split for split, rows in cache.splits.items() for name in cache.file_names(*rows)}

    before = splits("s.zarr", splits=("test",))
    assert [[*before.values()].count(split) for split in SPLITS] == [25, 3, 4]
    (manifest.images / "1.jpg").write_bytes((manifest.images / "0.jpg").read_bytes())  # it has no features yet
    assert splits("s.zarr") == before
    replace_pictures(manifest, *range(100, 110))
    new = [
        image | {"filename": f"{number + 100}.jpg", "imgid": number + 100}
        for number, image in enumerate(content["images"][:10])
    ]
    for image in new:
        image["sentences"] = [one | {"imgid": image["imgid"]} for one in image["sentences"]]
    with pytest.raises(CacheError, match="there is no feature store"):
        splits("new.zarr", *new, reuse=str(tmp_path / "else.zarr"))
    after = splits("new.zarr", *new, reuse=str(tmp_path / "s.zarr"))
    assert {name: after[name] for name in before} == before
    assert [[*after.values()].count(split) for split in SPLITS] == [33, 4, 5]


def test_pictures_of_the_test_that_the_other_store_trains_with_are_named(manifest, tmp_path, caplog):
    extract(manifest, tmp_path / "old.zarr", IMAGES)
    content = captions_of(manifest)
    known = [image for image in content["images"] if image["split"] == "train"][:2]
    for image in known:
        (manifest.images / image["filename"]).rename(manifest.images / f"new-{image['filename']}")
        image |= {"filename": f"new-{image['filename']}", "split": "test"}
    manifest.captions.write_text(json.dumps(content))
    extract(manifest, tmp_path / "new.zarr", replace(IMAGES, reuse=str(tmp_path / "old.zarr")))
    assert f"2 pictures of test are in train of {tmp_path / 'old.zarr'}, such as {known[0]['filename']}" in caplog.text
    caplog.clear()
    extract(manifest, tmp_path / "newer.zarr", replace(IMAGES, reuse=str(tmp_path / "new.zarr")))
    assert "are in train of" not in caplog.text


def test_a_store_without_that_encoder_gives_nothing(manifest, store, tmp_path, caplog):
    other = replace(IMAGES, visual=replace(SMALL.visual, weights="random:1"), reuse=store)
    with caplog.at_level(logging.WARNING, "xret"):
        (images,) = extract(manifest, tmp_path / "new.zarr", other).sets
    assert images.reused == 0 and images.samples == 32
    assert "nothing is reused" in caplog.text


def test_views_are_copied_for_the_same_picture_of_the_same_id(manifest, tmp_path):
    """By the id they are drawn, where a picture has several."""
    how = replace(IMAGES, visual=replace(IMAGES.visual, views="crop-flip:2"), splits=("test",))
    extract(manifest, tmp_path / "old.zarr", how)
    content = captions_of(manifest)
    content["images"][-1]["imgid"] = 999
    manifest.captions.write_text(json.dumps(content))
    (images,) = extract(manifest, tmp_path / "new.zarr", replace(how, reuse=str(tmp_path / "old.zarr"))).sets
    assert (images.reused, images.samples) == (5, 1)
