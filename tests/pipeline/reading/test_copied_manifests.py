"""A bundled manifest that was copied beside somebody's pictures, with its name kept, finds them there."""

import pytest

from xret.pipeline.data.manifest import bundled_manifests, load_manifest
from xret.pipeline.data.samples import Caption, ImageSample, Samples
from xret.pipeline.errors import ManifestError
from xret.pipeline.reading.reattachment import find_pictures, image_folder
from xret.pipeline.store import FeatureCache
from xret.pipeline.store.store import open_for_writing


@pytest.fixture
def store(tmp_path):
    """A store of Flickr8k with one picture."""
    image = ImageSample("0", "a/0.jpg", "train", -1, (Caption("a", 0),))
    url = str(tmp_path / "s.zarr")
    with open_for_writing(url, Samples("flickr8k", (image,), {"train": (0, 1)}, "x"), []):
        pass
    return FeatureCache.open(url)


@pytest.fixture
def folder(tmp_path):
    """A folder with pictures and captions as their owner laid them out, and a copy of the manifest that says so."""
    folder = tmp_path / "mine"
    (folder / "photos" / "a").mkdir(parents=True)
    (folder / "photos" / "a" / "0.jpg").write_bytes(b"picture")
    (folder / "captions.json").write_text("{}")
    text = bundled_manifests()["flickr8k"].read_text()
    text = text.replace("images: flickr8k/images", "images: photos")
    text = text.replace("captions: flickr8k/dataset_flickr8k.json", "captions: captions.json")
    (folder / "flickr8k.yaml").write_text(text)
    return folder


def test_relative_paths_start_at_the_copy(folder, monkeypatch):
    monkeypatch.chdir(folder)
    for path in ("flickr8k.yaml", folder / "flickr8k.yaml"):
        assert load_manifest(path).images.resolve() == folder / "photos"


def test_a_store_finds_its_pictures_by_the_copy(store, folder):
    assert image_folder(store, folder) == folder / "photos"
    assert find_pictures(store, folder).open("a/0.jpg").getvalue() == b"picture"


def test_the_bundled_one_is_asked_where_there_is_no_copy(store, tmp_path):
    with pytest.raises(ManifestError, match="--data-root"):
        image_folder(store, tmp_path)
    (tmp_path / "flickr8k" / "images" / "a").mkdir(parents=True)
    (tmp_path / "flickr8k" / "images" / "a" / "0.jpg").touch()
    (tmp_path / "flickr8k" / "dataset_flickr8k.json").touch()
    assert image_folder(store, tmp_path) == tmp_path / "flickr8k" / "images"
