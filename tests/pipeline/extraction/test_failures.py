"""Pictures that cannot be read, features that cannot be held, damaged chunks: named, recorded, repaired."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from small_encoder import SmallEncoder, use_for_images
from small_extraction import IMAGES, SMALL, files

from xret.pipeline.data.manifest import load_manifest
from xret.pipeline.errors import CacheError, ManifestError, SampleError
from xret.pipeline.extraction.extraction import extract
from xret.pipeline.store import FeatureCache
from xret.pipeline.store.inspect import verify


def test_a_broken_picture_stops_or_is_recorded_and_repaired(manifest, tmp_path):
    url, good = tmp_path / "s.zarr", (manifest.images / "4.jpg").read_bytes()
    (manifest.images / "4.jpg").write_bytes(b"no picture")
    with pytest.raises(SampleError, match=r"4\.jpg.*`on_error` skip"):
        extract(manifest, url, IMAGES)
    (images,) = extract(manifest, url, replace(IMAGES, on_error="skip")).sets
    assert images.failed == 1 and "4.jpg" in images.reasons[0]
    features = FeatureCache.open(url).image_set()
    assert dict(features.failures).keys() == {"4"} and features.complete("train")
    assert np.isnan(features.local(np.array([4]))).all() and np.isfinite(features.local(np.array([5]))).all()
    assert verify(str(url)).failed_samples[0]["id"] == "4"
    (images,) = extract(manifest, url, replace(IMAGES, on_error="skip")).sets  # it stays as it is
    assert (images.samples, images.failed) == (0, 1)
    (manifest.images / "4.jpg").write_bytes(good)
    (images,) = extract(manifest, url, replace(IMAGES, repair=True)).sets
    assert (images.failed, images.chunks, images.samples) == (0, 1, 1)
    extract(manifest, tmp_path / "whole.zarr", IMAGES)
    repaired, whole = (FeatureCache.open(one).image_set() for one in (url, tmp_path / "whole.zarr"))
    for name in ("local", "global", "length", "size", "digest"):
        one, other = (features.array(name, np.arange(32)) for features in (repaired, whole))
        assert np.allclose(one[4], other[4], rtol=2e-3, atol=1e-3)  # it was alone in its batch
        assert np.array_equal(np.delete(one, 4, 0), np.delete(other, 4, 0))
    assert verify(str(url)).ok and files(url).keys() == files(tmp_path / "whole.zarr").keys()


def test_failures_of_a_split_stay_when_another_ones_join_them(manifest, tmp_path):
    for number in (17, 21):  # of train and of val, in one chunk
        (manifest.images / f"{number}.jpg").write_bytes(b"no picture")
    how = replace(IMAGES, on_error="skip")
    for splits in (("train",), ("train", "val", "test")):
        (images,) = extract(manifest, tmp_path / "s.zarr", replace(how, splits=splits)).sets
    features = FeatureCache.open(tmp_path / "s.zarr").image_set()
    assert dict(features.failures).keys() == {"17", "21"} and len(images.reasons) == images.failed == 2
    assert features.chunks_of("train")[-1] == features.chunks_of("val")[0]


def test_a_repair_of_a_split_keeps_the_others_and_their_failures(manifest, tmp_path):
    good = {number: (manifest.images / f"{number}.jpg").read_bytes() for number in (17, 21)}  # of train and of val
    for number in good:
        (manifest.images / f"{number}.jpg").write_bytes(b"no picture")
    extract(manifest, tmp_path / "s.zarr", replace(IMAGES, on_error="skip"))
    for number, data in good.items():
        (manifest.images / f"{number}.jpg").write_bytes(data)
    (images,) = extract(manifest, tmp_path / "s.zarr", replace(IMAGES, repair=True, splits=("val",))).sets
    features = FeatureCache.open(tmp_path / "s.zarr").image_set()
    assert images.samples == 1 and dict(features.failures).keys() == {"17"}
    assert all(features.complete(split) for split in ("train", "val", "test"))


@pytest.mark.parametrize(("array", "chunk", "file"), [("local", 2, "c.2.0.0"), ("status", 1, "c.1")])
def test_what_is_damaged_is_named_and_repaired_alone(manifest, store, array, chunk, file):
    before, path = files(store), FeatureCache.open(store).image_set().path
    with Path(store, path, array, file).open("r+b") as opened:
        opened.write(b"\x07")
    (damage,) = verify(store).damaged
    assert (damage.array, damage.chunk) == (f"{path}/{array}", chunk)
    summary = extract(manifest, store, replace(SMALL, repair=True))
    assert (summary.sets[0].chunks, summary.sets[0].chunks_before) == (1, 3)
    assert files(store) == before


def test_a_repair_that_would_lose_good_features_is_refused(manifest, store):
    images = FeatureCache.open(store).image_set()
    with Path(store, images.path, "global", "c.0.0").open("r+b") as opened:
        opened.write(b"\xff")
    before = files(store)
    (manifest.images / "3.jpg").unlink()
    with pytest.raises(ManifestError, match=r"3\.jpg.*would lose"):
        extract(manifest, store, replace(SMALL, repair=True, on_error="skip"))
    assert files(store) == before


def test_missing_pictures_are_counted_before_a_store_is_there(manifest, tmp_path):
    for number in (3, 7):
        (manifest.images / f"{number}.jpg").unlink()
    with pytest.raises(ManifestError, match=r"2 pictures of 32 are missing \(3\.jpg, 7\.jpg\)"):
        extract(manifest, tmp_path / "s.zarr", SMALL)
    assert not (tmp_path / "s.zarr").exists()
    (images,) = extract(manifest, tmp_path / "s.zarr", replace(IMAGES, on_error="skip")).sets
    assert images.failed == 2


@pytest.mark.parametrize(("first", "splits"), [(26, "'test'"), (20, "'val' or 'test'")])
def test_a_split_of_which_nothing_can_be_read_is_refused_and_tried_again(manifest, tmp_path, first, splits):
    good = {number: (manifest.images / f"{number}.jpg").read_bytes() for number in range(first, 32)}
    for number in good:
        (manifest.images / f"{number}.jpg").write_bytes(b"")
    with pytest.raises(CacheError, match=f"no image of split {splits} could be read"):
        extract(manifest, tmp_path / "s.zarr", replace(IMAGES, on_error="skip"))
    for number, data in good.items():
        (manifest.images / f"{number}.jpg").write_bytes(data)
    (images,) = extract(manifest, tmp_path / "s.zarr", IMAGES).sets
    assert (images.failed, images.samples) == (0, len(good))


NAN, LARGE = "the encoder gave NaN or infinity", "beyond float16; extract with `dtype` float32"
TINY = "values of 1e-08 at most are too small for float16; extract with `dtype` float32"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({(0, 1, 1, 2): 1e5, (0, 3, 0, 5): np.nan}, f"'3.jpg': {NAN}"),
        ({(0, 1, 1, 2): -np.inf}, f"'1.jpg': {NAN}"),
        ({(0, 2, 3, 15): -7e4, (1, 0, 0): np.nan}, f"'2.jpg': a value of 7e+04 is {LARGE}"),
        ({(1, 4, 0): 65520.0}, f"'4.jpg': a value of 6.55e+04 is {LARGE}"),
        ({(0, 5, 2): 1e-8}, f"'5.jpg': {TINY}"),
        ({(1, 5): -1e-8, (1, 6): 1e-8}, f"'5.jpg': {TINY}"),
        ({(0, 2, 3, 15): 65504.0, (0, 1, 0): 0.0, (1, 1): 1e-5, (0, 5, 2, 1): 1e-8, (0, 3, 1): 3e-3}, None),
    ],
)
def test_what_the_dtype_cannot_hold_is_refused_and_the_rest_is_cast(
    changes, sentence, tiny_dataset, tmp_path, monkeypatch
):
    """The sentences follow from the definition: a value beyond float16, a row that is off by more than 1%."""
    use_for_images(monkeypatch, encoder := SmallEncoder())
    random = np.random.default_rng(0)
    made = random.standard_normal((8, 4, 16), np.float32), random.standard_normal((8, 16), np.float32)
    for (which, *place), value in changes.items():
        made[which][tuple(place)] = value
    encoder.encode = lambda pixels: made
    manifest, options = load_manifest(tiny_dataset(train=8)), replace(IMAGES, batch_size=8)
    if sentence is not None:
        with pytest.raises(CacheError) as caught:
            extract(manifest, tmp_path / "s.zarr", options)
        assert sentence in str(caught.value)
        return
    extract(manifest, tmp_path / "s.zarr", options)
    features = FeatureCache.open(str(tmp_path / "s.zarr")).image_set()
    for stored, values in zip((features.local, features.global_), made, strict=True):
        assert np.asarray(stored(np.arange(8))).tobytes() == values.astype(np.float16).tobytes()
