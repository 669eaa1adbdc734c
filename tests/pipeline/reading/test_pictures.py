"""Where the pictures of a store are looked for."""

import unicodedata
from types import SimpleNamespace

import pytest
from small_extraction import IMAGES

from xret.pipeline.data.image_columns import Caption, Images, ImageSample
from xret.pipeline.data.manifest import bundled_manifests, load_manifest
from xret.pipeline.data.samples import Samples
from xret.pipeline.errors import CacheError, ManifestError
from xret.pipeline.extraction.extraction import extract
from xret.pipeline.reading.pictures import find_pictures, image_folder
from xret.pipeline.store import FeatureCache
from xret.pipeline.store.store import open_for_writing


def store_of(folder, dataset):
    """Make a store with the picture a/0.jpg."""
    image = ImageSample("0", "a/0.jpg", "train", -1, (Caption("a", 0),))
    with open_for_writing(
        str(folder / f"{dataset}.zarr"), Samples(dataset, Images.of([image]), {"train": (0, 1)}, "x"), []
    ):
        pass
    return FeatureCache.open(str(folder / f"{dataset}.zarr"))


def put(folder):
    (folder / "a").mkdir(parents=True)
    (folder / "a" / "0.jpg").write_bytes(b"picture")


def test_where_images_are(tmp_path):
    own, images, elsewhere = store_of(tmp_path, "own"), tmp_path / "data" / "images", tmp_path / "else" / "photos"
    with pytest.raises(CacheError, match=r"no folder was given; give their folder as `data_root=DIR`"):
        image_folder(own, None)
    with pytest.raises(CacheError, match=r"a/0\.jpg is not in .*, .*images; give"):
        image_folder(own, tmp_path)
    put(images)
    assert image_folder(own, images) == image_folder(own, tmp_path / "data") == images
    some = SimpleNamespace(dataset="own", images=3, file_names=lambda first, end: ["a/9.jpg", "a/8.jpg", "a/0.jpg"])
    assert image_folder(some, images) == images  # single pictures may be missing
    (images / unicodedata.normalize("NFD", "é.jpg")).touch()  # as macOS spells it
    accented = SimpleNamespace(dataset="own", images=1, file_names=lambda first, end: ["é.jpg"])
    assert image_folder(accented, images) == images
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
    with pytest.raises(ManifestError, match="`data_root`"):
        image_folder(store, tmp_path)
    put(tmp_path / "flickr8k" / "images")
    (tmp_path / "flickr8k" / "dataset_flickr8k.json").touch()
    assert image_folder(store, tmp_path) == tmp_path / "flickr8k" / "images"


def test_pictures_that_are_other_files_than_those_of_the_features_are_named(tiny_dataset, tmp_path, caplog):
    manifest = load_manifest(tiny_dataset(train=4))
    extract(manifest, tmp_path / "s.zarr", IMAGES)
    store = FeatureCache.open(tmp_path / "s.zarr")
    name = store.file_names(0, 1)[0]
    (manifest.images / store.file_names(1, 2)[0]).unlink()  # gone is not another one
    find_pictures(store, manifest.images)
    assert "another file" not in caplog.text
    (manifest.images / name).write_bytes(b"else")
    find_pictures(store, manifest.images)
    assert f"{name} in {manifest.images} is another file than the one that {store.url} has features of" in caplog.text
