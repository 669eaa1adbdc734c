"""Features that others extracted: every value of every format arrives, and stopping loses nothing."""

import hashlib
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from imported import Bomb, assert_holds, bring, refused
from memory import peak_of
from region_sources import ARRAYS, CHANNELS, World
from small_extraction import files

from xret.pipeline.errors import CacheError
from xret.pipeline.exchange.importers.source import SourceError
from xret.pipeline.store import create
from xret.pipeline.store.inspect import describe, verify
from xret.pipeline.store.sets import FeatureSet


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


def test_npz_files_without_ever_unpickling_their_info(tmp_path, ragged, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, cache = bring(ragged, ragged.npz(info=Bomb()), "detectron-npz")
    assert_holds(cache, ragged.stored, ["boxes"])
    assert not Path("exploded").exists()
    pickle.loads(pickle.dumps(Bomb()))
    assert Path("exploded").exists()  # it is a live one


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


@pytest.mark.parametrize("hdf5", [False, True])
def test_an_array_a_video_is_its_frames(tmp_path, ragged, hdf5):
    source = ragged.arrays(hdf5)
    assert_holds(bring(ragged, source, "arrays")[1], ragged.stored, size=False)
    summary, cache = bring(ragged, source, "arrays", kind="frames")
    assert len({*cache.set_names("images")}) == 2  # the same rows as regions are another set
    assert summary.matched_by == "file name without folder and suffix"
    _, cache = bring(ragged, source, "arrays", tmp_path / "frames.zarr", kind="frames")
    assert_holds(cache, ragged.stored, size=False, kind="frames")


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_features_in_float16_are_compared_with_all_bounds(ragged, dtype):
    source = ragged.arrays()
    for path in source.iterdir():
        np.save(path, np.load(path).astype(np.float16))
    _, cache = bring(ragged, source, "arrays", dtype=dtype)
    assert cache.image_set().dtype == dtype and verify(cache.url).ok


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
    source = ragged.npz()
    (source / "val2014" / ragged.of("val")[2]["filename"].replace("jpg", "npz")).write_bytes(b"cut off")
    _, whole = bring(ragged, source, "detectron-npz", on_error="skip")
    url, write, stops, left = tmp_path / "stopped.zarr", FeatureSet._write, 0, 0

    def stopping(*words):
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        write(*words)

    while True:
        left = 14 + stops  # a chunk takes six writes, and each start stops at another
        monkeypatch.setattr(FeatureSet, "_write", stopping)
        try:
            bring(ragged, source, "detectron-npz", url, on_error="skip")
            break
        except KeyboardInterrupt:
            stops += 1
        finally:
            monkeypatch.setattr(FeatureSet, "_write", write)
        report = verify(str(url))
        assert report.ok, report
    assert stops > 2
    assert files(url) == files(whole.url)


def test_a_repaired_import_writes_what_is_damaged_or_failed(tmp_path, world, monkeypatch):
    monkeypatch.setattr(create, "CHUNK_BYTES", 1000)
    source = world.npz()
    _, whole = bring(world, source, "detectron-npz", tmp_path / "whole.zarr")
    _, cache = bring(world, source, "detectron-npz")
    features, sound = cache.image_set(), files(whole.url)
    damaged = Path(cache.url) / features.path / "boxes/c.2.0.0"
    damaged.write_bytes(b"?" + damaged.read_bytes()[1:])
    (Path(cache.url) / features.path / "local/c.3.0.0").unlink()
    assert not verify(cache.url).ok
    summary, cache = bring(world, source, "detectron-npz", repair=True)
    assert summary.sets[0].chunks == 2
    assert verify(cache.url).ok
    assert files(cache.url) == sound


def test_splits_are_written_when_asked_for(world, capsys):
    _, cache = bring(world, world.scan(splits=("train", "dev", "testall")), "scan", splits=("val",))
    assert ": 6/6 images" in capsys.readouterr().err
    assert [cache.image_set().complete(split) for split in cache.splits] == [False, True, False]
    source = world.scan("half", splits=("train", "dev"))
    with pytest.raises(SourceError, match=r"half lacks 6 of 6 images of split 'test' .*; choose others with --splits"):
        bring(world, source, "scan", on_error="skip")
    with pytest.raises(CacheError, match="has no image in split other; it has train, val, test"):
        bring(world, source, "scan", splits=("other",))
    summary, _ = bring(world, source, "scan", splits=("train", "val"))
    assert summary.sets[0].samples == 26


def bring_in_small_chunks(*source):
    create.CHUNK_BYTES = 1 << 19
    bring(*source)


@pytest.mark.parametrize("format_", ["butd-tsv", "scan", "hdf5"])
def test_memory_is_that_of_a_chunk_not_of_the_source(tmp_path, format_):
    world = World(tmp_path / "w", train=120, val=1, test=1)
    for image in world.images:
        image["regions_of_test"]["local"] = np.full((4, 8192), image["imgid"] + 1, dtype=np.float32)
    source = {"butd-tsv": world.tsv, "scan": world.scan, "hdf5": world.hdf5}[format_]()
    small = World(tmp_path / "small")
    peak = peak_of(bring_in_small_chunks, (small, small.tsv(), "butd-tsv"), (world, source, format_))
    assert peak < 122 * 4 * 8192 * 4 / 2  # of the source's 16 MB
