"""Extraction into a store: whose features they are, what is computed, and what is refused."""

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
from small_extraction import IMAGES, SMALL, captions_of, files

import xret
from xret.pipeline import workers
from xret.pipeline.data.images import open_image
from xret.pipeline.data.manifest import load_manifest
from xret.pipeline.encoders.registry import load_visual
from xret.pipeline.encoders.spec import EncoderSpec
from xret.pipeline.errors import CacheError, EncoderError
from xret.pipeline.extraction.extraction import extract
from xret.pipeline.extraction.options import build_options
from xret.pipeline.store import FeatureCache
from xret.pipeline.store.inspect import verify
from xret.pipeline.store.regions import Regions


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
    for picture in manifest.images.iterdir():  # which need not be there
        picture.unlink()
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
    own = build_options(visual="own_encoder:Paired", image_size=60, text=None)
    (first,) = extract(manifest, tmp_path / "s.zarr", own).sets
    (again,) = extract(manifest, tmp_path / "s.zarr", own).sets
    assert (again.name, again.samples) == (first.name, 0)

    class Another(own_encoder.Paired):
        def __init__(self, *how):
            super().__init__(*how)
            self.identity = {**self.identity, "layer": "another"}

    monkeypatch.setattr(own_encoder, "Paired", Another)
    (second,) = extract(manifest, tmp_path / "s.zarr", own).sets
    assert second.name != first.name and second.samples == 32


def test_splits_are_computed_when_asked_for_and_need_no_others_pictures(manifest, tmp_path, capsys):
    url, kept = tmp_path / "s.zarr", tmp_path / "kept"
    shutil.copytree(manifest.images, kept)
    for number in range(26):  # of train and val; test begins in the middle of a chunk
        (manifest.images / f"{number}.jpg").unlink()
    summary = extract(manifest, url, replace(SMALL, splits=("test",)))
    assert summary.sets[0].samples == 6
    told = {"dataset", "store", "images", "captions", "sets", *summary.counts}  # what does not apply is left out
    assert summary.to_json().keys() == told | ({"leaks"} if summary.leaks else set())
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


def test_what_splits_share_is_in_the_summary_now_and_when_all_is_done(manifest, tmp_path):
    for number in (21, 30):  # of val and of test
        shutil.copy(manifest.images / "0.jpg", manifest.images / f"{number}.jpg")
    for _ in range(2):
        found = extract(manifest, tmp_path / "s.zarr", SMALL).to_json()["leaks"]
        assert (found["pictures"], found["captions"], found["copies"]) == (1, 0, 0)
        assert "0.jpg (train)" in found["sentence"]
    assert verify(str(tmp_path / "s.zarr")).to_json()["leaks"] == found


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
        ({"encoder": "hf:x", "visual": "resnet18"}, CacheError, "in the place of `visual`"),
        ({"visual": "none", "visual_weights": None}, EncoderError, "`visual` is none, which takes no image_size"),
        ({"text": None, "prompt": "a {}"}, EncoderError, "`text` is none, which takes no prompt"),
        ({"visul": "resnet18"}, TypeError, "visul"),
        ({"workers": "tcp://127.0.0.1:9"}, CacheError, "no Dask scheduler answers"),
    ],
)
def test_python_refuses_what_the_command_line_refuses(options, error, message, manifest, tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "PATIENCE", 0.1)
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
    with pytest.raises(CacheError, match=r"'\d+\.jpg': a value of 1e\+05 is beyond float16; .*`dtype` float32"):
        extract(load_manifest(tiny_dataset()), str(tmp_path / "s.zarr"), colours)
