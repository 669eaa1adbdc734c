"""Extraction of regions and frames: ragged rows, boxes, classes and scores in the store."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from small_extraction import SMALL

from xret.heads.recipes.recipe import load_recipe
from xret.heads.training.train import train
from xret.pipeline.data.images import open_image
from xret.pipeline.data.manifest import load_manifest
from xret.pipeline.data.regions import Regions
from xret.pipeline.encoders import EncoderSpec
from xret.pipeline.errors import CacheError
from xret.pipeline.extraction.extraction import extract
from xret.pipeline.reading.batches import stored_batches
from xret.pipeline.store import FeatureCache
from xret.pipeline.store.inspect import verify


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
    monkeypatch.setattr("xret.pipeline.encoders.load_visual_layers", lambda specs, device: [encoder])
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


def test_a_head_learns_from_ragged_regions(colours, tiny_dataset, tmp_path):
    url = str(tmp_path / "s.zarr")
    extract(load_manifest(tiny_dataset()), url, colours)
    cache = FeatureCache.open(url)
    fields = {"image_fields": {"local"}, "caption_fields": {"token"}}
    batches = stored_batches(cache.image_set(), cache.caption_set(), "val", **fields)
    features = next(batches.image_features(6))
    assert features.length.tolist() == [1 + number % 5 for number in range(20, 26)]
    settings = {"model.dim": 8, "adapter.words.word_dim": 4, "schedule.epochs": 1, "data.batch_size": 8}
    settings |= {f"aggregator.{side}.head_dim": 8 for side in ("image", "text")}
    recipe = load_recipe("setdiv", settings)
    assert np.isfinite(train(url, recipe, tmp_path / "run", device="cpu").best_rsum)


def test_a_value_beyond_the_dtype_names_the_picture(colours, tiny_dataset, tmp_path, monkeypatch):
    monkeypatch.setattr(ColourRegions, "regions", staticmethod(lambda *_: Regions(np.full((1, 3), 1e5, np.float32))))
    with pytest.raises(CacheError, match=r"'\d+\.jpg': a value of 1e\+05 is beyond float16; .*--dtype float32"):
        extract(load_manifest(tiny_dataset()), str(tmp_path / "s.zarr"), colours)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["butd", "fasterrcnn_resnet50_fpn_v2"])
def test_a_real_detector_fills_a_store(name, tiny_dataset, tmp_path):
    manifest, url = load_manifest(tiny_dataset(train=2, val=1)), str(tmp_path / "s.zarr")
    options = replace(SMALL, visual=EncoderSpec(name, "random:0", regions=(3, 7)))
    extract(manifest, url, options)
    features = FeatureCache.open(url).image_set()
    assert features.channels == (2048 if name == "butd" else 1024)
    assert features.rows == 7
    assert ((features.length >= 3) & (features.length <= 7)).all()
    boxes = features.array("boxes", np.arange(3))
    inside = np.arange(7) < features.length[:, None]
    assert (boxes[inside] >= 0).all()
    assert (boxes[inside][:, [0, 2]] <= 48).all()  # the pictures are 48 x 40
    assert (boxes[inside][:, [1, 3]] <= 40).all()
    assert verify(url).ok
    assert extract(manifest, url, options).sets[0].samples == 0
