"""Extraction from every form of one data set: the bytes of the folder's store, resumed and refused likewise."""

import os
import random
import shutil
import tarfile
from dataclasses import replace

import numpy as np
import pytest
import small_encoder
from distributed import LocalCluster
from packed_data import SPLITS, PackedData, add, write_tar
from small_extraction import SMALL, files, without_commands

from xret.pipeline.data import samples as samples_module
from xret.pipeline.data.images import open_image
from xret.pipeline.data.manifest import load_manifest
from xret.pipeline.errors import CacheError, ManifestError, SampleError
from xret.pipeline.extraction.extraction import extract
from xret.pipeline.extraction.plan import plan
from xret.pipeline.reading.reattachment import find_pictures
from xret.pipeline.store import FeatureCache
from xret.pipeline.store.upkeep.merge import merge
from xret.pipeline.store.upkeep.verify import verify

FORMS = ("tars", "webdataset", "parquet", "saved", "saved_splits")
OWN = {"samples/zarr.json"}  # says where the pictures lie


@pytest.fixture
def small(monkeypatch):
    small_encoder.use(monkeypatch)


@pytest.fixture
def data(tmp_path):
    return PackedData(tmp_path / "data")


def store_of(path, url, **changes):
    extract(load_manifest(path), str(url), replace(SMALL, **changes))
    return files(url)


def arrays(found):
    kept = without_commands(found)
    return {name: kept[name] for name in kept if not name.startswith("samples/place") and name not in OWN}


@pytest.mark.parametrize("form", FORMS)
def test_every_array_is_that_of_the_folder(data, tmp_path, form):
    if form == "saved_splits":
        data.rows.sort(key=lambda row: SPLITS.index(row[3]))
    expected = store_of(data.as_folder(), tmp_path / "folder.zarr")
    found = store_of(getattr(data, f"as_{form}")(), tmp_path / "packed.zarr")
    assert arrays(found) == arrays(expected)
    assert len(found) > len(arrays(found))
    assert verify(str(tmp_path / "packed.zarr")).ok


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore:.*:DeprecationWarning:distributed")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("form", ["tars", "parquet"])
def test_a_cluster_writes_the_same_bytes(small, data, tmp_path, form):
    path = getattr(data, f"as_{form}")()
    expected = store_of(path, tmp_path / "here.zarr")
    with LocalCluster(n_workers=1, threads_per_worker=2, processes=False, dashboard_address=":0") as cluster:
        found = store_of(path, tmp_path / "there.zarr", scheduler=cluster.scheduler_address)
    assert found == expected


def test_what_was_looked_through_once_is_not_again(small, data, tmp_path, monkeypatch):
    path, url = data.as_tars(), tmp_path / "s.zarr"
    before = store_of(path, url)
    monkeypatch.setattr(samples_module, "read_contents", None)  # nobody may look
    assert store_of(path, url) == before
    assert plan(load_manifest(path), str(url), SMALL).images == 30
    more = store_of(path, url, visual=None, text="words", dtype="float32")
    assert before.items() <= more.items()


def test_changed_files_are_refused(small, data, tmp_path):
    path, url = data.as_tars(), tmp_path / "s.zarr"
    before = store_of(path, url)
    file = data.folder / "shard-01.tar"
    stamp = file.stat().st_mtime_ns
    os.utime(file, ns=(stamp, stamp + 10**9))
    with pytest.raises(ManifestError, match=r"shard-01\.tar: it has changed since it was looked through"):
        store_of(path, url)
    assert files(url) == before
    os.utime(file, ns=(stamp, stamp))
    assert store_of(path, url) == before
    data.manifest("tar", tar="shard-{00..01}.tar")
    with pytest.raises(CacheError, match="holds other samples"):
        store_of(path, url)
    path = data.manifest("tar", tar="shard-*.tar")
    before = store_of(path, tmp_path / "t.zarr")
    write_tar(data.folder / "shard-99.tar", data.rows[:0])
    with pytest.raises(ManifestError, match=r"shard-99\.tar is new since .*t\.zarr was begun"):
        store_of(path, tmp_path / "t.zarr")


@pytest.mark.parametrize("form", ["tars", "parquet", "saved"])
def test_bytes_that_are_no_picture(small, data, tmp_path, form):
    name, _, captions, split = data.rows[4]
    data.rows[4] = (name, b"no picture", captions, split)
    path, url = getattr(data, f"as_{form}")(), tmp_path / "s.zarr"
    where = {
        "tars": r"shard-\d+\.tar: 000004\.png",
        "parquet": r"part-\d\.parquet: row \d",
        "saved": r"\.arrow: 000004",
    }
    with pytest.raises(SampleError, match=where[form] + r".*: this is no .* file; .*--on-error skip"):
        store_of(path, url)
    store_of(path, url, on_error="skip")
    features = FeatureCache.open(str(url)).image_set()
    assert list(features.failed) == [name]
    assert features.failed[name].startswith(f"{name}: this is no JPEG")
    assert int((features.status == 1).sum()) == 1


def test_pictures_without_captions_are_recorded(small, data, tmp_path, capsys):
    with tarfile.open(data.folder / "a.tar", "w") as archive:
        for name, content, *_ in data.rows[:9]:
            add(archive, name, content)
            if name != "000003.png":
                add(archive, f"{name[:-4]}.txt", b"a dog")
    path, url = data.manifest("t", tar={"train": "a.tar"}), tmp_path / "s.zarr"
    with pytest.raises(ManifestError, match=r"a\.tar: 000003\.png: it has no captions"):
        store_of(path, url)
    assert not url.exists()
    whole = store_of(path, url, on_error="skip")
    cache = FeatureCache.open(str(url))
    assert cache.images == 8
    assert [reason.split(": ")[1] for reason in cache.left_out] == ["000003.png"]
    assert store_of(path, url) == whole  # what was decided when it was begun stays so


def test_nothing_is_left_of_a_source_at_fault(small, data, tmp_path):
    path, url = data.as_tars(), tmp_path / "s.zarr"
    file = data.folder / "shard-02.tar"
    file.write_bytes(file.read_bytes()[:3000])
    with pytest.raises(ManifestError):
        store_of(path, url)
    assert not url.exists()


@pytest.mark.parametrize("form", ["tars", "parquet", "saved"])
def test_pictures_are_found_again_where_they_lie(small, data, tmp_path, form):
    url = tmp_path / "s.zarr"
    store_of(getattr(data, f"as_{form}")(), url)
    cache = FeatureCache.open(str(url))
    with pytest.raises(CacheError, match=r"lies in a folder that was not given; .*--data-root"):
        find_pictures(cache, None)
    with pytest.raises(CacheError, match="is not in "):
        find_pictures(cache, tmp_path)
    moved = shutil.copytree(data.folder, tmp_path / "moved")  # with its times
    pictures = find_pictures(cache, moved)
    rows = list(data.rows)
    random.Random(0).shuffle(rows)
    for name, content, *_ in rows:
        assert pictures.open(name).getvalue() == content
    assert open_image(pictures.open(rows[0][0])).size == (24, 20)
    pictures.close()


def test_merged_stores_know_where_pictures_lie(small, data, tmp_path):
    path = data.as_parquet()
    whole = store_of(path, tmp_path / "whole.zarr")
    for split in SPLITS:
        store_of(path, tmp_path / f"{split}.zarr", splits=(split,))
    merge(str(tmp_path / "all.zarr"), [str(tmp_path / f"{split}.zarr") for split in SPLITS])
    assert arrays(files(tmp_path / "all.zarr")).keys() == arrays(whole).keys()
    pictures = find_pictures(FeatureCache.open(str(tmp_path / "all.zarr")), data.folder)
    assert all(pictures.open(name).getvalue() == content for name, content, *_ in data.rows)
    pictures.close()


def test_repair_reads_the_samples_anew(small, data, tmp_path):
    path, url = data.as_tars(), tmp_path / "s.zarr"
    before = store_of(path, url)
    place = next(url.glob("samples/place/c/*/0"))
    place.write_bytes(np.flip(np.frombuffer(place.read_bytes(), np.uint8)).tobytes())
    assert not verify(str(url)).ok
    assert store_of(path, url, repair=True) == before
