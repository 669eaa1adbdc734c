"""Features that others extracted: every value arrives, every fault is a sentence, stopping loses nothing."""

import hashlib
import json
import os
import pickle
import shutil
import tracemalloc
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from region_sources import ARRAYS, CHANNELS, World
from small_extraction import files

from xret.pipeline.cache.feature_cache import FeatureCache
from xret.pipeline.cache.storage.store import Store
from xret.pipeline.cache.upkeep.contents import describe
from xret.pipeline.cache.upkeep.verify import verify
from xret.pipeline.data.manifest import load_manifest
from xret.pipeline.data.samples import Caption, ImageSample, Samples
from xret.pipeline.errors import CacheError, SampleError
from xret.pipeline.exchange.importers import matching
from xret.pipeline.exchange.importers.importing import ImportOptions, import_features
from xret.pipeline.exchange.importers.source import SourceError


def bring(world, source, format_, url=None, **options):
    """Import and return summary and cache."""
    url = str(url or world.folder / "s.zarr")
    summary = import_features(load_manifest(world.manifest), url, ImportOptions(format_, source, **options))
    return summary, FeatureCache.open(url)


def assert_holds(cache, expected, extras=(), size=True, dtype=np.float16):
    """Compare a set with the regions of all images, value by value, and what follows them."""
    images = cache.image_set()
    rows = np.arange(cache.images)
    local, global_ = images.local(rows), images.global_(rows)
    longest = max(len(regions["local"]) for regions in expected)
    assert local.shape == (len(expected), longest, CHANNELS)
    assert local.dtype == dtype
    for row, regions in enumerate(expected):
        count = len(regions["local"])
        assert images.length[row] == count
        assert np.array_equal(local[row, :count], regions["local"].astype(dtype))
        assert (local[row, count:] == 0).all()
        mean = sum(regions["local"].astype(np.float64)) / count
        assert np.allclose(global_[row], mean, rtol=2e-3, atol=1e-6)
        for name in extras:
            values = images.array(name, np.array([row]))[0]
            assert np.array_equal(values[:count], regions[name])
            assert (values[count:] == (-1 if name == "classes" else 0)).all()
        assert tuple(images.array("size", np.array([row]))[0]) == (regions["size"] if size else (0, 0))
    assert (images.status == 0).all()
    assert images.kind == "roi"
    assert set(images.array_names()) == {"local", "global", "length", "size", "status", *extras}
    report = verify(cache.url)
    assert report.ok, report


# Each format, value by value


@pytest.mark.parametrize("rows", ["image", "caption"])
@pytest.mark.parametrize("ids", ["image", "caption"])
def test_scan_in_every_row_rule(tmp_path, rows, ids):
    world = World(tmp_path / "w")
    summary, cache = bring(world, world.scan(rows=rows, ids=ids), "scan")
    assert_holds(cache, world.stored, size=False)
    assert summary.matched_by == "id"
    assert (summary.sets[0].samples, summary.sets[0].failed, summary.unmatched) == (32, 0, 0)


def test_scan_of_one_caption_an_image_and_of_one_vector_an_image(tmp_path):
    world = World(tmp_path / "w", captions=1)
    source = world.scan()
    _, cache = bring(world, source, "scan")
    assert_holds(cache, world.stored, size=False)
    for path in source.glob("*_ims.npy"):
        np.save(path, np.load(path)[:, 0])
    _, cache = bring(world, source, "scan", tmp_path / "vectors.zarr")
    assert_holds(cache, [{**regions, "local": regions["local"][:1]} for regions in world.stored], size=False)


def test_testall_counts_before_test(tmp_path):
    world = World(tmp_path / "w")
    source = world.scan()
    np.save(source / "test_ims.npy", np.load(source / "test_ims.npy") + 1)
    assert_holds(bring(world, source, "scan")[1], world.stored, size=False)


@pytest.mark.parametrize("root", ["data", "data/world"])
def test_the_tree_of_vse_infinity_names_files_by_its_mapping(tmp_path, root):
    world = World(tmp_path / "w")
    world.scan("data/world/precomp", key="cocoid", rows="caption")
    # Numbers that are ids of other images by themselves: only the mapping tells.
    turned = {str(image["cocoid"]): world.images[-1 - k] for k, image in enumerate(world.images)}
    names = {key: f"val2014/{image['filename']}" for key, image in turned.items()}
    (world.folder / "data/world/id_mapping.json").write_text(json.dumps(names))
    # The turned images are in other splits, so that the check of splits would refuse; make it one split.
    document = json.loads((world.folder / "captions.json").read_text())
    splits = {key: {str(i["cocoid"]): i["split"] for i in world.images}[key] for key in turned}
    by_name = {image["filename"]: splits[key] for key, image in turned.items()}
    for image in document["images"]:
        image["split"] = by_name[image["filename"]]
    (world.folder / "captions.json").write_text(json.dumps(document))
    summary, cache = bring(world, world.folder / root, "vse-infty")
    assert summary.matched_by == "file name"
    key_of = {name: key for key, name in names.items()}
    regions = {str(image["cocoid"]): image["regions_of_test"] for image in world.images}
    expected = [regions[key_of[name]] for name in cache.file_names(0, cache.images)]
    assert_holds(cache, expected, size=False)
    assert "id_mapping.json" in cache.image_set().identity["files"]


def test_butd_tsv_unordered_repeated_ragged_and_in_several_files(tmp_path):
    world = World(tmp_path / "w", ragged=True)
    shuffled = [world.images[k] for k in np.random.default_rng(1).permutation(len(world.images))]
    changed = {**shuffled[0], "regions_of_test": {**shuffled[0]["regions_of_test"], "size": (1, 1)}}
    world.tsv("tsv/part.tsv.0", images=shuffled[:9])
    world.tsv("tsv/part.tsv.1", images=[*shuffled[9:], changed])  # the first row of an image counts
    summary, cache = bring(world, world.folder / "tsv", "butd-tsv")
    assert_holds(cache, world.stored, ["boxes"])
    assert summary.matched_by == "COCO id"
    lines = (world.folder / "tsv/part.tsv.0").read_bytes().replace(b"\n", b"\r\n\r\n")
    (world.folder / "tsv/part.tsv.0").write_bytes(lines)
    assert_holds(bring(world, world.folder / "tsv", "butd-tsv", tmp_path / "b")[1], world.stored, ["boxes"])


def test_lxmert_tsv_has_classes_scores_and_height_first(tmp_path):
    world = World(tmp_path / "w", ragged=True)
    for image in world.images:
        image["stem"] = image["filename"].removesuffix(".jpg")
    summary, cache = bring(world, world.tsv(lxmert=True, key="stem"), "lxmert-tsv", dtype="float32")
    assert_holds(cache, world.stored, ["boxes", "classes", "scores"], dtype=np.float32)
    assert summary.matched_by == "file name without folder and suffix"


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("exploded",)


def test_npz_files_without_ever_unpickling_their_info(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    world = World(tmp_path / "w", ragged=True)
    _, cache = bring(world, world.npz(info=Bomb()), "detectron-npz")
    assert_holds(cache, world.stored, ["boxes"])
    assert not Path("exploded").exists()
    pickle.loads(pickle.dumps(Bomb()))
    assert Path("exploded").exists()  # it is a live one


@pytest.mark.parametrize(("ids", "matched_by"), [("filename", "file name without folder and suffix"), ("imgid", "id")])
def test_hdf5_by_names_of_arrays(tmp_path, ids, matched_by):
    world = World(tmp_path / "w", ragged=True)
    summary, cache = bring(world, world.hdf5(ids), "hdf5", arrays=ARRAYS)
    assert_holds(cache, world.stored, ["boxes", "classes", "scores"])
    assert summary.matched_by == matched_by


def test_hdf5_with_nothing_but_features_and_ids(tmp_path):
    world = World(tmp_path / "w")
    _, cache = bring(world, world.hdf5(), "hdf5", arrays={key: ARRAYS[key] for key in ("local", "id")})
    assert_holds(cache, world.stored, size=False)


# What a set is, and that it is begun, stopped and ended like any other


def test_the_fingerprint_says_where_the_features_come_from(tmp_path):
    world = World(tmp_path / "w")
    source = world.tsv()
    _, cache = bring(world, source, "butd-tsv")
    first = cache.image_set()
    assert first.name.startswith("butd-tsv@")
    assert first.identity["encoder"] == "butd-tsv"
    assert first.identity["files"] == {"butd.tsv": hashlib.sha256(source.read_bytes()).hexdigest()}
    before = files(cache.url)
    again, _ = bring(world, source, "butd-tsv")
    assert (again.sets[0].samples, again.sets[0].shards_before) == (0, 5)
    assert files(cache.url) == before
    source.write_bytes(source.read_bytes() + b"\n")
    bring(world, source, "butd-tsv")
    assert len(cache.set_names("images")) == 2
    assert before.items() <= files(cache.url).items()
    facts = {features.name: features for features in describe(cache.url).sets}[first.name]
    assert (facts.shape, facts.kind) == ((4, CHANNELS), "roi")


def test_stopped_at_any_write_and_started_again_is_the_same(tmp_path, monkeypatch):
    world = World(tmp_path / "w", ragged=True)
    source = world.npz()
    (source / "val2014" / world.of("val")[2]["filename"].replace("jpg", "npz")).write_bytes(b"cut off")
    _, whole = bring(world, source, "detectron-npz", on_error="skip")
    url, kind, opened, stops, left = tmp_path / "stopped.zarr", type(whole.store), type(whole.store).open_array, 0, 0

    def stopping(self, name, writable=False):
        nonlocal left
        left -= writable
        if left < 0:
            raise KeyboardInterrupt
        return opened(self, name, writable)

    while True:
        left = 14 + stops  # the samples take twelve writes, a shard six, and each start stops at another
        monkeypatch.setattr(kind, "open_array", stopping)
        try:
            bring(world, source, "detectron-npz", url, on_error="skip")
            break
        except KeyboardInterrupt:
            stops += 1
        finally:
            monkeypatch.setattr(kind, "open_array", opened)
        report = verify(str(url))
        assert report.ok, report
    assert stops > 2
    assert files(url) == files(whole.url)


def test_splits_are_written_when_asked_for(tmp_path):
    world = World(tmp_path / "w")
    _, cache = bring(world, world.scan(splits=("train", "dev", "testall")), "scan", splits=("val",))
    assert [cache.image_set().complete(split) for split in cache.splits] == [False, True, False]
    source = world.scan("half", splits=("train", "dev"))
    with pytest.raises(SourceError, match="half has no image of split 'test'; choose others with --splits"):
        bring(world, source, "scan", on_error="skip")
    with pytest.raises(CacheError, match="has no image in split other; it has train, val, test"):
        bring(world, source, "scan", splits=("other",))
    summary, _ = bring(world, source, "scan", splits=("train", "val"))
    assert summary.sets[0].samples == 26


@pytest.mark.parametrize("format_", ["butd-tsv", "scan", "hdf5"])
def test_memory_is_that_of_a_shard_not_of_the_source(tmp_path, format_):
    world = World(tmp_path / "w", train=120, val=1, test=1)
    for image in world.images:
        image["regions_of_test"]["local"] = np.full((4, 8192), image["imgid"], dtype=np.float32)
    source = {"butd-tsv": world.tsv, "scan": world.scan, "hdf5": world.hdf5}[format_]()
    bring(World(tmp_path / "small"), World(tmp_path / "other").tsv(), "butd-tsv")  # imports and first uses
    tracemalloc.start()
    bring(world, source, format_, arrays=ARRAYS if format_ == "hdf5" else {}, workers=1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 122 * 4 * 8192 * 4 / 4  # of the source's 16 MB


# Which image is which


def test_images_that_the_source_lacks_are_refused_or_recorded(tmp_path):
    world = World(tmp_path / "w")
    gone = [world.of("train")[3], world.of("test")[0]]
    source = world.tsv(images=[image for image in world.images if image not in gone])
    name = f"val2014/{gone[0]['filename']}"
    with pytest.raises(SourceError, match=rf"butd\.tsv lacks 2 of the images of 'world', the first is '{name}'; --on-"):
        bring(world, source, "butd-tsv")
    assert not (world.folder / "s.zarr").exists()
    summary, cache = bring(world, source, "butd-tsv", on_error="skip")
    images = cache.image_set()
    assert (summary.sets[0].samples, summary.sets[0].failed) == (30, 2)
    assert images.failed[str(gone[0]["imgid"])] == f"{name}: the source has no features of it"
    rows = np.flatnonzero(images.status == 1)
    assert rows.tolist() == [3, 26]
    assert np.isnan(images.local(rows)).all()
    assert images.length[rows].tolist() == [0, 0]
    report = verify(cache.url)
    assert report.ok
    assert len(report.failed_samples) == 2


def test_images_of_the_source_that_the_data_set_lacks_are_counted(tmp_path):
    world = World(tmp_path / "w")
    others = [{**image, "cocoid": image["cocoid"] + 10**7} for image in world.images[:3]]
    others[0]["regions_of_test"] = {**others[0]["regions_of_test"], "local": np.ones((9, CHANNELS), np.float32)}
    summary, cache = bring(world, world.tsv(images=others + world.images), "butd-tsv")
    assert summary.unmatched == 3
    assert_holds(cache, world.stored, ["boxes"])  # 9 regions of no image widen nothing


def test_a_source_of_another_data_set_is_refused(tmp_path):
    world = World(tmp_path / "w")
    others = [{**image, "cocoid": f"x{image['cocoid']}"} for image in world.images]
    sentence = "none of the source's 32 images is in 'world': its first ids are 'x1000', 'x1037', 'x1074'"
    with pytest.raises(SourceError, match=sentence):
        bring(world, world.tsv(images=others), "butd-tsv")


def test_numbers_that_count_rows_of_a_file_are_no_ids(tmp_path):
    world = World(tmp_path / "w", train=60, val=20, test=20)
    source = world.scan(splits=("train", "dev", "testall"))
    for split, count in (("train", 60), ("dev", 20), ("testall", 20)):
        (source / f"{split}_ids.txt").write_text("".join(f"{row}\n" for row in range(count)))
    with pytest.raises(SourceError, match=r"only \d+ of 20 images of the source's val files are in split 'val'"):
        bring(world, source, "scan")


def samples(keys):
    images = [ImageSample(key, name, "train", cocoid, (Caption("a", 0),)) for key, cocoid, name in keys]
    return Samples("made", tuple(images), {"train": (0, len(images))}, "")


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=12, unique=True), st.data())
def test_ids_are_matched_by_the_kind_that_finds_most(pairs, data):
    keys = [(str(imgid), cocoid, f"{n}.jpg.x") for n, (imgid, cocoid) in enumerate(dict(pairs).items())]
    asked = data.draw(st.lists(st.integers(0, 45).map(str), min_size=1, max_size=20))
    by_id = [next((n for n, key in enumerate(keys) if key[0] == one), -1) for one in asked]
    owners = [[n for n, key in enumerate(keys) if key[1] == int(one)] for one in asked]
    by_cocoid = [rows[0] if len(rows) == 1 else -1 for rows in owners]
    by_dot = [int(one) if int(one) < len(keys) else -1 for one in asked]
    kinds = [by_id, by_cocoid, by_dot]
    most = max(sum(row >= 0 for row in rows) for rows in kinds)
    best = [rows for rows in kinds if sum(row >= 0 for row in rows) == most]
    clash = any(a != b and min(a, b) >= 0 for rows in best[1:] for a, b in zip(best[0], rows, strict=True))
    if not most or clash:
        with pytest.raises(SourceError, match="none of the source's" if not most else "to different images"):
            matching.match(asked, samples(keys))
    else:
        assert matching.match(asked, samples(keys))[0].tolist() == best[0]


def test_leading_zeros_suffixes_and_shared_names():
    made = samples([("7", 391895, "a/x.jpg"), ("8", 12, "b/x.jpg"), ("9", -1, "b/y.png")])
    assert matching.match(["000000391895", "000000000012", "-1"], made)[0].tolist() == [0, 1, -1]
    assert matching.match(["b/y.jpg", "x", "q"], made)[0].tolist() == [2, -1, -1]
    assert matching.match(["b/x.jpg", "a/x.jpg"], made) == (pytest.approx([1, 0]), "file name")


# Faults


def damage_features(world, format_, value, images=(4,)):
    for k in images:
        local = world.images[k]["regions_of_test"]["local"]
        local[1, 2] = value
    write = {"butd-tsv": world.tsv, "scan": world.scan, "hdf5": world.hdf5, "detectron-npz": world.npz}
    return write[format_]()


@pytest.mark.parametrize(
    ("format_", "value"), [("butd-tsv", np.nan), ("scan", np.inf), ("hdf5", -np.inf), ("detectron-npz", np.nan)]
)
def test_values_that_are_no_numbers(tmp_path, format_, value):
    world = World(tmp_path / "w")
    source, name = damage_features(world, format_, value), f"val2014/{world.images[4]['filename']}"
    arrays = ARRAYS if format_ == "hdf5" else {}
    with pytest.raises(SampleError, match=f"{name}: its local hold NaN or infinity; .* --on-error skip"):
        bring(world, source, format_, arrays=arrays)
    assert verify(str(world.folder / "s.zarr")).shards < 5
    summary, cache = bring(world, source, format_, arrays=arrays, on_error="skip")
    assert summary.sets[0].failed == 1
    assert cache.image_set().failed == {"4": f"{name}: its local hold NaN or infinity"}
    assert verify(cache.url).ok


def test_values_beyond_float16_name_the_image_and_the_way_out(tmp_path):
    world = World(tmp_path / "w")
    source = damage_features(world, "butd-tsv", -7e4)
    sentence = f"'val2014/{world.images[4]['filename']}': a value of 7e\\+04 is beyond float16; import with --dtype fl"
    for on_error in ("fail", "skip"):
        with pytest.raises(CacheError, match=sentence):
            bring(world, source, "butd-tsv", on_error=on_error)
    _, cache = bring(world, source, "butd-tsv", tmp_path / "wide.zarr", dtype="float32")
    assert_holds(cache, world.stored, ["boxes"], dtype=np.float32)


def cut(path, share=0.5):
    raw = path.read_bytes()
    path.write_bytes(raw[: int(len(raw) * share)])


def edit(path, old, new):
    raw = path.read_bytes()
    assert old in raw
    path.write_bytes(raw.replace(old, new, 1))


FAULTS_OF_AN_IMAGE = {
    "the base64 of its 'features' is damaged": lambda line: line[:-3] + b"!\n",
    r"its 'features' has \d+ bytes, which is not 4 x 16 values of float32": lambda line: line[:-9] + b"\n",
    "its 'features' has 256 bytes, which is not 5 x 16": lambda line: line.replace(b"\t4\t", b"\t5\t"),
    "its 'boxes' has 48 bytes, which is not 4 x 4": lambda line: line.replace(
        line.split(b"\t")[4][:-24], b"A" * 64, 1
    ).replace(b"A" * 64 + line.split(b"\t")[4][-24:], b"A" * 64),
    "no whole number": lambda line: line.replace(b"\t4\t", b"\tfour\t"),
    "its boxes hold NaN": lambda line: line.replace(line.split(b"\t")[4][:24], b"AADAfwAAwH8AAMB/AADAfwAA"),
}


@pytest.mark.parametrize("sentence", FAULTS_OF_AN_IMAGE)
def test_a_damaged_line(tmp_path, sentence):
    world = World(tmp_path / "w")
    source = world.tsv()
    line = world.line(world.images[0])
    edit(source, line, FAULTS_OF_AN_IMAGE[sentence](line))
    with pytest.raises(SampleError, match=sentence):
        bring(world, source, "butd-tsv")
    assert not FeatureCache.open(str(world.folder / "s.zarr")).image_set().done().all()
    summary, cache = bring(world, source, "butd-tsv", on_error="skip")
    assert summary.sets[0].failed == 1
    assert list(cache.image_set().failed) == ["0"]


def test_a_damaged_npz(tmp_path):
    world = World(tmp_path / "w")
    source = world.npz()
    paths = [source / "val2014" / image["filename"].replace(".jpg", ".npz") for image in world.images]
    cut(paths[0])
    paths[1].write_bytes(b"")
    paths[2].write_bytes(pickle.dumps({"x": 1}))
    np.savez(paths[3], x=np.zeros((4, CHANNELS), np.float32), bbox=np.zeros((4, 4)), num_bbox=3)
    np.savez(paths[4], x=np.zeros((4, CHANNELS + 1), np.float32), bbox=np.zeros((4, 4)), num_bbox=4)
    np.savez(paths[5], x=np.zeros((4, CHANNELS), np.float32))
    np.savez(paths[6], x=np.zeros((4, CHANNELS), np.int32), bbox=np.zeros((4, 4)))
    np.savez(paths[7], x=np.array([[Bomb()]], dtype=object), bbox=np.zeros((4, 4)))
    np.savez(paths[8], x=np.zeros((0, CHANNELS), np.float32), bbox=np.zeros((0, 4)))
    _, cache = bring(world, source, "detectron-npz", on_error="skip")
    reasons = {int(key): reason.split(": ", 1)[1] for key, reason in cache.image_set().failed.items()}
    damaged = "its .npz is damaged, cut off, or pickled"
    assert reasons == {
        0: damaged,
        1: damaged,
        2: damaged,
        3: "'num_bbox' is 3, but 'x' has 4 rows",
        4: "its features are 4 x 17, not 1 to 4 regions x 16 channels",
        5: "its .npz has no array 'bbox'",
        6: "its local are int32 4 x 16, not 4 x 16 floats",
        7: damaged,
        8: "its features are 0 x 16, not 1 to 4 regions x 16 channels",
    }


def lines(path, change):
    path.write_text("".join(f"{line}\n" for line in change(path.read_text().split("\n")[:-1])))


FAULTS_OF_SCAN = {
    r"train_ims\.npy is no array of numbers or was cut off": lambda f: cut(f / "train_ims.npy"),
    r"dev_ims\.npy is no array of numbers or was cut": lambda f: (f / "dev_ims.npy").write_bytes(pickle.dumps([1])),
    r"dev_ims\.npy is no array of numbers or": lambda f: np.save(f / "dev_ims.npy", np.array([Bomb()], dtype=object)),
    r"holds int64 6 x 4 x 16; check": lambda f: np.save(f / "dev_ims.npy", np.zeros((6, 4, 16), int)),
    r"holds float64 6; check --source": lambda f: np.save(f / "dev_ims.npy", np.zeros(6)),
    r"has 3 channels where train_ims\.npy has 16": lambda f: np.save(f / "dev_ims.npy", np.zeros((6, 4, 3))),
    r"dev_caps\.txt is missing": lambda f: (f / "dev_caps.txt").unlink(),
    r"dev_ids\.txt is missing": lambda f: (f / "dev_ids.txt").unlink(),
    "6 rows, 11 captions and 6 ids do not fit": lambda f: lines(f / "dev_caps.txt", lambda text: text[1:]),
    "6 rows, 12 captions and 5 ids do not fit": lambda f: lines(f / "dev_ids.txt", lambda text: text[1:]),
    "holds none of train_ims.npy": lambda f: [path.unlink() for path in f.glob("*_ims.npy")],
}


@pytest.mark.parametrize("sentence", FAULTS_OF_SCAN)
def test_a_damaged_folder_of_scan(tmp_path, sentence):
    world = World(tmp_path / "w")
    source = world.scan()
    FAULTS_OF_SCAN[sentence](source)
    with pytest.raises(SourceError, match=sentence):
        bring(world, source, "scan")
    assert not (world.folder / "s.zarr").exists()


def test_rows_that_should_repeat_and_do_not(tmp_path):
    world = World(tmp_path / "w")
    source = world.scan(rows="caption")
    local = np.load(source / "dev_ims.npy")
    np.save(source / "dev_ims.npy", np.roll(local, 1, axis=0))
    for on_error in ("fail", "skip"):  # no fault of one image: the whole array is not what it seemed
        with pytest.raises(SourceError, match=r"dev_ims\.npy has as many rows as captions, but rows 0 to 1 of image"):
            bring(world, source, "scan", on_error=on_error)
    assert not FeatureCache.open(str(world.folder / "s.zarr")).image_set().complete("val")
    source = world.scan("second", ids="caption")
    lines(source / "dev_ids.txt", lambda ids: ids[1:] + ids[:1])
    with pytest.raises(SourceError, match="mean 2 captions an image, but the ids do not repeat so"):
        bring(world, source, "scan")


def test_a_source_that_is_not_what_was_said(tmp_path):
    world = World(tmp_path / "w")
    butd, lxmert, h5 = world.tsv(), world.tsv("l.tsv", lxmert=True), world.hdf5()
    (tmp_path / "empty").mkdir()
    (tmp_path / "nothing.tsv").write_bytes(b"")
    local = {"local": "regions/local"}
    cases = [
        (butd, "lxmert-tsv", {}, r"line 1 has 6 columns, not the 10 of lxmert-tsv .*; try --from butd-tsv"),
        (lxmert, "butd-tsv", {}, r"line 1 has 10 columns, not the 6 of butd-tsv .*; try --from lxmert-tsv"),
        (h5, "butd-tsv", {}, r"columns, not the 6 .* cut off"),
        (tmp_path / "nothing.tsv", "butd-tsv", {}, "no image in it has features"),
        (tmp_path / "empty", "butd-tsv", {}, r"holds no file \*\.tsv"),
        (tmp_path / "empty", "scan", {}, "holds none of train_ims.npy"),
        (tmp_path / "empty", "vse-infty", {}, "there is neither .*precomp nor .*world/precomp"),
        (tmp_path / "empty", "detectron-npz", {}, r"no folder that holds \.npz"),
        (tmp_path / "absent", "scan", {}, "absent is not there; give the file or folder"),
        (butd, "butd-tsv", local, "--arrays names the arrays of an HDF5 file, but --from is butd-tsv"),
        (butd, "hdf5", local, "is no HDF5 file, is damaged or was cut off"),
        (h5, "hdf5", {}, r"--arrays must say which array of .*'local'; it holds count \(int64 32\), name \("),
        (h5, "hdf5", local, r"which array of .* is 'id'"),
        (h5, "hdf5", {**local, "box": "b"}, r"'box' is unknown \(did you mean 'boxes'\?\)"),
        (h5, "hdf5", {**local, "id": "names"}, "has no array 'names' for id; it holds count"),
        (h5, "hdf5", {**local, "id": "regions"}, "has no array 'regions' for id"),
        (h5, "hdf5", {**local, "id": "name", "boxes": "size"}, r"'/size' is int64 32 x 2, which cannot be 'boxes' \(S"),
        (h5, "hdf5", {**local, "id": "regions/scores"}, "cannot be 'id'"),
    ]
    for source, format_, arrays, sentence in cases:
        with pytest.raises(SourceError, match=sentence):
            bring(world, source, format_, arrays=arrays)
        assert not (world.folder / "s.zarr").exists()


def test_a_line_that_was_cut_off_before_its_features(tmp_path):
    world = World(tmp_path / "w")
    source = world.tsv()
    source.write_bytes(source.read_bytes() + b"123\t640\t48")
    with pytest.raises(SourceError, match=r"butd\.tsv: line 33 has 3 columns, not the 6 .*; get the file anew"):
        bring(world, source, "butd-tsv")


def test_a_length_in_hdf5_that_is_no_length(tmp_path):
    world = World(tmp_path / "w")
    source = world.hdf5()
    with h5py.File(source, "a") as file:
        file["count"][:2] = [0, 5]
    _, cache = bring(world, source, "hdf5", arrays=ARRAYS, on_error="skip")
    reasons = [reason.split(": ")[1] for _, reason in sorted(cache.image_set().failed.items())]
    assert reasons == ["its length 5 is not one of its regions", "its length 0 is not one of its regions"]


def test_another_store_and_a_split_of_damaged_images(tmp_path):
    world = World(tmp_path / "w", val=1)
    other = World(tmp_path / "o", val=2)
    bring(other, other.tsv(), "butd-tsv")
    with pytest.raises(CacheError, match="holds other samples"):
        bring(world, world.tsv(), "butd-tsv", other.folder / "s.zarr")
    k = world.images.index(world.of("val")[0])
    source = damage_features(world, "detectron-npz", np.nan, images=[k])
    with pytest.raises(CacheError, match=r"no image of split 'val' could be read; for example .* hold NaN or inf"):
        bring(world, source, "detectron-npz", on_error="skip")
    features = FeatureCache.open(str(world.folder / "s.zarr")).image_set()
    assert (features.failed, features.complete("train"), features.complete("val")) == ({}, True, False)


def test_a_full_disk_leaves_no_shard_that_looks_whole(tmp_path, monkeypatch):
    world = World(tmp_path / "w")
    source = world.tsv()

    def full(store, name, shard, values):
        if shard == 2:
            raise OSError(28, "No space left on device")
        write(store, name, shard, values)

    write = Store.write_shard
    monkeypatch.setattr(Store, "write_shard", full)
    with pytest.raises(OSError, match="No space left"):
        bring(world, source, "butd-tsv", workers=1)
    monkeypatch.undo()
    cache = FeatureCache.open(str(world.folder / "s.zarr"))
    done = cache.image_set().done()
    assert done.sum() == 2
    assert not done[2]
    bring(world, source, "butd-tsv")
    shutil.copytree(cache.url, tmp_path / "copy")
    assert_holds(FeatureCache.open(str(tmp_path / "copy")), world.stored, ["boxes"])
