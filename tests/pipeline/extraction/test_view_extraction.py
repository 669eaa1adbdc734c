"""Several views of each picture in one set: the same promises as of one view."""

import shutil
from dataclasses import replace

import h5py
import numpy as np
import pytest
import torch
from small_extraction import SMALL, files

from xret.pipeline.data.manifest import load_manifest
from xret.pipeline.encoders import load_visual
from xret.pipeline.errors import SampleError
from xret.pipeline.exchange.exporters.export import export
from xret.pipeline.extraction.extraction import extract
from xret.pipeline.extraction.plan import plan
from xret.pipeline.reading.batches import stored_batches
from xret.pipeline.store import FeatureCache
from xret.pipeline.store.layout import Blocks
from xret.pipeline.store.upkeep.contents import describe
from xret.pipeline.store.upkeep.merge import merge
from xret.pipeline.store.upkeep.verify import verify

VIEWS = replace(SMALL, views=3, augment="crop-flip")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("views")


@pytest.fixture(scope="module")
def manifest(folder):
    from small_runs import make_pictures

    return load_manifest(make_pictures(folder / "pictures"))


@pytest.fixture(scope="module")
def store(manifest, folder):
    extract(manifest, str(folder / "s.zarr"), VIEWS)
    return folder / "s.zarr"


@pytest.fixture(scope="module")
def plain(manifest, folder):
    extract(manifest, str(folder / "plain.zarr"), SMALL)
    return folder / "plain.zarr"


def images_of(store):
    return FeatureCache.open(str(store)).image_set()


def test_features_are_the_encoders_own(store, manifest):
    features = images_of(store)
    encoder = load_visual("resnet18", "random:0", 64, "cpu", views=3, augment="crop-flip")
    rows = np.array([0, 7, 8, 11, 12, 21])  # first and last of shards and splits
    cache = features.cache
    names, ids = cache.file_names(0, cache.images), cache.ids(0, cache.images)
    pixels = torch.stack([encoder.decode_views(manifest.images / names[row], ids[row])[0] for row in rows])
    local, global_ = encoder.encode(pixels)
    for view in range(3):
        assert np.allclose(features.local(rows, view), local[:, view], atol=2e-3, rtol=2e-3)
        assert np.allclose(features.global_(rows, view), global_[:, view], atol=2e-3, rtol=2e-3)
    assert (features.views, features.rows, features.attributes["identity"]["views"]["number"]) == (3, 4, 3)
    assert (features.length == 4).all()
    # Any reader of Zarr finds the views along the second axis.
    stored = cache.store.read_array(f"{features.path}/local")
    assert np.array_equal(stored[features.blocks.array_rows(rows), 2], features.local(rows, 2))


def test_the_first_view_has_the_bytes_of_a_set_without_views(store, plain):
    ours, theirs = images_of(store), images_of(plain)
    rows = np.random.default_rng(0).permutation(22)
    assert ours.local(rows).tobytes() == theirs.local(rows).tobytes()
    assert ours.global_(rows).tobytes() == theirs.global_(rows).tobytes()
    for name, data in files(store).items():
        rest = name.removeprefix(f"{ours.path}/")
        if rest.startswith(("local/c", "global/c")) and rest.split("/")[3] == "0":
            where = rest.split("/")
            there = plain / "images" / theirs.name / "/".join(where[:3] + where[4:])
            assert there.read_bytes() == data, name


def test_views_make_another_set_and_no_views_the_set_that_was(store, plain, manifest, folder):
    names = {images_of(store).fingerprint, images_of(plain).fingerprint}
    for other in ({"views": 2}, {"augment": "dihedral"}):
        url = str(folder / f"{len(names)}.zarr")
        extract(manifest, url, replace(VIEWS, **other, text=None, splits=("val",)))
        names.add(images_of(url).fingerprint)
    assert len(names) == 4
    assert "views" not in images_of(plain).attributes
    assert "views" not in images_of(plain).identity
    assert not {"views", "augment"} & set(images_of(plain).attributes["asked"])
    beside = shutil.copytree(plain, folder / "beside.zarr")
    extract(manifest, str(beside), VIEWS)
    assert len(FeatureCache.open(str(beside)).set_names("images")) == 2
    assert {name: data for name, data in files(beside).items() if name in files(plain)} == files(plain)


@pytest.mark.parametrize("workers", [1, 4])
def test_any_number_of_workers_writes_the_same_bytes(store, manifest, tmp_path, workers):
    extract(manifest, str(tmp_path / "s.zarr"), replace(VIEWS, workers=workers))
    assert files(tmp_path / "s.zarr") == files(store)


def test_a_stopped_one_goes_on_to_the_same_bytes(store, manifest, tmp_path):
    url, path = str(tmp_path / "s.zarr"), manifest.images / "11.png"
    kept = path.read_bytes()
    path.write_bytes(b"")
    with pytest.raises(SampleError, match="11"):
        extract(manifest, url, replace(VIEWS, workers=1))
    path.write_bytes(kept)
    assert 0 < images_of(url).done().sum() < 4
    # A kill while a shard is written leaves some of its files, and one that is not whole.
    (shard,) = np.flatnonzero(~images_of(url).done())[:1]
    half = tmp_path / "s.zarr" / images_of(url).path / "local" / "c" / str(shard) / "1" / "0" / "0"
    half.parent.mkdir(parents=True, exist_ok=True)
    half.write_bytes(b"half")
    extract(manifest, url, VIEWS)
    assert files(url) == files(store)
    summary = extract(manifest, url, VIEWS)
    assert summary.sets[0].shards == 0
    assert files(url) == files(store)


@pytest.mark.parametrize("fault", ["flipped", "lost"])
def test_damage_in_any_view_is_found_and_repaired(store, manifest, tmp_path, fault):
    copy = shutil.copytree(store, tmp_path / "s.zarr")
    features = images_of(copy)
    file = copy / features.path / "local" / "c" / "1" / "2" / "0" / "0"
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    if fault == "lost":
        file.unlink()
    else:
        file.write_bytes(data)
    (found,) = verify(str(copy)).damaged
    assert (found.array, found.shard, found.samples) == (f"{features.path}/local", 1, (8, 12))
    assert extract(manifest, str(copy), replace(VIEWS, repair=True)).sets[0].shards == 1
    assert files(copy) == files(store)
    assert verify(str(copy)).ok


def test_a_number_that_is_none_in_any_view_is_found(store, tmp_path):
    copy = shutil.copytree(store, tmp_path / "s.zarr")
    features = images_of(copy)
    features.cache.store.open_array(f"{features.path}/local", writable=True)[9, 1, 0, 5] = np.nan
    features.cache.store.open_array(f"{features.path}/global", writable=True)[2, 2, 5] = np.nan
    found = verify(str(copy)).damaged
    assert [(damage.array.rpartition("/")[2], damage.shard) for damage in found] == [("global", 0), ("local", 1)]


def test_a_broken_picture_fails_in_all_views(manifest, tmp_path):
    shutil.copytree(manifest.images.parent, tmp_path / "p")
    (tmp_path / "p" / "images" / "3.png").write_bytes(b"")
    url = str(tmp_path / "s.zarr")
    extract(load_manifest(tmp_path / "p" / "pictures.yaml"), url, replace(VIEWS, on_error="skip"))
    features = images_of(url)
    assert features.status[3] == 1
    assert all(np.isnan(features.local(np.array([3]), view)).all() for view in range(3))
    assert verify(url).ok
    captions = features.cache.caption_set()
    batches = stored_batches(
        features, captions, "train", image_fields={"global"}, caption_fields={"token"}, views=range(3)
    )
    assert batches.images == 11
    for epoch in range(3):
        for batch in batches.epoch(unit="image", batch_size=4, seed=0, epoch=epoch):
            assert batch.images.global_.isfinite().all()


def test_parts_become_the_store_extracted_at_once(store, manifest, tmp_path):
    a, b, whole = (str(tmp_path / name) for name in ("a", "b", "whole"))
    extract(manifest, a, replace(VIEWS, splits=("train",)))
    extract(manifest, b, replace(VIEWS, splits=("val", "test")))
    merge(whole, [a, b])
    assert files(whole) == files(store)
    merge(a, [str(store)])
    assert files(a) == files(store)


def test_an_export_has_the_first_view(store, plain, tmp_path):
    for name, url in (("ours", store), ("theirs", plain)):
        export(str(url), "npy", tmp_path / name)
        export(str(url), "hdf5", tmp_path / f"{name}.h5")
    for file in sorted((tmp_path / "ours").iterdir()):
        assert file.read_bytes() == (tmp_path / "theirs" / file.name).read_bytes()
    with h5py.File(tmp_path / "ours.h5") as ours, h5py.File(tmp_path / "theirs.h5") as theirs:
        for array in ("local", "global", "length"):
            assert np.array_equal(ours["images"][array], theirs["images"][array])


def test_the_store_says_how_many_there_are(store, plain):
    ours, theirs = (describe(str(url)).sets[0] for url in (store, plain))
    assert (ours.views, ours.shape, theirs.views) == (3, (4, 512), 1)
    assert ours.padding == theirs.padding
    assert ours.bytes > 2.5 * theirs.bytes


def test_a_plan_counts_the_views(manifest, store, plain, tmp_path):
    (found,) = (one for one in plan(manifest, str(tmp_path / "no"), VIEWS).sets if one.modality == "images")
    (single,) = (one for one in plan(manifest, str(tmp_path / "no"), SMALL).sets if one.modality == "images")
    assert (found.name, found.tasks, found.files) == (images_of(store).name, 4, 48)
    assert single.files == 32
    feature = 2 * (4 * 512 + 512)
    assert (found.bytes, single.bytes) == (32 * (3 * feature + 29), 32 * (feature + 29))
    written = [name for name in files(store) if name.startswith("images/resnet18") and "/c/" in name]
    assert len(written) == found.files


def test_a_shard_of_many_views_takes_no_more_memory():
    splits = {"train": (0, 100_000)}
    assert [Blocks.choose(splits, views=views).length for views in (1, 2, 4, 8, 100)] == [512, 256, 128, 64, 8]
    assert Blocks.choose(splits, 300, 4).length == 300
