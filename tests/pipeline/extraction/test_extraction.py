"""Extraction into a store: whose features they are, what is computed, resumed, reused, repaired and refused."""

import gc
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import own_encoder
import pytest
import torch
import torchvision
from packed_data import SPLITS, PackedData
from PIL import Image
from small_encoder import SmallEncoder, use_for_images
from small_extraction import SMALL, files

import xret
from xret.pipeline.data.images import open_image
from xret.pipeline.data.manifest import load_manifest
from xret.pipeline.encoders.registry import load_visual
from xret.pipeline.encoders.spec import EncoderSpec
from xret.pipeline.errors import CacheError, EncoderError, ManifestError, SampleError
from xret.pipeline.extraction import cluster
from xret.pipeline.extraction.extraction import extract
from xret.pipeline.extraction.options import build_options
from xret.pipeline.reading.joined_sets import joined
from xret.pipeline.store import FeatureCache
from xret.pipeline.store.inspect import verify
from xret.pipeline.store.regions import Regions

IMAGES = replace(SMALL, text=None)


@pytest.fixture
def store(manifest, tmp_path):
    extract(manifest, tmp_path / "s.zarr", SMALL)
    return str(tmp_path / "s.zarr")


def captions_of(manifest):
    """Return what stands in a caption file, to be changed."""
    return json.loads(manifest.captions.read_text())


def test_features_are_the_encoders_own(manifest, store):
    cache = FeatureCache.open(store)
    images, encoder = cache.image_set(), load_visual(SMALL.visual, "cpu")
    for row, name in enumerate(cache.file_names(0, cache.images)):
        pixels, size = encoder.decode(manifest.images / name)
        local, global_ = encoder.encode(pixels[None])
        assert np.allclose(images.local(np.array([row])), local, rtol=2e-3, atol=1e-3)
        assert np.allclose(images.global_(np.array([row])), global_, rtol=2e-3, atol=1e-3)
        assert tuple(images.array("size", np.array([row]))[0]) == size == (48, 40)
    captions = cache.caption_set()
    words = [captions.vocabulary[token] for token in captions.token(np.array([1]))]
    assert words == ["a", "picture", "of", "thing", "0", "number", "1"]
    assert verify(store).ok


@pytest.mark.parametrize("how", [{"workers": 1}, {"workers": 3, "batch_size": 3}, {"batch_size": 1}])
def test_workers_and_batches_do_not_decide_the_features(manifest, store, tmp_path, how):
    extract(manifest, tmp_path / "other.zarr", replace(SMALL, **how))
    one, other = (FeatureCache.open(url) for url in (store, tmp_path / "other.zarr"))
    rows = np.arange(one.images)
    assert np.allclose(one.image_set().local(rows), other.image_set().local(rows), rtol=2e-3, atol=1e-3)
    rows = np.arange(one.captions)
    assert np.array_equal(one.caption_set().token(rows), other.caption_set().token(rows))


def test_views_whole_pictures_and_windows_are_features_of_their_own(manifest, tmp_path):
    how = {"visual": "resnet18", "visual_weights": "random:0", "text": None, "image_size": 96}
    extract(manifest, tmp_path / "s.zarr", build_options(**how, whole=True, pool=(2, 2), views="dihedral:4"))
    extract(manifest, tmp_path / "plain.zarr", build_options(**how, whole=True, pool=(2, 2)))
    views = FeatureCache.open(tmp_path / "s.zarr").image_set()
    plain = FeatureCache.open(tmp_path / "plain.zarr").image_set()
    rows = np.arange(32)
    assert (views.views, views.grid, views.cells) == (4, (2, 2), (3, 3))
    assert np.allclose(views.local(rows), plain.local(rows), rtol=2e-3, atol=1e-3)
    turned = [np.abs(views.local(rows, view) - plain.local(rows)).mean() for view in (1, 2, 3)]
    assert min(turned) > 0.01
    assert views.array("local", rows).shape == (32, 4, 4, 512)


def test_words_count_what_tokenisation_meets(manifest, tmp_path):
    content = captions_of(manifest)
    content["images"][-1]["sentences"][0]["raw"] = "an unheard word"
    content["images"][-1]["sentences"][1]["raw"] = " . "
    manifest.captions.write_text(json.dumps(content))
    counts = extract(manifest, tmp_path / "s.zarr", replace(SMALL, visual=None)).counts
    texts = [[one["raw"].split() for one in image["sentences"]] for image in content["images"]]
    known = {word for of_image in texts[:20] for words in of_image for word in words}
    unknown = sum(word not in known for of_image in texts for words in of_image for word in words)
    assert (counts["captions_without_words"], counts["unknown_tokens"]) == (1, unknown)
    assert counts["unknown_by_split"]["train"] == 0
    assert (counts["words"], counts["tokens"]) == (len(known) + 1, sum(len(words) for one in texts for words in one))


def test_a_second_run_computes_nothing_and_loads_nothing(store, manifest):
    before = files(store)
    program = f"""
import sys, time, xret
began = time.monotonic()
found = xret.extract({str(manifest.path)!r}, {store!r}, visual="resnet18", visual_weights="random:0", image_size=64,
                     text="words", batch_size=4)
print(sum(one.samples for one in found.sets), sum(one.chunks_before for one in found.sets) > 0, "torch" in sys.modules)
"""
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert said.split() == ["0", "True", "False"]
    assert files(store) == before


def test_what_is_finished_needs_no_pictures_and_no_place_to_write(store, manifest, tmp_path):
    shutil.rmtree(manifest.images)
    assert [one.samples for one in extract(manifest, store, SMALL).sets] == [0, 0]


def test_other_weights_in_the_same_file_are_another_set(manifest, tmp_path):
    network = torchvision.models.resnet18()
    weights = tmp_path / "w.pt"
    for _ in range(2):
        torch.save(network.state_dict(), weights)
        extract(manifest, tmp_path / "s.zarr", replace(IMAGES, visual=replace(SMALL.visual, weights=str(weights))))
        with torch.no_grad():
            network.conv1.weight.mul_(2)
    assert len(FeatureCache.open(tmp_path / "s.zarr").set_names("images")) == 2


def test_a_users_class_with_another_identity_is_another_set(manifest, tmp_path, monkeypatch):
    own = build_options(visual="own_encoder:Quarters", image_size=60, text=None)
    (first,) = extract(manifest, tmp_path / "s.zarr", own).sets
    (again,) = extract(manifest, tmp_path / "s.zarr", own).sets
    assert (again.name, again.samples) == (first.name, 0)

    class Another(own_encoder.Quarters):
        def __init__(self, *how):
            super().__init__(*how)
            self.identity = {**self.identity, "layer": "another"}

    monkeypatch.setattr(own_encoder, "Quarters", Another)
    (second,) = extract(manifest, tmp_path / "s.zarr", own).sets
    assert second.name != first.name and second.samples == 32


def test_splits_are_computed_when_asked_for_and_need_no_others_pictures(manifest, tmp_path, capsys):
    url, kept = tmp_path / "s.zarr", tmp_path / "kept"
    shutil.copytree(manifest.images, kept)
    for number in range(26):  # of train and val; test begins in the middle of a chunk
        (manifest.images / f"{number}.jpg").unlink()
    summary = extract(manifest, url, replace(SMALL, splits=("test",)))
    assert summary.sets[0].samples == 6
    assert ": 6/6 images" in capsys.readouterr().err
    images = FeatureCache.open(url).image_set()
    assert [images.complete(split) for split in ("train", "val", "test")] == [False, False, True]
    before = images.local(np.arange(26, 32))
    for number in range(26, 32):  # now only the others are there
        (manifest.images / f"{number}.jpg").unlink()
    for number in range(26):
        shutil.copy(kept / f"{number}.jpg", manifest.images)
    assert extract(manifest, url, SMALL).sets[0].samples == 26
    assert ": 6/32 images" in capsys.readouterr().err
    images = FeatureCache.open(url).image_set()
    assert all(map(images.complete, ("train", "val", "test")))
    assert np.array_equal(images.local(np.arange(26, 32)), before)
    assert verify(str(url)).ok


def test_two_extractions_in_one_process_do_not_touch_each_other(tiny_dataset, tmp_path, manifest, store):
    """Each marks what it has written, and nothing else."""
    urls, errors = [tmp_path / f"{number}.zarr" for number in range(3)], []

    def run(url):
        try:
            extract(manifest, url, SMALL)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(url,)) for url in [*urls, urls[0]]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not [error for error in errors if "another process is writing" not in str(error)]
    assert len(errors) <= 1  # of the two of one store
    for url in urls:
        assert verify(str(url)).ok
        found = FeatureCache.open(url)
        assert found.image_set().complete("train") and found.caption_set().complete("test")
        assert {name: data for name, data in files(url).items() if "/local/" in name} == {
            name: data for name, data in files(store).items() if "/local/" in name
        }


def test_the_host_process_stays_as_it_was(manifest, tmp_path):
    networks = {id(one) for one in gc.get_objects() if issubclass(type(one), torch.nn.Module)}
    before = torch.get_num_threads(), logging.getLogger("distributed").level, dict(os.environ)
    extract(manifest, tmp_path / "s.zarr", SMALL)
    gc.collect()
    left = [one for one in gc.get_objects() if issubclass(type(one), torch.nn.Module) and id(one) not in networks]
    assert not left  # the encoder went with the extraction
    assert (torch.get_num_threads(), logging.getLogger("distributed").level, dict(os.environ)) == before


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
    with pytest.raises(CacheError, match=r"holds other samples .* --reuse"):
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
        with pytest.raises(CacheError, match=r"1 picture of 32 changed .*\(3\.jpg\); .*--reuse"):
            extract(manifest, url, how)
    assert files(url) == before
    extract(manifest, url, replace(SMALL, visual=None))  # captions have no pictures
    (manifest.images / "3.jpg").write_bytes(kept[3])
    extract(manifest, url, IMAGES)
    assert [one.samples for one in extract(manifest, url, IMAGES).sets] == [0]
    (manifest.images / "30.jpg").unlink()  # gone is not changed
    assert [one.samples for one in extract(manifest, url, IMAGES).sets] == [0]
    (manifest.images / "30.jpg").write_bytes(kept[30])
    with pytest.raises(CacheError, match=r"\(30\.jpg\)"):
        extract(manifest, url, IMAGES)


def test_what_splits_share_is_in_the_summary_now_and_when_all_is_done(manifest, tmp_path):
    for number in (21, 30):  # of val and of test
        shutil.copy(manifest.images / "0.jpg", manifest.images / f"{number}.jpg")
    for _ in range(2):
        found = extract(manifest, tmp_path / "s.zarr", SMALL).to_json()["leaks"]
        assert (found["pictures"], found["captions"], found["copies"]) == (1, 0, 0)
        assert "0.jpg (train)" in found["sentence"]
    assert verify(str(tmp_path / "s.zarr")).to_json()["leaks"] == found


def test_a_second_set_of_other_pictures_is_refused_as_it_is_read(manifest, tmp_path):
    """By their digests, where stamps cannot tell: a file of the same size and time."""
    url = str(tmp_path / "s.zarr")
    picture = manifest.images / "25.jpg"
    picture.write_bytes(picture.read_bytes() + b"\0")
    extract(manifest, url, IMAGES)
    then = picture.stat()
    picture.write_bytes(picture.read_bytes()[:-1] + b"\1")
    os.utime(picture, ns=(then.st_atime_ns, then.st_mtime_ns))
    with pytest.raises(CacheError, match=r"another picture '25\.jpg'.*--reuse"):
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
    after = splits("new.zarr", *new, reuse=str(tmp_path / "s.zarr"))
    assert {name: after[name] for name in before} == before
    assert [[*after.values()].count(split) for split in SPLITS] == [33, 4, 5]


def test_a_store_without_that_encoder_gives_nothing(manifest, store, tmp_path, caplog):
    other = replace(IMAGES, visual=replace(SMALL.visual, weights="random:1"), reuse=store)
    with caplog.at_level(logging.WARNING, "xret"):
        (images,) = extract(manifest, tmp_path / "new.zarr", other).sets
    assert images.reused == 0 and images.samples == 32
    assert "nothing is reused" in caplog.text


def test_a_broken_picture_stops_or_is_recorded_and_repaired(manifest, tmp_path):
    url, good = tmp_path / "s.zarr", (manifest.images / "4.jpg").read_bytes()
    (manifest.images / "4.jpg").write_bytes(b"no picture")
    with pytest.raises(SampleError, match=r"4\.jpg.*--on-error skip"):
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


def test_a_value_beyond_the_dtype_names_the_picture(manifest, tmp_path):
    network = torchvision.models.resnet18()
    with torch.no_grad():
        network.conv1.weight.mul_(1e30)
    torch.save(network.state_dict(), tmp_path / "w.pt")
    huge = replace(IMAGES, visual=replace(SMALL.visual, weights=str(tmp_path / "w.pt")))
    with pytest.raises(CacheError, match=r"\.jpg': (a value of .* is beyond float16|the encoder gave NaN)"):
        extract(manifest, tmp_path / "s.zarr", huge)


NAN, LARGE = "the encoder gave NaN or infinity", "beyond float16; extract with --dtype float32"
TINY = "values of 1e-08 at most are too small for float16; extract with --dtype float32"


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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_gpu_stores_what_its_encoder_gives(dtype, tiny_dataset, tmp_path):
    manifest, visual = load_manifest(tiny_dataset(train=18)), replace(IMAGES.visual, dtype=dtype)
    extract(manifest, tmp_path / "s.zarr", replace(IMAGES, device="cuda", batch_size=4, visual=visual))
    encoder = load_visual(visual, "cuda")
    pixels = [encoder.decode(manifest.images / f"{number}.jpg")[0] for number in range(18)]
    encoded = [encoder.encode(torch.stack(pixels[first : first + 4])) for first in range(0, 18, 4)]
    features = FeatureCache.open(str(tmp_path / "s.zarr")).image_set()
    for stored, values in zip((features.local, features.global_), zip(*encoded, strict=True), strict=True):
        assert np.array_equal(stored(np.arange(18)), np.concatenate(values).astype(dtype))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"text": "brt"}, EncoderError, r"did you mean 'bert'"),
        (
            {"visual": None, "visual_weights": None, "image_size": None, "text": "none"},
            CacheError,
            "nothing to extract",
        ),
        ({"dtype": "bfloat16"}, CacheError, "Zarr has no bfloat16"),
        ({"on_error": "ignore"}, CacheError, "give fail or skip"),
        ({"batch_size": 0}, CacheError, "at least 1"),
        ({"workers": 1.5}, CacheError, "a whole number"),
        ({"pool": "2x2"}, EncoderError, "two whole numbers"),
        ({"prompt": "a photo of {}"}, EncoderError, "'words' does not take prompt"),
        ({"text_weights": "minilm"}, EncoderError, "'words' does not take weights"),
        ({"splits": "dev"}, CacheError, "no image in split dev"),
        ({"encoder": "resnet18"}, EncoderError, "give a model of pictures and texts"),
        ({"encoder": "hf:x", "visual": "resnet18"}, CacheError, "in the place of --visual"),
        ({"visual": "none", "visual_weights": None}, EncoderError, "--visual is none, which takes no image_size"),
        ({"text": None, "prompt": "a {}"}, EncoderError, "--text is none, which takes no prompt"),
        ({"visul": "resnet18"}, TypeError, "visul"),
        ({"workers": "tcp://127.0.0.1:9"}, CacheError, "no Dask scheduler answers"),
    ],
)
def test_python_refuses_what_the_command_line_refuses(options, error, message, manifest, tmp_path, monkeypatch):
    monkeypatch.setattr(cluster, "PATIENCE", 0.1)
    small = {"visual": "resnet18", "visual_weights": "random:0", "image_size": 64, "text": "words"}
    how = options if "encoder" in options else small | options
    with pytest.raises(error, match=message):
        xret.extract(manifest.path, tmp_path / "s.zarr", **how)
    assert not (tmp_path / "s.zarr" / "images" / "resnet18").exists()


def test_splits_are_names_or_one_text(manifest, tmp_path):
    how = {"visual": None, "text": "words"}
    for splits in ("train,val", ["train", "val"], ("train", "val")):
        xret.extract(manifest.path, tmp_path / "s.zarr", splits=splits, **how)
    captions = FeatureCache.open(tmp_path / "s.zarr").caption_set()
    assert captions.complete("train") and captions.complete("val")


def test_captions_of_a_language_without_spaces(manifest, tmp_path, caplog):
    content = captions_of(manifest)
    for row, image in enumerate(content["images"]):
        for number, one in enumerate(image["sentences"]):
            one["raw"] = f"男人骑着一匹马在第{'甲乙丙丁戊己庚辛壬癸'[row % 10]}{'子丑寅卯辰'[number]}街" + "头" * (
                row // 10
            )
    manifest.captions.write_text(json.dumps(content))
    counts = extract(manifest, tmp_path / "s.zarr", replace(SMALL, visual=None)).counts
    assert "have no spaces" in caplog.text
    assert counts["unknown_by_split"]["train"] == 0
    assert counts["unknown_by_split"]["test"] == 1
    assert counts["captions_unknown"] == sum(
        len(one["sentences"]) for one in content["images"] if one["split"] != "train"
    )


FORMS = ("tars", "webdataset", "parquet", "saved", "saved_splits")


@pytest.fixture
def data(tmp_path):
    return PackedData(tmp_path / "data")


def values_of(path, url, **changes):
    """Extract a data set; return its ids and captions and all features in the order of the store."""
    extract(load_manifest(path), url, replace(SMALL, **changes))
    cache = FeatureCache.open(url)
    images, captions = cache.image_set(), cache.caption_set()
    rows, texts = np.arange(cache.images), np.arange(cache.captions)
    assert verify(str(url)).ok
    return [
        cache.caption_texts(0, cache.captions),
        images.local(rows).tolist(),
        images.array("size", rows).tolist(),
        captions.token(texts).tolist(),
    ]


@pytest.mark.parametrize("form", FORMS)
def test_every_value_is_that_of_the_folder(data, tmp_path, form):
    if form == "saved_splits":
        data.rows.sort(key=lambda row: SPLITS.index(row[3]))
    expected = values_of(data.as_folder(), tmp_path / "folder.zarr")
    path = getattr(data, f"as_{form}")()
    assert values_of(path, tmp_path / "packed.zarr") == expected
    summary = extract(load_manifest(path), tmp_path / "packed.zarr", SMALL)
    assert [one.samples for one in summary.sets] == [0, 0]
    cache, manifest = FeatureCache.open(tmp_path / "packed.zarr"), load_manifest(path)
    pictures = cache.open_pictures(manifest.images, 0, cache.images)
    sizes = cache.image_set().array("size", np.arange(cache.images)).tolist()
    for name, size in zip(cache.file_names(0, cache.images), sizes, strict=True):
        assert list(open_image(pictures.open(name)).size) == size


def test_files_that_were_changed_are_refused(data, tmp_path):
    path = data.as_tars()
    extract(load_manifest(path), tmp_path / "s.zarr", replace(SMALL, splits=("train",)))
    changed = next(load_manifest(path).images.rglob("*.tar"))
    os.utime(changed, (1, 1))
    with pytest.raises(CacheError, match="made of other files"):
        extract(load_manifest(path), tmp_path / "s.zarr", SMALL)


class ColourRegions:
    """Regions made of a picture's pixels, as many as its number says; the numbers can be computed again."""

    name, kind = "colours", "roi"
    rows, channels, global_channels = 5, 3, 3
    extras = ("boxes", "classes", "scores")
    grid = space = None
    identity: dict = {"encoder": name, "weights": "none", "preprocessing": {}, "layer": None}  # noqa: RUF012
    versions: dict = {}  # noqa: RUF012
    spec = EncoderSpec("butd")

    def decode(self, path):
        image = open_image(path)
        return (np.asarray(image, dtype=np.float32), int(Path(path.name).stem)), image.size

    def encode(self, decoded):
        return [self.regions(*one) for one in decoded]

    @staticmethod
    def regions(pixels, number):
        count = 1 + number % 5
        local = np.stack([pixels[row, row] for row in range(count)])
        boxes = np.array([[row, row, row + 1, row + 1] for row in range(count)], dtype=np.float32)
        scores = np.linspace(1, 0.5, count, dtype=np.float32)
        return Regions(local, boxes, np.arange(count), scores)


@pytest.fixture
def colours(monkeypatch):
    encoder = ColourRegions()
    monkeypatch.setattr("xret.pipeline.encoders.registry.load_visual_layers", lambda specs, device: [encoder])
    return replace(SMALL, visual=EncoderSpec("butd"))


def test_regions_lie_in_the_store_as_the_encoder_gave_them(colours, tiny_dataset, tmp_path):
    manifest, url = load_manifest(tiny_dataset()), str(tmp_path / "s.zarr")
    extract(manifest, url, colours)
    cache = FeatureCache.open(url)
    features = cache.image_set()
    assert (features.kind, features.rows, features.dtype) == ("roi", 5, "float16")
    for row, name in enumerate(cache.file_names(0, cache.images)):
        image = open_image(manifest.images / name)
        expected = ColourRegions.regions(np.asarray(image, dtype=np.float32), int(name.split(".")[0]))
        count, at = len(expected.local), np.array([row])
        assert features.length[row] == count
        assert np.array_equal(features.local(at)[0, :count], expected.local.astype(np.float16))
        assert not features.local(at)[0, count:].any()
        assert np.array_equal(features.array("boxes", at)[0, :count], expected.boxes)
        assert np.array_equal(features.array("scores", at)[0, :count], expected.scores)
        assert features.array("classes", at)[0].tolist() == [*range(count), *[-1] * (5 - count)]
        assert features.array("size", at)[0].tolist() == list(image.size)
        assert features.global_(at)[0] == pytest.approx(expected.local.mean(0), rel=1e-3)
    assert verify(url).ok


def test_a_value_of_regions_beyond_the_dtype_names_the_picture(colours, tiny_dataset, tmp_path, monkeypatch):
    large = Regions(np.full((1, 3), 1e5, np.float32), *(np.zeros(shape) for shape in ((1, 4), (1,), (1,))))
    monkeypatch.setattr(ColourRegions, "regions", staticmethod(lambda *_: large))
    with pytest.raises(CacheError, match=r"'\d+\.jpg': a value of 1e\+05 is beyond float16; .*--dtype float32"):
        extract(load_manifest(tiny_dataset()), str(tmp_path / "s.zarr"), colours)
