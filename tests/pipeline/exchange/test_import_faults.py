"""Faults of features that others extracted: each is a sentence, and no shard looks whole that is not."""

import pickle
import subprocess
import sys

import h5py
import numpy as np
import pytest
from imported import Bomb, assert_holds, bring
from region_sources import ARRAYS, CHANNELS, World

from xret.pipeline.errors import CacheError, SampleError
from xret.pipeline.exchange.importers.source import SourceError
from xret.pipeline.store import FeatureCache
from xret.pipeline.store.inspect import verify


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
    with pytest.raises(SampleError, match=f"{name}: its features hold NaN or infinity; .* --on-error skip"):
        bring(world, source, format_, arrays=arrays)
    assert verify(str(world.folder / "s.zarr")).chunks == 0
    summary, cache = bring(world, source, format_, arrays=arrays, on_error="skip")
    assert summary.sets[0].failed == 1
    assert dict(cache.image_set().failures) == {"4": f"{name}: its features hold NaN or infinity"}
    assert verify(cache.url).ok


def test_values_beyond_float16_name_the_way_out(tmp_path):
    world = World(tmp_path / "w")
    source = damage_features(world, "butd-tsv", -7e4)
    sentence = r"a value of 7e\+04 is beyond float16; import with --dtype float32"
    for on_error in ("fail", "skip"):
        with pytest.raises(CacheError, match=sentence):
            bring(world, source, "butd-tsv", on_error=on_error)
    _, cache = bring(world, source, "butd-tsv", tmp_path / "wide.zarr", dtype="float32")
    assert_holds(cache, world.stored, ["boxes"], dtype=np.float32)


def cut(path, share=0.5):
    raw = path.read_bytes()
    path.write_bytes(raw[: int(len(raw) * share)])


FAULTS_OF_AN_IMAGE = {
    "the base64 of its 'features' is damaged": lambda line: line[:-3] + b"!\n",
    r"its 'features' has \d+ bytes, which is not 4 x 16 values of float32": lambda line: line[:-9] + b"\n",
    "its 'features' has 256 bytes, which is not 5 x 16": lambda line: line.replace(b"\t4\t", b"\t5\t"),
    "its 'boxes' has 48 bytes, which is not 4 x 4": lambda line: line.replace(
        line.split(b"\t")[4][:-24], b"A" * 64, 1
    ).replace(b"A" * 64 + line.split(b"\t")[4][-24:], b"A" * 64),
    "no whole number": lambda line: line.replace(b"\t4\t", b"\tfour\t"),
    "its boxes hold values that are no float32": lambda line: line.replace(
        line.split(b"\t")[4][:24], b"AADAfwAAwH8AAMB/AADAfwAA"
    ),
}


@pytest.mark.parametrize("sentence", FAULTS_OF_AN_IMAGE)
def test_a_damaged_line(tmp_path, sentence):
    world = World(tmp_path / "w")
    source = world.tsv()
    line = world.line(world.images[0])
    source.write_bytes(source.read_bytes().replace(line, FAULTS_OF_AN_IMAGE[sentence](line), 1))
    with pytest.raises(SampleError, match=sentence):
        bring(world, source, "butd-tsv")
    assert not FeatureCache.open(str(world.folder / "s.zarr")).image_set().done().all()
    summary, cache = bring(world, source, "butd-tsv", on_error="skip")
    assert summary.sets[0].failed == 1
    assert [key for key, _ in cache.image_set().failures] == ["0"]


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
    reasons = {int(key): reason.split(": ", 1)[1] for key, reason in cache.image_set().failures}
    damaged = "its .npz is damaged, cut off, or pickled"
    assert reasons == {
        0: damaged,
        1: damaged,
        2: damaged,
        3: "'num_bbox' is 3, but 'x' has 4 rows",
        4: "its features are float32 4 x 17, not 1 to 4 regions x 16 channels",
        5: "its .npz has no array 'bbox'",
        6: "its features are int32, not floats",
        7: damaged,
        8: "its features are float32 0 x 16, not 1 to 4 regions x 16 channels",
    }


def test_damaged_arrays(tmp_path):
    world = World(tmp_path / "w")
    source = world.arrays()
    paths = [source / image["filename"].replace(".jpg", ".npy") for image in world.images]
    cut(paths[0], 0.1)
    paths[1].write_bytes(pickle.dumps({"x": 1}))
    np.save(paths[2], np.zeros((2, 4, CHANNELS), np.float32))
    np.save(paths[3], np.zeros(CHANNELS, np.float32))
    np.save(paths[4], np.zeros((1, 4, CHANNELS + 1), np.float32))
    np.save(paths[5], np.array([[Bomb()]], dtype=object))
    cut(paths[6], 0.9)
    _, cache = bring(world, source, "arrays", on_error="skip", kind="frames")
    reasons = {int(key): reason.split(": ", 1)[1] for key, reason in cache.image_set().failures}
    damaged = "its array is damaged, cut off, or pickled"
    assert reasons == {
        0: damaged,
        1: damaged,
        2: "its array is float32 2 x 4 x 16, not rows x channels",
        3: "its array is float32 16, not rows x channels",
        4: "its features are float32 4 x 17, not 1 to 4 regions x 16 channels",
        5: damaged,
        6: damaged,
    }
    (tmp_path / "empty").mkdir()
    for other, said in ((tmp_path / "empty", "holds no array"), (world.tsv(), "no HDF5 file")):
        with pytest.raises(SourceError, match=said):
            bring(world, other, "arrays")


def test_frames_have_no_boxes(tmp_path):
    world = World(tmp_path / "w")
    with pytest.raises(SourceError, match="these have boxes, as regions do"):
        bring(world, world.tsv(), "butd-tsv", kind="frames")
    with pytest.raises(CacheError, match="kind is 'frame'"):
        bring(world, world.tsv(), "butd-tsv", kind="frame")


def lines(path, change):
    path.write_text("".join(f"{line}\n" for line in change(path.read_text().split("\n")[:-1])))


FAULTS_OF_SCAN = {
    r"train_ims\.npy is no array of numbers, or was cut off": lambda f: cut(f / "train_ims.npy"),
    r"dev_ims\.npy is no array of numbers, or was cut": lambda f: (f / "dev_ims.npy").write_bytes(pickle.dumps([1])),
    r"dev_ims\.npy is no array of numbers, or": lambda f: np.save(f / "dev_ims.npy", np.array([Bomb()], dtype=object)),
    r"is int64 6 x 4 x 16, not floats in 2 or 3 dimensions; check": lambda f: np.save(
        f / "dev_ims.npy", np.zeros((6, 4, 16), int)
    ),
    r"is float64 6, not floats in 2 or 3 dimensions; check --source": lambda f: np.save(f / "dev_ims.npy", np.zeros(6)),
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
    with pytest.raises(SourceError, match="its ids do not repeat 2 times, as its captions do"):
        bring(world, source, "scan")


def test_a_source_that_is_not_what_was_said(tmp_path):
    world = World(tmp_path / "w")
    butd, short, h5, empty = world.tsv(), world.tsv("short.tsv"), world.hdf5(), tmp_path / "empty"
    short.write_bytes(short.read_bytes() + b"123\t640\t48")
    empty.mkdir()
    (tmp_path / "nothing.tsv").write_bytes(b"")
    local = {"local": "regions/local"}
    cases = [
        (short, "butd-tsv", {}, r"short\.tsv: line 33 has 3 columns, not the 6 .*; download the file again"),
        (h5, "butd-tsv", {}, r"columns, not the 6 columns image_id"),
        (tmp_path / "nothing.tsv", "butd-tsv", {}, "no image in it has features"),
        (empty, "butd-tsv", {}, r"holds no file \*\.tsv"),
        (empty, "scan", {}, "holds none of train_ims.npy"),
        (empty, "detectron-npz", {}, r"no folder that holds \.npz"),
        (tmp_path / "absent", "scan", {}, "absent is not there; give the file or folder"),
        (butd, "butd-tsv", local, "--arrays names the arrays of an HDF5 file, but --from is butd-tsv"),
        (butd, "hdf5", local, "is no HDF5 file, is damaged or was cut off"),
        (h5, "hdf5", {}, r"has no array for local; name it with --arrays: it holds count \(int64 32\), name \("),
        (h5, "hdf5", local, "has no array for id"),
        (h5, "hdf5", {**local, "box": "b"}, r"'box' is unknown \(did you mean 'boxes'\?\)"),
        (h5, "hdf5", {**local, "id": "names"}, "has no array 'names' for id; .* holds count"),
        (h5, "hdf5", {**local, "id": "regions"}, "has no array 'regions' for id"),
        (h5, "hdf5", {**local, "id": "regions/scores"}, "cannot be 'id'"),
        (h5, "hdf5", {**local, "id": "name", "boxes": "size"}, "cannot be 'boxes'"),
    ]
    for source, format_, arrays, sentence in cases:
        with pytest.raises(SourceError, match=sentence):
            bring(world, source, format_, arrays=arrays)
        assert not (world.folder / "s.zarr").exists()


@pytest.mark.parametrize("role", ["length", "boxes", "classes", "scores", "size"])
@pytest.mark.parametrize("change", ["wider", "flat", "texts"])
def test_an_array_of_hdf5_that_does_not_fit_the_regions(tmp_path, role, change):
    world = World(tmp_path / "w")
    source = world.hdf5()
    with h5py.File(source, "a") as file:
        values = file[ARRAYS[role]][()]
        images, *after = values.shape
        made = {"wider": (images, *[side + 1 for side in after or [1]]), "flat": (images * 2,), "texts": values.shape}
        file["other"] = np.zeros(made[change], "S1" if change == "texts" else values.dtype)
    with pytest.raises(SourceError, match=f"'/other' is .*, which cannot be '{role}' where"):
        bring(world, source, "hdf5", arrays={**ARRAYS, role: "other"}, on_error="skip")


def test_a_length_in_hdf5_that_is_no_length(tmp_path):
    world = World(tmp_path / "w")
    source = world.hdf5()
    with h5py.File(source, "a") as file:
        file["count"][:2] = [0, 5]
    _, cache = bring(world, source, "hdf5", arrays=ARRAYS, on_error="skip")
    reasons = [reason.split(": ")[1] for _, reason in sorted(cache.image_set().failures)]
    assert reasons == ["its length 5 is not one of its regions", "its length 0 is not one of its regions"]


def test_another_store_and_a_split_of_damaged_images(tmp_path):
    world = World(tmp_path / "w", val=1)
    other = World(tmp_path / "o", val=2)
    bring(other, other.tsv(), "butd-tsv")
    with pytest.raises(CacheError, match="holds other samples"):
        bring(world, world.tsv(), "butd-tsv", other.folder / "s.zarr")
    k = world.images.index(world.of("val")[0])
    source = damage_features(world, "detectron-npz", np.nan, images=[k])
    with pytest.raises(CacheError, match=r"no image of split 'val' could be read; for example .* NaN or inf"):
        bring(world, source, "detectron-npz", on_error="skip")


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        (lambda local: local * 1e-9, CacheError, "too small for float16; import with --dtype float32"),
        (lambda local: local * 1e-7, CacheError, "too small for float16; import with --dtype float32"),
        (lambda local: local.byteswap(), SourceError, "are no features"),
        (lambda local: local.astype(np.float16).astype(np.float32).byteswap(), SourceError, "are no features"),
        (lambda local: local * 0, SampleError, "all zeros"),
    ],
)
def test_numbers_that_a_set_cannot_hold(tmp_path, change, error, sentence):
    world = World(tmp_path / "w")
    for image in world.images:
        regions = image["regions_of_test"]
        regions["local"] = change(regions["local"])
        np.nan_to_num(regions["local"], copy=False, nan=1)
    with pytest.raises(error, match=sentence):
        bring(world, world.arrays(), "arrays")


def test_tiny_numbers_among_others_are_no_loss(tmp_path):
    world = World(tmp_path / "w")
    for image in world.images:
        image["regions_of_test"]["local"][:, 1:] *= 1e-9
    _, cache = bring(world, world.arrays(), "arrays")
    assert (cache.image_set().status == 0).all()
    wide = World(tmp_path / "wide")
    for image in wide.images:
        image["regions_of_test"]["local"] *= 1e-9
    _, cache = bring(wide, wide.tsv(), "butd-tsv", dtype="float32")
    assert_holds(cache, wide.stored, ["boxes"], dtype=np.float32)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda boxes: boxes / 700, "shares of width and height"),
        (lambda boxes: boxes + np.array([0, 0, 640, 0]), r"beyond its 640 x 480 pixels"),
        (lambda boxes: boxes - np.array([0, 200, 0, 0]), r"beyond its 640 x 480 pixels"),
        (lambda boxes: np.concatenate([boxes[:, :2] + 20, boxes[:, 2:] - boxes[:, :2]], axis=1), "x1, y1"),
    ],
)
def test_boxes_fit_their_picture(tmp_path, change, sentence):
    world = World(tmp_path / "w")
    regions = world.images[0]["regions_of_test"]
    regions["boxes"] = change(regions["boxes"]).astype(np.float32)
    with pytest.raises(SampleError, match=sentence):
        bring(world, world.npz(), "detectron-npz")


def test_an_hdf5_file_that_is_written_elsewhere(tmp_path):
    world = World(tmp_path / "w")
    source = world.hdf5()
    writer = "import h5py, sys, time; file = h5py.File(sys.argv[1], 'a'); print(flush=True); time.sleep(100)"
    with subprocess.Popen([sys.executable, "-c", writer, str(source)], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        try:
            with pytest.raises(SourceError, match=r"open for writing in another program|has not closed"):
                bring(world, source, "hdf5", arrays=ARRAYS)
        finally:
            process.kill()


def test_an_hdf5_filter_that_is_not_installed(tmp_path, monkeypatch):
    world = World(tmp_path / "w")
    monkeypatch.setattr(h5py.h5z, "filter_avail", lambda code: False)
    with pytest.raises(SourceError, match=r"'/regions/local' is compressed by the HDF5 filter 1 .*not installed"):
        bring(world, world.hdf5(), "hdf5", arrays=ARRAYS)
