"""Encoders put back for a fine-tuning, and the pictures that they read."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from encoder_contract import image_encoder

from xret.pipeline.data.manifest import bundled_manifests, load_manifest
from xret.pipeline.data.samples import Caption, ImageSample, Samples
from xret.pipeline.errors import CacheError, ManifestError
from xret.pipeline.reading.reattachment import find_pictures, image_folder, put_back_images
from xret.pipeline.store import FeatureCache
from xret.pipeline.store.store import open_for_writing


def test_a_saved_grid_of_bottom_up_attention_is_read_as_any_weights(tmp_path):
    encoder, path = image_encoder("butd-grid", "random:0", 64), tmp_path / "backbone.safetensors"
    pixels = 255 * torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))  # float32, as it decodes them
    with torch.no_grad():
        for parameter in encoder.network.parameters():
            parameter.mul_(1.01)
    encoder.save(path)
    again = image_encoder("butd-grid", path, 64)
    assert again.identity == {**encoder.identity, "weights": encoder.weights_id()}
    assert np.array_equal(again.encode(pixels)[0], encoder.encode(pixels)[0])


def store_of(folder, dataset):
    """Make a store with the picture a/0.jpg."""
    image = ImageSample("0", "a/0.jpg", "train", -1, (Caption("a", 0),))
    with open_for_writing(str(folder / f"{dataset}.zarr"), Samples(dataset, (image,), {"train": (0, 1)}, "x"), []):
        pass
    return FeatureCache.open(str(folder / f"{dataset}.zarr"))


def put(folder):
    (folder / "a").mkdir(parents=True)
    (folder / "a" / "0.jpg").write_bytes(b"picture")


def test_where_images_are(tmp_path):
    own, images, elsewhere = store_of(tmp_path, "own"), tmp_path / "data" / "images", tmp_path / "else" / "photos"
    with pytest.raises(CacheError, match=r"no folder was given; give their folder as data_root=DIR"):
        image_folder(own, None)
    with pytest.raises(CacheError, match=r"a/0\.jpg is not in .*, .*images; give"):
        image_folder(own, tmp_path)
    put(images)
    assert image_folder(own, images) == image_folder(own, tmp_path / "data") == images
    some = SimpleNamespace(dataset="own", images=3, file_names=lambda first, end: ["a/9.jpg", "a/8.jpg", "a/0.jpg"])
    assert image_folder(some, images) == images  # single pictures may be missing
    folder = tmp_path / "manifests"
    folder.mkdir()
    elsewhere.mkdir(parents=True)
    (folder / "c.csv").write_text("file_name,caption\na/0.jpg,a\n")
    (folder / "own.yaml").write_text(f"name: own\nimages: {elsewhere}\ncaptions: c.csv\n")
    (folder / "another.yaml").write_text("name: [")
    with pytest.raises(CacheError, match=rf"is not in .*images, {elsewhere}; give"):
        image_folder(own, folder)
    put(elsewhere)
    assert image_folder(own, folder) == elsewhere


def test_a_bundled_manifest_that_was_copied_with_its_name_finds_its_pictures(tmp_path, monkeypatch):
    store, folder = store_of(tmp_path, "flickr8k"), tmp_path / "mine"
    put(folder / "photos")
    (folder / "captions.json").write_text("{}")
    text = bundled_manifests()["flickr8k"].read_text()
    text = text.replace("images: flickr8k/images", "images: photos")
    text = text.replace("captions: flickr8k/dataset_flickr8k.json", "captions: captions.json")
    (folder / "flickr8k.yaml").write_text(text)
    monkeypatch.chdir(folder)
    for path in ("flickr8k.yaml", folder / "flickr8k.yaml"):
        assert load_manifest(path).images.resolve() == folder / "photos"
    assert image_folder(store, folder) == folder / "photos"
    assert find_pictures(store, folder).open("a/0.jpg").getvalue() == b"picture"


def test_the_bundled_manifest_is_asked_where_there_is_no_copy(tmp_path):
    store = store_of(tmp_path, "flickr8k")
    with pytest.raises(ManifestError, match="--data-root"):
        image_folder(store, tmp_path)
    put(tmp_path / "flickr8k" / "images")
    (tmp_path / "flickr8k" / "dataset_flickr8k.json").touch()
    assert image_folder(store, tmp_path) == tmp_path / "flickr8k" / "images"


@pytest.mark.parametrize(
    ("kind", "spec"),
    [("roi", {"name": "butd"}), ("grid", None), ("grid", {"name": "vgg11", "pool": (2, 2)}), ("grid", {"name": "a:B"})],
)
def test_what_cannot_be_put_back_says_why(kind, spec, tmp_path):
    features = SimpleNamespace(
        kind=kind, identity={}, dtype="float16", name="set@1", cache=SimpleNamespace(url="s"), attributes={"spec": spec}
    )
    with pytest.raises(CacheError, match=r"cannot be trained: .*--reattach text"):
        put_back_images(features, np.arange(3), tmp_path, None, "cpu", None)
