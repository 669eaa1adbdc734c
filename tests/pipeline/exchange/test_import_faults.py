"""Faults of features that others extracted: each is a sentence, and no shard looks whole that is not."""

import pickle
import subprocess
import sys
from itertools import cycle

import h5py
import numpy as np
import pytest
from imported import Bomb, assert_holds, bring, refused
from region_sources import ARRAYS, WRITERS, World

from xret.pipeline.errors import CacheError, SampleError
from xret.pipeline.exchange.importers.source import SourceError
from xret.pipeline.store import NOT_DONE, FeatureCache
from xret.pipeline.store.inspect import verify


def damage_features(world, format_, value, image=4):
    world.images[image]["regions_of_test"]["local"][1, 2] = value
    return WRITERS[format_](world)


@pytest.mark.parametrize(("format_", "value"), [*zip(WRITERS, cycle([np.nan, np.inf, -np.inf]), strict=False)])
def test_values_that_are_no_numbers(world, format_, value):
    source, name = damage_features(world, format_, value), f"val2014/{world.images[4]['filename']}"
    sentence = f"{name}: its features hold NaN or infinity; .* `on_error` skip"
    refused(sentence, world, source, format_, error=SampleError)
    assert verify(str(world.folder / "s.zarr")).chunks == 0
    summary, cache = bring(world, source, format_, on_error="skip")
    assert summary.sets[0].failed == 1
    assert dict(cache.image_set().failures) == {"4": f"{name}: its features hold NaN or infinity"}
    assert verify(cache.url).ok


def test_values_beyond_float16_name_the_way_out(tmp_path, world):
    source = damage_features(world, "butd-tsv", -7e4)
    sentence = r"a value of 7e\+04 is beyond float16; import with `dtype` float32"
    for on_error in ("fail", "skip"):
        refused(sentence, world, source, "butd-tsv", on_error=on_error, error=CacheError)
    _, cache = bring(world, source, "butd-tsv", tmp_path / "wide.zarr", dtype="float32")
    assert_holds(cache, world.stored, ["boxes"], dtype=np.float32)


def cut(path, share=0.5):
    raw = path.read_bytes()
    path.write_bytes(raw[: int(len(raw) * share)])


FAULTS_OF_AN_IMAGE = {
    "the base64 of its 'features' is damaged": lambda line, _: line[:-3] + b"!\n",
    r"its 'features' has \d+ bytes, which is not 4 x 16 values of float32": lambda line, _: line[:-9] + b"\n",
    "its 'features' has 256 bytes, which is not 5 x 16": lambda line, _: line.replace(b"\t4\t", b"\t5\t"),
    "its 'boxes' has 48 bytes, which is not 4 x 4": lambda line, boxes: line.replace(boxes, b"A" * 64),
    "its line has 3 columns, not the 6": lambda line, _: b"\t".join(line.split(b"\t")[:3]) + b"\n",
    "no whole number": lambda line, _: line.replace(b"\t4\t", b"\tfour\t"),
    "its boxes hold values that are no float32": lambda line, boxes: line.replace(
        boxes[:24], b"AADAfwAAwH8AAMB/AADAfwAA"
    ),
}


@pytest.mark.parametrize("sentence", FAULTS_OF_AN_IMAGE)
def test_a_damaged_line(world, sentence):
    source = world.tsv()
    line = world.line(world.images[0])
    source.write_bytes(source.read_bytes().replace(line, FAULTS_OF_AN_IMAGE[sentence](line, line.split(b"\t")[4]), 1))
    refused(sentence, world, source, "butd-tsv", error=SampleError)
    assert (FeatureCache.open(str(world.folder / "s.zarr")).image_set().status == NOT_DONE).any()
    summary, cache = bring(world, source, "butd-tsv", on_error="skip")
    assert summary.sets[0].failed == 1
    assert [key for key, _ in cache.image_set().failures] == ["0"]


def test_frames_have_no_boxes(world):
    refused("these have boxes, as regions do", world, world.tsv(), "butd-tsv", kind="frames")
    refused("kind is 'frame'", world, world.tsv(), "butd-tsv", kind="frame", error=CacheError)


def lines(path, change):
    path.write_text("".join(f"{line}\n" for line in change(path.read_text().split("\n")[:-1])))


FAULTS_OF_SCAN = {
    r"train_ims\.npy is no array of numbers, or was cut off": lambda f: cut(f / "train_ims.npy"),
    r"dev_ims\.npy is no array of numbers, or was cut": lambda f: (f / "dev_ims.npy").write_bytes(pickle.dumps([1])),
    r"dev_ims\.npy is no array of numbers, or": lambda f: np.save(f / "dev_ims.npy", np.array([Bomb()], dtype=object)),
    r"is int64 6 x 4 x 16, not floats in 2 or 3 dimensions; check": lambda f: np.save(
        f / "dev_ims.npy", np.zeros((6, 4, 16), int)
    ),
    r"is float64 6, not floats in 2 or 3 dimensions; check `source`": lambda f: np.save(f / "dev_ims.npy", np.zeros(6)),
    r"has 3 channels where train_ims\.npy has 16": lambda f: np.save(f / "dev_ims.npy", np.zeros((6, 4, 3))),
    r"dev_caps\.txt is missing": lambda f: (f / "dev_caps.txt").unlink(),
    r"dev_ids\.txt is missing": lambda f: (f / "dev_ids.txt").unlink(),
    "6 rows, 11 captions and 6 ids do not fit": lambda f: lines(f / "dev_caps.txt", lambda text: text[1:]),
    "6 rows, 12 captions and 5 ids do not fit": lambda f: lines(f / "dev_ids.txt", lambda text: text[1:]),
    "holds none of train_ims.npy": lambda f: [path.unlink() for path in f.glob("*_ims.npy")],
}


@pytest.mark.parametrize("sentence", FAULTS_OF_SCAN)
def test_a_damaged_folder_of_scan(world, sentence):
    source = world.scan()
    FAULTS_OF_SCAN[sentence](source)
    refused(sentence, world, source, "scan")
    assert not (world.folder / "s.zarr").exists()


def test_rows_that_should_repeat_and_do_not(world):
    source = world.scan(rows="caption")
    local = np.load(source / "dev_ims.npy")
    np.save(source / "dev_ims.npy", np.roll(local, 1, axis=0))
    for on_error in ("fail", "skip"):  # no fault of one image: the whole array is not what it seemed
        sentence = r"dev_ims\.npy has as many rows as captions, but rows 0 to 1 of image"
        refused(sentence, world, source, "scan", on_error=on_error)
    assert not FeatureCache.open(str(world.folder / "s.zarr")).image_set().complete("val")
    source = world.scan("second", ids="caption")
    lines(source / "dev_ids.txt", lambda ids: ids[1:] + ids[:1])
    refused("its ids do not repeat 2 times, as its captions do", world, source, "scan")


def test_a_source_that_is_not_what_was_said(tmp_path, world):
    butd, h5, empty = world.tsv(), world.hdf5(), tmp_path / "empty"
    empty.mkdir()
    (tmp_path / "nothing.tsv").write_bytes(b"")
    local = {"local": "regions/local"}
    cases = [
        (h5, "butd-tsv", {}, "no line of it has the 6 columns image_id"),
        (tmp_path / "nothing.tsv", "butd-tsv", {}, "no line of it has"),
        (empty, "butd-tsv", {}, r"holds no file \*\.tsv"),
        (empty, "scan", {}, "holds none of train_ims.npy"),
        (h5, "hdf5", {}, "has no array for local"),
        (tmp_path / "absent", "scan", {}, "absent is not there; give the file or folder"),
        (butd, "butd-tsv", local, "`arrays` names the arrays of an HDF5 file, but `from` is butd-tsv"),
        (butd, "hdf5", local, "cannot be read as HDF5 .*signature"),
        (h5, "hdf5", {}, r"has no array for local; name it with `arrays`: it holds count \(int64 32\), name \("),
        (h5, "hdf5", local, "has no array for id"),
        (h5, "hdf5", {**local, "box": "b"}, r"'box' is unknown \(did you mean 'boxes'\?\)"),
        (h5, "hdf5", {**local, "id": "names"}, "has no array 'names' for id; .* holds count"),
        (h5, "hdf5", {**local, "id": "regions"}, "has no array 'regions' for id"),
        (h5, "hdf5", {**local, "id": "regions/scores"}, "cannot be 'id'"),
        (h5, "hdf5", {**local, "id": "name", "boxes": "size"}, "cannot be 'boxes'"),
    ]
    for source, format_, arrays, sentence in cases:
        refused(sentence, world, source, format_, arrays=arrays)
        assert not (world.folder / "s.zarr").exists()


@pytest.mark.parametrize("role", ["length", "boxes", "classes", "scores", "size"])
@pytest.mark.parametrize("change", ["wider", "flat", "texts"])
def test_an_array_of_hdf5_that_does_not_fit_the_regions(world, role, change):
    source = world.hdf5()
    with h5py.File(source, "a") as file:
        values = file[ARRAYS[role]][()]
        images, *after = values.shape
        made = {"wider": (images, *[side + 1 for side in after or [1]]), "flat": (images * 2,), "texts": values.shape}
        file["other"] = np.zeros(made[change], "S1" if change == "texts" else values.dtype)
    sentence = f"'/other' is .*, which cannot be '{role}' where"
    refused(sentence, world, source, "hdf5", arrays={**ARRAYS, role: "other"}, on_error="skip")


def test_a_length_in_hdf5_that_is_no_length(world):
    source = world.hdf5()
    with h5py.File(source, "a") as file:
        file["count"][:2] = [0, 5]
    _, cache = bring(world, source, "hdf5", on_error="skip")
    reasons = [reason.split(": ")[1] for _, reason in sorted(cache.image_set().failures)]
    assert reasons == ["its length 5 is not one of its regions", "its length 0 is not one of its regions"]


def test_another_store_and_a_split_of_damaged_images(tmp_path):
    world = World(tmp_path / "w", val=1)
    other = World(tmp_path / "o", val=2)
    bring(other, other.tsv(), "butd-tsv")
    refused("holds other samples", world, world.tsv(), "butd-tsv", other.folder / "s.zarr", error=CacheError)
    k = world.images.index(world.of("val")[0])
    source = damage_features(world, "hdf5", np.nan, k)
    sentence = r"no image of split 'val' could be read; for example .* NaN or inf"
    refused(sentence, world, source, "hdf5", error=CacheError, on_error="skip")


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        (lambda local: local * 1e-9, CacheError, "too small for float16; import with `dtype` float32"),
        (lambda local: local * 1e-7, CacheError, "too small for float16; import with `dtype` float32"),
        (lambda local: local.byteswap(), SourceError, "are no features"),
        (lambda local: local.astype(np.float16).astype(np.float32).byteswap(), SourceError, "are no features"),
        (lambda local: local * 0, SampleError, "all zeros"),
    ],
)
def test_numbers_that_a_set_cannot_hold(world, change, error, sentence):
    for image in world.images:
        regions = image["regions_of_test"]
        regions["local"] = change(regions["local"])
        np.nan_to_num(regions["local"], copy=False, nan=1)
    refused(sentence, world, world.hdf5(), "hdf5", error=error)


def test_tiny_numbers_among_others_are_no_loss(tmp_path, world):
    for image in world.images:
        image["regions_of_test"]["local"][:, 1:] *= 1e-9
    _, cache = bring(world, world.hdf5(), "hdf5")
    assert (cache.image_set().status == 0).all()
    wide = World(tmp_path / "wide")
    for image in wide.images:
        image["regions_of_test"]["local"] *= 1e-9
    _, cache = bring(wide, wide.tsv(), "butd-tsv", dtype="float32")
    assert_holds(cache, wide.stored, ["boxes"], dtype=np.float32)


def sides(boxes):
    return np.concatenate([boxes[:, :2] + 20, boxes[:, 2:] - boxes[:, :2]], axis=1)


@pytest.mark.parametrize("on_error", ["fail", "skip"])
@pytest.mark.parametrize(
    ("change", "sentence", "of_all"),
    [
        (lambda boxes: boxes / 700, "shares of width and height", False),
        (lambda boxes: np.array([[0, 0, 1.0001, 1]]) + 0 * boxes, "shares of width and height", False),
        (lambda boxes: boxes + np.array([0, 0, 640, 0]), r"beyond its 640 x 480 pixels", False),
        (lambda boxes: boxes - np.array([0, 200, 0, 0]), r"beyond its 640 x 480 pixels", False),
        (sides, "x1, y1", True),
        (lambda boxes: boxes + np.array([0, 0, 0, 400]), "changed places", True),
    ],
)
def test_boxes_fit_their_picture(world, change, sentence, of_all, on_error):
    regions = world.images[0]["regions_of_test"]
    regions["boxes"] = change(regions["boxes"]).astype(np.float32)
    if of_all or on_error == "fail":
        error = SourceError if of_all else SampleError
        refused(sentence, world, world.hdf5(), "hdf5", error=error, on_error=on_error)
    else:
        _, cache = bring(world, world.hdf5(), "hdf5", on_error="skip")
        assert [key for key, _ in cache.image_set().failures] == ["0"]


@pytest.mark.parametrize("form", [sides, lambda boxes: boxes[:, [1, 0, 3, 2]]])
@pytest.mark.parametrize("write", [World.tsv, World.hdf5])
def test_a_form_of_all_boxes_that_is_seen_in_some(world, form, write):
    """They are x, y, width, height, or y before x; few are impossible as corners, and none is left out for that."""
    world.images[7]["regions_of_test"]["boxes"][0] = [100, 10, 630, 300]
    for image in world.images:
        image["regions_of_test"]["boxes"] = form(image["regions_of_test"]["boxes"])
    format_ = "hdf5" if write is World.hdf5 else "butd-tsv"
    refused("x1, y1|changed places", world, write(world), format_, on_error="skip")


def test_an_hdf5_file_that_is_written_elsewhere(world):
    source = world.hdf5()
    writer = "import h5py, sys, time; file = h5py.File(sys.argv[1], 'a'); print(flush=True); time.sleep(100)"
    with subprocess.Popen([sys.executable, "-c", writer, str(source)], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        try:
            refused("unable to lock|already open", world, source, "hdf5")
        finally:
            process.kill()


def test_an_hdf5_filter_that_is_not_installed(world, monkeypatch):
    monkeypatch.setattr(h5py.h5z, "filter_avail", lambda code: False)
    refused("'/regions/local' needs the HDF5 filter 1 .*not installed", world, world.hdf5(), "hdf5")
