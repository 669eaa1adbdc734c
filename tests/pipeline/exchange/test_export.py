"""Exports hold the store's values: read by plain h5py, and imported again."""

import json
from pathlib import Path

import fsspec
import h5py
import numpy as np
import pytest
from embedding_sources import Pairs
from imported import bring
from small_disk import small_disk
from small_store import make_store

from xret.pipeline.errors import OutputError, XretError
from xret.pipeline.exchange.export import export
from xret.pipeline.exchange.importing import ImportOptions, import_features
from xret.pipeline.store import FeatureCache
from xret.pipeline.store.sets import ImageSet

BACK = {name: f"images/{name}" for name in ("local", "boxes", "classes", "scores", "id", "length", "size")}


def test_ragged_regions_go_out_and_come_back(tmp_path, ragged):
    _, cache = bring(ragged, ragged.hdf5(), "hdf5", dtype="float32")
    export(cache.url, tmp_path / "out.h5")
    features = cache.image_set()
    with h5py.File(tmp_path / "out.h5") as file:
        assert file["images/local"].chunks == (1, 5, 16)
        for row, regions in enumerate(ragged.stored):
            count = file["images/length"][row]
            assert count == len(regions["local"])
            for name in ("local", "boxes", "classes", "scores"):
                assert np.array_equal(file[f"images/{name}"][row, :count], regions[name]), (name, row)
            assert np.allclose(file["images/global"][row], regions["local"].mean(0), atol=1e-6)
            assert file["images/size"][row].tolist() == list(regions["size"])
        assert json.loads(file.attrs["splits"]) == {"train": [0, 20], "val": [20, 26], "test": [26, 32]}
        assert file["images"].attrs["fingerprint"] == features.fingerprint
        assert json.loads(file["images"].attrs["identity"]) == features.identity
        assert file.attrs["dataset"] == "world"
    _, back = bring(ragged, tmp_path / "out.h5", "hdf5", tmp_path / "back", arrays=BACK, dtype="float32")
    rows = np.arange(cache.images)
    for name in ("local", "boxes", "classes", "scores", "size", "length"):
        assert np.array_equal(features.array(name, rows), back.image_set().array(name, rows))


def test_captions(tmp_path):
    url = make_store(tmp_path / "s", text="tokens", space="one", train=12, val=9, test=3)
    summary = export(url, tmp_path / "out.h5", splits=("val", "test"))
    cache = FeatureCache.open(url)
    images, captions = cache.image_set(), cache.caption_set()
    assert summary["sets"] == (images.name, captions.name)
    assert summary["splits"]["val"]["images"] == 9
    with h5py.File(tmp_path / "out.h5") as file:
        assert json.loads(file.attrs["splits"]) == {"val": [0, 9], "test": [9, 12]}
        of_images, of_captions = file["images"], file["captions"]
        rows = np.arange(12, 24)
        assert of_images["id"].asstr()[...].tolist() == [str(row) for row in rows]
        assert of_images["split"].asstr()[...].tolist() == ["val"] * 9 + ["test"] * 3
        assert of_images["local"].dtype == np.float16
        assert np.array_equal(of_images["local"], images.local(rows))
        assert np.array_equal(of_images["global"], images.global_(rows))
        begin = captions.rows_of("val").start
        assert of_captions["text"].asstr()[...].tolist() == cache.caption_texts(begin, cache.captions)
        for row in range(begin, cache.captions):
            here, image = row - begin, int(of_captions["image"][row - begin])
            start, length = int(of_captions["start"][here]), int(of_captions["length"][here])
            assert np.array_equal(of_captions["local"][start : start + length], captions.local(np.array([row])))
            assert np.array_equal(of_captions["token"][start : start + length], captions.token(np.array([row])))
            assert np.array_equal(of_captions["global"][here], captions.global_(np.array([row]))[0])
            assert image + 12 == cache.caption_image[row]
            first = of_images["caption_start"][image]
            assert first <= here < first + of_images["caption_count"][image]
        assert of_captions["sentid"][...].tolist() == cache.sentids(begin, cache.captions).tolist()


def test_words_come_with_their_vocabulary(tmp_path):
    url = make_store(tmp_path / "s", train=12, val=3, test=3)
    export(url, tmp_path / "out.h5", sets=["words"])
    words = FeatureCache.open(url).caption_set()
    with h5py.File(tmp_path / "out.h5") as file:
        assert tuple(file["captions/vocabulary"].asstr()[...]) == words.vocabulary
        assert "local" not in file["captions"]
        assert "local" not in file["images"]
        assert len(file["captions/token"]) == words.length.sum()


def test_images_that_failed_are_left_out_with_their_captions(tmp_path):
    url = make_store(tmp_path / "s", broken=(0, 5, 13), train=12, val=3, test=3)
    cache = FeatureCache.open(url)
    summary = export(url, tmp_path / "out.h5")
    assert [counts["left_out"] for counts in summary["splits"].values()] == [2, 1, 0]
    rows = [row for row in range(12) if row not in (0, 5)]
    starts = [*cache.caption_start, cache.captions]
    texts = [text for row in rows for text in cache.caption_texts(starts[row], starts[row + 1])]
    repeated = np.repeat(rows, cache.caption_count[rows])  # two or three captions an image
    with h5py.File(tmp_path / "out.h5") as file:
        assert json.loads(file.attrs["splits"]) == {"train": [0, 10], "val": [10, 12], "test": [12, 15]}
        assert file["captions/text"].asstr()[: len(texts)].tolist() == texts
        assert file["captions/image"][: len(texts)].tolist() == [rows.index(row) for row in repeated]
        assert file["captions/length"].shape == file["captions/text"].shape
        assert len(file["captions/token"]) == file["captions/length"][...].sum()


def test_only_some_images_are_in_memory_at_once(tmp_path, monkeypatch):
    url = make_store(tmp_path / "s", train=150, val=0, test=0)
    read, most = ImageSet.local, []
    monkeypatch.setattr(ImageSet, "local", lambda images, rows: most.append(len(rows)) or read(images, rows))
    export(url, tmp_path / "out.h5")
    assert (max(most), sum(most)) == (64, 150)


def test_an_object_store(tmp_path):
    local, url = make_store(tmp_path / "s", train=12, val=3, test=3), "memory://export.zarr"
    fs = fsspec.filesystem("memory")
    try:
        fs.put(local, "/export.zarr", recursive=True)
        export(url, tmp_path / "there")
        export(local, tmp_path / "here")
        assert (tmp_path / "there").read_bytes() == (tmp_path / "here").read_bytes()
    finally:
        fs.rm("/export.zarr", recursive=True)


def refused(url, out, *args, **options):
    before = sorted(Path(out).parent.iterdir())
    with pytest.raises(XretError) as error:
        export(str(url), Path(out), *args, **options)
    assert sorted(Path(out).parent.iterdir()) == before
    return str(error.value)


def test_sets_and_splits_that_cannot_be_chosen(tmp_path):
    url = make_store(tmp_path / "s", train=12, val=3, test=3, image=("grid", "roi"), splits=("val",))
    sets = FeatureCache.open(url).set_names("images")
    assert f"images/{sets[0]}, images/{sets[1]}; choose one with --set" in refused(url, tmp_path / "o")
    assert "only one set of images" in refused(url, tmp_path / "o", sets)
    assert "no feature set fits 'grit'" in refused(url, tmp_path / "o", ["grit"])
    assert "lacks 2 of 2 chunks; run `xret extract` or `xret import` again with --splits t" in refused(
        url, tmp_path / "o", ["grid"]
    )
    assert "has no split dev; it has train, val, test" in refused(url, tmp_path / "o", ["grid"], ("val", "dev"))
    assert export(url, tmp_path / "o", ["roi", "words"], ("val",))["sets"][0].startswith("roi@")


def test_no_set_and_no_image(tmp_path):
    url = make_store(tmp_path / "s", broken=range(3), train=3, val=2, test=0)
    assert "every image of split 'train' failed" in refused(url, tmp_path / "o")
    cache = FeatureCache.open(url, writable=True)
    for path in cache.set_paths():
        cache.remove_set(path)
    assert "there is no feature set to export" in refused(url, tmp_path / "o")


def test_a_damaged_store_and_a_full_disk_leave_nothing(tmp_path):
    url = make_store(tmp_path / "s", train=150, val=0, test=0)
    too_large = pytest.raises(OutputError, match=r"/o cannot be written: .*File too large.*; make room, or take")
    with small_disk(12000), too_large:
        export(url, tmp_path / "o")
    path = Path(url) / FeatureCache.open(url).image_set().path / "local/c.1.0.0"
    data = path.read_bytes()
    path.write_bytes(data[:9] + bytes([data[9] ^ 16]) + data[10:])
    assert "local/c.1.0.0 is damaged" in refused(url, tmp_path / "o")
    assert not list(tmp_path.glob("*o*"))


def test_a_caption_that_hdf5_cannot_hold(tmp_path):
    pairs = Pairs(30)
    pairs.texts[4] = "before\0after"
    source = pairs.folder(tmp_path / "e", index="jsonl", splits=["train", "val", "test"] * 10)  # 4 is of val
    import_features(None, str(tmp_path / "s"), ImportOptions("embeddings", source, encoder=("m",)))
    export(str(tmp_path / "s"), tmp_path / "test.h5", splits=("test",))
    with pytest.raises(XretError, match=r"cannot be exported .*NUL"):
        export(str(tmp_path / "s"), tmp_path / "all.h5")
    assert not (tmp_path / "all.h5").exists()
