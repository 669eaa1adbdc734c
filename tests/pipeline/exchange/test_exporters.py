"""Exports hold the store's values: read by plain NumPy and h5py, and imported again."""

import json
import resource
from pathlib import Path

import h5py
import numpy as np
import pytest
from parts import part_of, sound_store
from region_sources import ARRAYS, World
from small_extraction import files

from xret.pipeline.data.manifest import load_manifest
from xret.pipeline.errors import OutputError, XretError
from xret.pipeline.exchange.exporters.export import ExportedSplit, export
from xret.pipeline.exchange.importers.importing import ImportOptions, import_features
from xret.pipeline.store import FeatureCache
from xret.pipeline.store.sets import ImageSet
from xret.pipeline.store.storage.store import Store

HDF5 = {
    "local": "images/local",
    "boxes": "images/boxes",
    "classes": "images/classes",
    "scores": "images/scores",
    "id": "images/id",
    "length": "images/length",
    "size": "images/size",
}


def imported(world, url, **options):
    import_features(load_manifest(world.manifest), str(url), ImportOptions(**options))
    return str(url)


def equal_sets(first, second, names):
    """Compare two image sets value by value: the local features in front of each image's length, and `names`."""
    one, other = (FeatureCache.open(url).image_set() for url in (first, second))
    rows = np.arange(one.cache.images)
    assert np.array_equal(one.status, other.status)
    assert np.array_equal(one.length, other.length)
    for name in names:
        for row in rows[one.status == 0]:
            a, b = (
                s.local(rows[row : row + 1]) if name == "local" else s.array(name, rows[row : row + 1])
                for s in (one, other)
            )
            count = one.length[row] if name != "size" else None
            assert np.array_equal(a[0, :count], b[0, :count]), (name, row)


@pytest.mark.parametrize("captions", [5, 2])
def test_scans_arrays(tmp_path, captions):
    world = World(tmp_path / "w", captions=captions)
    store = imported(world, tmp_path / "s", format_="scan", source=world.scan(), dtype="float32")
    out = tmp_path / "out" / "precomp"
    summary = export(store, "npy", out)
    assert sorted(p.name for p in out.parent.iterdir()) == ["precomp"]
    assert sorted(p.name for p in out.iterdir()) == sorted(
        f"{split}_{kind}" for split in ("train", "dev", "test") for kind in ("caps.txt", "ids.txt", "ims.npy")
    )
    repeat = 1 if captions == 5 else captions  # five captions an image is what SCAN's readers assume
    for name, split in (("train", "train"), ("dev", "val"), ("test", "test")):
        images = world.of(split)
        ims = np.load(out / f"{name}_ims.npy")
        assert (ims.dtype, ims.flags.c_contiguous) == (np.float32, True)
        expected = np.stack([image["regions_of_test"]["local"] for image in images for _ in range(repeat)])
        assert np.array_equal(ims, expected)
        texts = [sentence["raw"] for image in images for sentence in image["sentences"]]
        assert (out / f"{name}_caps.txt").read_text().splitlines() == texts
        ids = [str(image["imgid"]) for image in images for _ in range(repeat)]
        assert (out / f"{name}_ids.txt").read_text().split("\n") == [*ids, ""]
        assert summary.splits[split] == ExportedSplit(len(images), len(texts), 0)
    assert summary.bytes == sum(p.stat().st_size for p in out.iterdir())
    back = imported(world, tmp_path / "back", format_="scan", source=out, dtype="float32")
    equal_sets(store, back, ["local"])


def test_hdf5_of_ragged_regions(tmp_path):
    world = World(tmp_path / "w", ragged=True)
    options = {"format_": "hdf5", "dtype": "float32"}
    store = imported(world, tmp_path / "s", source=world.hdf5(), arrays=ARRAYS, **options)
    export(store, "hdf5", tmp_path / "out.h5")
    with h5py.File(tmp_path / "out.h5") as file:
        assert file["images/local"].chunks == (1, 5, 16)
        for row, regions in enumerate(world.stored):
            count = file["images/length"][row]
            assert count == len(regions["local"])
            for name in ("local", "boxes", "classes", "scores"):
                assert np.array_equal(file[f"images/{name}"][row, :count], regions[name]), (name, row)
            assert np.allclose(file["images/global"][row], regions["local"].mean(0), atol=1e-6)
            assert file["images/size"][row].tolist() == list(regions["size"])
        assert json.loads(file.attrs["splits"]) == {"train": [0, 20], "val": [20, 26], "test": [26, 32]}
        features = FeatureCache.open(store).image_set()
        assert file["images"].attrs["fingerprint"] == features.fingerprint
        assert json.loads(file["images"].attrs["identity"]) == features.identity
        assert file.attrs["dataset"] == "world"
    back = imported(world, tmp_path / "back", source=tmp_path / "out.h5", arrays=HDF5, **options)
    equal_sets(store, back, ["local", "boxes", "classes", "scores", "size"])


def test_hdf5_of_captions(tmp_path):
    url = sound_store(tmp_path / "s", train=12, val=9, test=3)
    summary = export(url, "hdf5", tmp_path / "out.h5", splits=("val", "test"))
    cache = FeatureCache.open(url)
    images, captions = cache.image_set(), cache.caption_set()
    assert summary.sets == (images.name, captions.name)
    assert summary.splits["val"].images == 9
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
        assert len(of_captions["text"]) == cache.captions - begin
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
    url = sound_store(tmp_path / "s", text="words", train=12, val=3, test=3)
    export(url, "hdf5", tmp_path / "out.h5", sets=["words"])
    words = FeatureCache.open(url).caption_set()
    with h5py.File(tmp_path / "out.h5") as file:
        assert tuple(file["captions/vocabulary"].asstr()[...]) == words.vocabulary
        assert "local" not in file["captions"]
        assert "local" not in file["images"]
        assert len(file["captions/token"]) == words.length.sum()


def test_images_that_failed_are_left_out_with_their_captions(tmp_path):
    url = sound_store(tmp_path / "s", failed={0: "x", 5: "x", 13: "x"}, train=12, val=3, test=3)
    cache = FeatureCache.open(url)
    summary = export(url, "npy", tmp_path / "npy")
    assert [counts.left_out for counts in summary.splits.values()] == [2, 1, 0]
    rows = [row for row in range(12) if row not in (0, 5)]
    texts = [
        text for row in rows for text in cache.caption_texts(cache.caption_start[row], cache.caption_start[row + 1])
    ]
    repeated = np.repeat(rows, cache.caption_count[rows])  # two or three captions an image
    assert (tmp_path / "npy" / "train_caps.txt").read_text().splitlines() == texts
    assert (tmp_path / "npy" / "train_ids.txt").read_text().split() == [str(row) for row in repeated]
    ims = np.load(tmp_path / "npy" / "train_ims.npy")
    assert np.array_equal(ims, cache.image_set().local(repeated).astype(np.float32))
    export(url, "hdf5", tmp_path / "out.h5")
    with h5py.File(tmp_path / "out.h5") as file:
        assert json.loads(file.attrs["splits"]) == {"train": [0, 10], "val": [10, 12], "test": [12, 15]}
        assert file["captions/text"].asstr()[: len(texts)].tolist() == texts
        assert file["captions/image"][: len(texts)].tolist() == [rows.index(row) for row in repeated]
        assert file["captions/length"].shape == file["captions/text"].shape
        assert len(file["captions/token"]) == file["captions/length"][...].sum()


def test_a_caption_stays_on_its_line(tmp_path):
    url = sound_store(tmp_path / "s", words="one\r\ntwo\u2028three", train=3, val=0, test=0)
    export(url, "npy", tmp_path / "npy", splits=("train",))
    lines = (tmp_path / "npy" / "train_caps.txt").read_text().splitlines()
    assert len(lines) == FeatureCache.open(url).captions
    assert all(line.startswith("one two three a ") or line.startswith("one two three ") for line in lines)


def test_only_some_images_are_in_memory_at_once(tmp_path, monkeypatch):
    url = sound_store(tmp_path / "s", train=150, val=0, test=0)
    read, most = ImageSet.local, []

    def spying(images, rows):
        most.append(len(rows))
        return read(images, rows)

    monkeypatch.setattr(ImageSet, "local", spying)
    for to in ("npy", "hdf5"):
        export(url, to, tmp_path / to)
    assert max(most) == 64
    assert sum(most) >= 2 * 150


def test_an_object_store(tmp_path):
    from xret.pipeline.store.upkeep.merge import merge

    url, local = "memory://export.zarr", sound_store(tmp_path / "s", train=12, val=3, test=3)
    try:
        merge(url, [local])
        export(url, "npy", tmp_path / "there")
        export(local, "npy", tmp_path / "here")
        assert files(tmp_path / "there") == files(tmp_path / "here")
    finally:
        Store(url).remove("")


# Refusals: nothing is left behind


def refused(url, to, out, *args, **options):
    before = sorted(Path(out).parent.iterdir())
    with pytest.raises(XretError) as error:
        export(str(url), to, Path(out), *args, **options)
    assert sorted(Path(out).parent.iterdir()) == before
    return str(error.value)


def test_what_exists_is_not_touched(tmp_path):
    url = sound_store(tmp_path / "s", train=8, val=0, test=0)
    (tmp_path / "out").write_text("mine")
    assert "out exists already; name another --out" in refused(url, "hdf5", tmp_path / "out")
    assert (tmp_path / "out").read_text() == "mine"


def test_incomplete_and_unknown_splits(tmp_path):
    url = part_of(tmp_path / "s", "val", train=12, val=3, test=3)
    assert "lacks 2 of 2 shards; run" in refused(url, "npy", tmp_path / "o")
    assert "has no split dev; it has train, val, test" in refused(url, "npy", tmp_path / "o", splits=("val", "dev"))
    export(url, "npy", tmp_path / "o", splits=("val",))


def test_ragged_regions_and_other_splits_have_no_place_in_scans_layout(tmp_path):
    world = World(tmp_path / "w", ragged=True)
    store = imported(world, tmp_path / "s", format_="hdf5", source=world.hdf5(), arrays=ARRAYS)
    sentence = refused(store, "npy", tmp_path / "o")
    assert "has 1 to 5 local features an image" in sentence
    assert "use --to hdf5" in sentence
    other = World(tmp_path / "v", train=8, val=0, test=8)
    text = json.loads((tmp_path / "v" / "captions.json").read_text())
    for image in text["images"]:
        image["split"] = {"test": "other"}.get(image["split"], image["split"])
    (tmp_path / "v" / "captions.json").write_text(json.dumps(text))
    splits = ("train", "other")
    words = {"format_": "hdf5", "source": other.hdf5(), "arrays": ARRAYS, "splits": splits}
    store = imported(other, tmp_path / "t", **words)
    assert "no name for split 'other'" in refused(store, "npy", tmp_path / "o", splits=splits)
    export(store, "hdf5", tmp_path / "o", splits=splits)


def test_the_sets_are_chosen(tmp_path):
    sound_store(tmp_path / "s", weights="a", train=8, val=0, test=0)
    url = sound_store(tmp_path / "s", weights="b", train=8, val=0, test=0)
    first, second = FeatureCache.open(url).set_names("images")
    for to in ("npy", "hdf5"):
        sentence = refused(url, to, tmp_path / "o")
        assert f"choose with --set: images/{first}, images/{second}" in sentence
    assert "only one set of images" in refused(url, "hdf5", tmp_path / "o", [first, second])
    assert "several feature sets fit 'grid'" in refused(url, "hdf5", tmp_path / "o", ["grid"])
    assert "use --to hdf5" in refused(url, "npy", tmp_path / "o", [first, "states"])
    assert export(url, "hdf5", tmp_path / "o", [second, "states"]).sets[0] == second
    assert export(url, "npy", tmp_path / "npy", [first]).sets == (first,)


def test_no_set_and_no_image(tmp_path):
    url = sound_store(tmp_path / "s", failed=dict.fromkeys(range(3), "x"), train=3, val=2, test=0)
    assert "every image of split 'train' failed" in refused(url, "hdf5", tmp_path / "o")
    cache = FeatureCache.open(url)
    cache.store.remove(cache.image_set().path)
    assert "use --to hdf5" in refused(url, "npy", tmp_path / "o")
    cache.store.remove(cache.caption_set().path)
    assert "there is no feature set to export" in refused(url, "hdf5", tmp_path / "o")


def test_a_damaged_store(tmp_path):
    url = sound_store(tmp_path / "s", train=12, val=0, test=0)
    path = Path(url) / FeatureCache.open(url).image_set().path / "local/c/1/0/0"
    data = path.read_bytes()
    path.write_bytes(data[:9] + bytes([data[9] ^ 16]) + data[10:])
    for to in ("npy", "hdf5"):
        assert "local/c/1/0/0 is damaged" in refused(url, to, tmp_path / "o")


@pytest.mark.parametrize("to", ["npy", "hdf5"])
def test_a_full_disk_leaves_nothing(tmp_path, to):
    url = sound_store(tmp_path / "s", train=150, val=0, test=0)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (12000, limits[1]))
        with pytest.raises(OutputError, match=r"/o cannot be written: .*File too large.*; make room, or take"):
            export(url, to, tmp_path / "o")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.glob("o*"))
