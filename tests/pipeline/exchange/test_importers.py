"""Features that others extracted: every value of every format arrives, and stopping loses nothing."""

import hashlib
import json
from pathlib import Path

import h5py
import numpy as np
import pytest
from imported import assert_holds, bring, refused
from memory import peak_of
from region_sources import ARRAYS, CHANNELS, WRITERS, World
from small_extraction import files

from xret.pipeline.errors import CacheError
from xret.pipeline.exchange.importers.source import SourceError
from xret.pipeline.store import create
from xret.pipeline.store.inspect import describe, verify


@pytest.mark.parametrize("rows", ["image", "caption"])
@pytest.mark.parametrize("ids", ["image", "caption"])
def test_scan_in_every_row_rule(world, rows, ids):
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


def test_an_image_of_test_and_testall_has_the_same_features_in_both(tmp_path, world):
    source = world.scan()
    assert_holds(bring(world, source, "scan")[1], world.stored, size=False)
    np.save(source / "test_ims.npy", np.load(source / "test_ims.npy") + 1)
    refused("more than once, with different features", world, source, "scan", tmp_path / "s.zarr")


@pytest.mark.parametrize("root", ["data/world", "data/world/precomp"])
def test_the_tree_of_vse_infinity_names_files_by_its_mapping(world, root):
    for k, image in enumerate(world.images):
        image["own"] = f"number {k}"
    world.scan("data/world/precomp", key="own", rows="caption")
    names = {image["own"]: f"val2014/{image['filename']}" for image in world.images}
    (world.folder / "data/world/id_mapping.json").write_text(json.dumps(names))
    summary, cache = bring(world, world.folder / root, "scan")
    assert summary.matched_by == "file name"
    assert_holds(cache, world.stored, size=False)
    assert "id_mapping.json" in cache.image_set().identity["files"]


def test_butd_tsv_unordered_repeated_ragged_and_in_several_files(tmp_path, ragged):
    shuffled = [ragged.images[k] for k in np.random.default_rng(1).permutation(len(ragged.images))]
    changed = {**shuffled[0], "regions_of_test": {**shuffled[0]["regions_of_test"], "size": (1, 1)}}
    ragged.tsv("tsv/part.tsv.0", images=shuffled[:9])
    ragged.tsv("tsv/part.tsv.1", images=[*shuffled[9:], changed])  # the first row of an image counts
    summary, cache = bring(ragged, ragged.folder / "tsv", "butd-tsv")
    assert_holds(cache, ragged.stored, ["boxes"])
    assert summary.matched_by == "COCO id"
    lines = (ragged.folder / "tsv/part.tsv.0").read_bytes().replace(b"\n", b"\r\n\r\n")
    (ragged.folder / "tsv/part.tsv.0").write_bytes(lines)
    assert_holds(bring(ragged, ragged.folder / "tsv", "butd-tsv", tmp_path / "b")[1], ragged.stored, ["boxes"])


def test_lxmert_tsv_has_classes_scores_and_height_first(ragged):
    for image in ragged.images:
        image["stem"] = image["filename"].removesuffix(".jpg")
    summary, cache = bring(ragged, ragged.tsv(lxmert=True, key="stem"), "butd-tsv", dtype="float32")
    assert_holds(cache, ragged.stored, ["boxes", "classes", "scores"], dtype=np.float32)
    assert summary.matched_by == "file name without folder and suffix"


@pytest.mark.parametrize(
    ("ids", "matched_by", "roles"),
    [
        ("filename", "file name without folder and suffix", ARRAYS),
        ("imgid", "id", ARRAYS),
        ("imgid", "id", ("local", "id")),
    ],
)
def test_hdf5_by_names_of_arrays(tmp_path, ids, matched_by, roles):
    world = World(tmp_path / "w", ragged=len(roles) > 2)
    summary, cache = bring(world, world.hdf5(ids), "hdf5", arrays={role: ARRAYS[role] for role in roles})
    extras = [role for role in ("boxes", "classes", "scores") if role in roles]
    assert_holds(cache, world.stored, extras, size="size" in roles)
    assert summary.matched_by == matched_by


def test_arrays_named_by_their_roles_need_no_names(world):
    with h5py.File(world.hdf5(), "a") as file:
        for role in ARRAYS.keys() - {"size"}:
            file[role] = file[ARRAYS[role]]
    _, cache = bring(world, world.folder / "features.h5", "hdf5", arrays={})
    assert_holds(cache, world.stored, ["boxes", "classes", "scores"])


def test_rows_that_may_be_columns_are_noted(tmp_path, world, caplog):
    source = world.hdf5()
    with h5py.File(source, "a") as file:
        file["columns"] = file["regions/local"][...].transpose(0, 2, 1)
    bring(world, source, "hdf5", arrays={"local": "columns", "id": "name"})
    assert "16 rows of 4" in caplog.text
    caplog.clear()
    bring(world, source, "hdf5", tmp_path / "right.zarr")
    assert "transpose" not in caplog.text


def test_frames_are_another_set_than_the_same_rows_as_regions(tmp_path, ragged):
    arrays = {role: ARRAYS[role] for role in ("local", "id", "length")}
    source = ragged.hdf5()
    _, cache = bring(ragged, source, "hdf5", arrays=arrays)
    bring(ragged, source, "hdf5", arrays=arrays, kind="frames")
    assert len({*cache.set_names("images")}) == 2
    _, cache = bring(ragged, source, "hdf5", tmp_path / "frames.zarr", arrays=arrays, kind="frames")
    assert_holds(cache, ragged.stored, size=False, kind="frames")


@pytest.mark.parametrize("type_", ["f2", ">f2", ">f4", "f8", ">f8"])
def test_any_type_of_float_in_hdf5(world, type_):
    for image in world.images:
        local = image["regions_of_test"]["local"]
        image["regions_of_test"]["local"] = local.astype(np.float16).astype(np.float32)
    source = world.hdf5()
    with h5py.File(source, "a") as file:
        file["typed"] = file["regions/local"][...].astype(type_)
    _, cache = bring(world, source, "hdf5", arrays={**ARRAYS, "local": "typed"})
    assert_holds(cache, world.stored, ["boxes", "classes", "scores"])


@pytest.mark.parametrize(("features", "boxes"), [("<f4", "<f8"), ("<f8", "<f2"), ("<f2", "<f4")])
@pytest.mark.parametrize("values", ["normal", "halves", "rectified", "shares"])
def test_a_tsv_of_any_type_of_float(world, features, boxes, values):
    """Its type is told from lengths and values, also of numbers that use a part of their bits."""
    made = {
        "normal": lambda local: local,
        "halves": lambda local: local.astype(np.float16),
        "rectified": lambda local: np.maximum(local, 0),
        "shares": lambda local: np.exp(6 * local) / np.exp(6 * local).sum(axis=1, keepdims=True),
    }[values]
    for image in world.images:
        regions = image["regions_of_test"]
        regions["local"] = made(regions["local"]).astype(features).astype(np.float32)
        regions["boxes"] = regions["boxes"].astype(boxes).astype(np.float32)
    _, cache = bring(world, world.tsv(features=features, boxes=boxes), "butd-tsv", dtype="float32")
    assert_holds(cache, world.stored, ["boxes"], dtype=np.float32)


@pytest.mark.parametrize("format_", WRITERS)
def test_rows_of_zeros_that_fill_up_are_no_regions(tmp_path, format_):
    world, filled = World(tmp_path / "w", ragged=True), World(tmp_path / "f", ragged=True)
    for image in filled.images:
        regions = image["regions_of_test"]
        for name in ("local", "boxes", "classes", "scores"):
            values = regions[name]
            regions[name] = np.concatenate([values, np.zeros((5 - len(values), *values.shape[1:]), values.dtype)])
    roles = {role: name for role, name in ARRAYS.items() if role != "length"}
    source = WRITERS[format_](filled)
    summary, cache = bring(filled, source, format_, **{"arrays": roles} if format_ == "hdf5" else {})
    extras = [name for name in cache.image_set().array_names if name in ("boxes", "classes", "scores")]
    assert_holds(cache, world.stored, extras, size=format_ != "scan")
    assert "1 to 5 rows of 16" in summary.sets[0].read_as
    assert ("x1, y1, x2, y2" in summary.sets[0].read_as) == ("boxes" in extras)


def test_the_fingerprint_says_where_the_features_come_from(world):
    source = world.tsv()
    _, cache = bring(world, source, "butd-tsv")
    first = cache.image_set()
    assert first.name.startswith("butd-tsv@")
    assert first.identity["encoder"] == "butd-tsv"
    assert first.identity["files"] == {"butd.tsv": hashlib.sha256(source.read_bytes()).hexdigest()}
    before = files(cache.url)
    again, _ = bring(world, source, "butd-tsv")
    assert (again.sets[0].samples, again.sets[0].chunks_before) == (0, 1)
    assert files(cache.url) == before
    source.write_bytes(source.read_bytes() + b"\n")
    bring(world, source, "butd-tsv")
    assert len(cache.set_names("images")) == 2
    assert before.items() <= files(cache.url).items()
    facts = {one["name"]: one for one in describe(cache.url)["sets"]}[first.name]
    assert (facts["shape"], facts["kind"]) == ((4, CHANNELS), "roi")


def test_stopped_at_any_write_and_started_again_is_the_same(tmp_path, ragged, monkeypatch):
    monkeypatch.setattr(create, "CHUNK_BYTES", 1000)
    ragged.of("val")[2]["regions_of_test"]["local"][0] = np.nan
    source = ragged.tsv()
    _, whole = bring(ragged, source, "butd-tsv", on_error="skip")
    url, replace, stops, left = tmp_path / "stopped.zarr", Path.replace, 0, 0

    def stopping(partial, file):
        nonlocal left
        left -= file.name.startswith("c.") and "samples" not in file.parts
        if left < 0:
            raise KeyboardInterrupt
        return replace(partial, file)

    while True:
        left = 14 + stops  # a chunk takes six writes, and each start stops at another
        monkeypatch.setattr(Path, "replace", stopping)
        try:
            bring(ragged, source, "butd-tsv", url, on_error="skip")
            break
        except KeyboardInterrupt:
            stops += 1
        finally:
            monkeypatch.setattr(Path, "replace", replace)
        report = verify(str(url))
        assert report.ok, report
    assert stops > 2
    assert files(url) == files(whole.url)


def test_a_repaired_import_writes_what_is_damaged_or_failed(tmp_path, world, monkeypatch):
    monkeypatch.setattr(create, "CHUNK_BYTES", 1000)
    source = world.tsv()
    _, whole = bring(world, source, "butd-tsv", tmp_path / "whole.zarr")
    _, cache = bring(world, source, "butd-tsv")
    features, sound = cache.image_set(), files(whole.url)
    damaged = Path(cache.url) / features.path / "boxes/c.2.0.0"
    damaged.write_bytes(b"?" + damaged.read_bytes()[1:])
    (Path(cache.url) / features.path / "local/c.3.0.0").unlink()
    assert not verify(cache.url).ok
    summary, cache = bring(world, source, "butd-tsv", repair=True)
    assert summary.sets[0].chunks == 2
    assert verify(cache.url).ok
    assert files(cache.url) == sound


def test_splits_are_written_when_asked_for(world, capsys):
    _, cache = bring(world, world.scan(splits=("train", "dev", "testall")), "scan", splits=("val",))
    assert ": 6/6 images" in capsys.readouterr().err
    assert [cache.image_set().complete(split) for split in cache.splits] == [False, True, False]
    source = world.scan("half", splits=("train", "dev"))
    with pytest.raises(SourceError, match=r"half lacks 6 of 6 images of split 'test' .*; choose others with `splits`"):
        bring(world, source, "scan", on_error="skip")
    with pytest.raises(CacheError, match="has no image in split other; it has train, val, test"):
        bring(world, source, "scan", splits=("other",))
    summary, _ = bring(world, source, "scan", splits=("train", "val"))
    assert summary.sets[0].samples == 26


def bring_in_small_chunks(*source):
    create.CHUNK_BYTES = 1 << 19
    bring(*source)


@pytest.mark.parametrize("format_", WRITERS)
def test_memory_is_that_of_a_chunk_not_of_the_source(tmp_path, format_):
    world = World(tmp_path / "w", train=120, val=1, test=1)
    for image in world.images:
        image["regions_of_test"]["local"] = np.full((4, 8192), image["imgid"] + 1, dtype=np.float32)
    source = WRITERS[format_](world)
    small = World(tmp_path / "small")
    peak = peak_of(bring_in_small_chunks, (small, small.tsv(), "butd-tsv"), (world, source, format_))
    assert peak < 122 * 4 * 8192 * 4 / 2  # of the source's 16 MB
