"""Stores filled in several places become one, equal to the last byte to a store filled in one place."""

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import small_store
from changing_data import OPTIONS, pictures, use, write
from packed_data import PackedData
from parts import part_of, sound_store
from small_checkpoints import save_image_model
from small_extraction import SMALL, files
from small_store import seal_anew

from xret.pipeline.cache import Blocks, FeatureCache, layout
from xret.pipeline.cache.facts import SetFacts
from xret.pipeline.cache.layout import alone
from xret.pipeline.cache.records import record_failures
from xret.pipeline.cache.storage.store import Store
from xret.pipeline.cache.upkeep.merge import merge
from xret.pipeline.cache.upkeep.verify import verify
from xret.pipeline.data.manifest import load_manifest
from xret.pipeline.errors import CacheError
from xret.pipeline.extraction.extraction import extract
from xret.pipeline.extraction.options import Options

SIZES = {"train": 12, "val": 9, "test": 3}  # shards 0 and 1, 2 and 3, and 4


def test_splits_extracted_apart_become_the_store_extracted_at_once(tiny_dataset, tmp_path):
    path = tiny_dataset(train=9, val=3, test=3)
    for broken in ("4.jpg", "10.jpg"):  # one of train, one of val
        (path.parent / "images" / broken).write_bytes(b"no picture")
    manifest, options = load_manifest(path), replace(SMALL, on_error="skip")
    a, b, c, d = (str(tmp_path / name) for name in "abcd")
    extract(manifest, a, replace(options, splits=("train",)))
    extract(manifest, b, replace(options, splits=("val", "test")))
    extract(manifest, d, options)
    summary = merge(c, [a, b])
    assert files(c) == files(d)
    assert [(s.modality, s.shards, s.shards_before, s.shards_in_all, s.failed) for s in summary.sets] == [
        ("images", 4, 0, 4, 2),
        ("captions", 4, 0, 4, 0),
    ]
    merge(a, [b])
    assert files(a) == files(d)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    failed = {3: "3.jpg: empty", 15: "15.jpg: empty"}
    part_of(folder / "a", "train", failed=failed, **SIZES)
    part_of(folder / "b", "val", "test", failed=failed, **SIZES)
    sound_store(folder / "whole", failed=failed, **SIZES)
    return folder


@pytest.fixture
def apart(made, tmp_path):
    """Return the URLs of train, of val and test, and of all."""
    return [shutil.copytree(made / name, str(tmp_path / name)) for name in ("a", "b", "whole")]


def test_any_order_and_any_number_of_times(apart, tmp_path):
    a, b, whole = apart
    assert verify(a).ok
    before = files(a), files(b)
    c = str(tmp_path / "c")
    merge(c, [b, a, whole])
    assert files(c) == files(whole)
    assert [s.shards for s in merge(c, [a, b]).sets] == [0, 0]
    assert files(c) == files(whole)
    assert (files(a), files(b)) == before


def test_progress_is_told(apart, tmp_path, capsys):
    merge(str(tmp_path / "c"), apart[:2])
    assert "merge: 10/10 shards" in capsys.readouterr().err


def test_stopped_at_any_write_it_goes_on(apart, tmp_path, monkeypatch):
    a, b, whole = apart
    write, left = Store.write_bytes, [0]

    def stopping(store, name, data):
        if left[0] == 0:
            raise KeyboardInterrupt
        left[0] -= 1
        write(store, name, data)

    rounds, finished = 0, False
    while not finished:
        c = str(tmp_path / f"c{rounds}")
        monkeypatch.setattr(Store, "write_bytes", stopping)
        left[0] = 9 * rounds
        try:
            merge(c, [a, b])
            finished = True
        except KeyboardInterrupt:
            monkeypatch.undo()
            if (Path(c) / "zarr.json").exists() and not Store(c).is_unfinished(""):
                assert verify(c).damaged == ()
            merge(c, [a, b])
        assert files(c) == files(whole), f"stopped at write {9 * rounds}"
        shutil.rmtree(c)
        rounds += 1
    assert rounds > 6


def test_killed_in_mid_write_it_goes_on(apart, tmp_path):
    a, b, whole = apart
    c = str(tmp_path / "c")
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from xret.pipeline.cache.upkeep.merge import merge\n"
        "replace, left = Path.replace, [40]\n"
        "def killing(path, to):\n"
        "    left[0] -= 1\n"
        "    if left[0] == 0: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return replace(path, to)\n"
        "Path.replace = killing\n"
        "merge(sys.argv[1], sys.argv[2:])\n"
    )
    killed = subprocess.run([sys.executable, "-c", code, c, a, b], capture_output=True, env=os.environ)
    assert killed.returncode == -signal.SIGKILL
    assert [name for name in files(c) if name.endswith(".partial")]
    assert verify(c).damaged == ()
    merge(c, [a, b])
    assert files(c) == files(whole)


def test_sets_of_other_encoders_stand_side_by_side(tmp_path):
    a = sound_store(tmp_path / "a", weights="a", **SIZES)
    b = sound_store(tmp_path / "b", weights="b", **SIZES)
    merge(a, [b])
    assert len(FeatureCache.open(a).set_names("images")) == 2
    assert len(FeatureCache.open(a).set_names("captions")) == 1
    assert verify(a).ok


def test_an_object_store(apart, tmp_path):
    a, b, whole = apart
    url = "memory://merged.zarr"
    try:
        merge(url, [a])
        merge(url, [b])
        assert verify(url).ok
        merge(str(tmp_path / "back"), [url])
        assert files(tmp_path / "back") == files(whole)
    finally:
        Store(url).remove("")


def test_machines_that_differ_are_noted_and_the_first_is_recorded(apart, tmp_path, capsys):
    a, b, _ = apart
    features = FeatureCache.open(b).image_set()
    attributes = {**features.attributes, "recorded": {"device": "cuda"}}
    features.cache.store.seal_group(features.path, attributes, list(features.attributes["arrays"]))
    merge(str(tmp_path / "c"), [a, b])
    note = f"Note: unlike {b}, '{features.name}' was begun with device None (there cuda).\n"
    assert capsys.readouterr().err.count(note) == 1
    assert FeatureCache.open(str(tmp_path / "c")).image_set().attributes["recorded"] == {}


def test_a_failure_that_was_recorded_and_never_finished_is_forgotten(apart):
    a, b, whole = apart
    record_failures(FeatureCache.open(a).image_set(), [], {"13": "13.jpg: busy", "15": "15.jpg: busy"})
    merge(a, [b])
    assert verify(a).failed_samples == verify(whole).failed_samples


# Refusals: nothing is written


def refused(into, sources, *, there=True):
    before = files(into) if there else None
    with pytest.raises(CacheError) as error:
        merge(str(into), [str(source) for source in sources])
    assert files(into) == before if there else not Path(into).exists()
    return str(error.value)


def test_a_shard_that_differs_is_named(apart, tmp_path):
    a, b, whole = apart
    features = FeatureCache.open(b).image_set()
    features.cache.store.open_array(f"{features.path}/global", writable=True)[16] = 1  # first of val
    seal_anew(features)
    assert f"shard 2 of '{features.path}' is finished in {whole} and in {b}, but global/c/2/0" in refused(whole, [b])
    assert "global/c/2/0 differs" in refused(tmp_path / "new", [whole, b], there=False)
    merge(a, [b])  # nobody else had it


def test_a_failed_image_in_one_store_is_a_difference(apart):
    _, b, whole = apart
    features = FeatureCache.open(b).image_set()
    features.cache.store.open_array(f"{features.path}/status", writable=True)[16] = 1
    seal_anew(features)
    record_failures(features, [], {"12": "12.jpg: gone"})
    assert "status/c/2 differs" in refused(whole, [b])


def test_shards_of_another_length(tmp_path, monkeypatch):
    a = part_of(tmp_path / "a", "train", **SIZES)
    monkeypatch.setattr(small_store, "Blocks", lambda length, splits: Blocks(2 * length, splits))
    b = part_of(tmp_path / "b", "val", **SIZES)
    sentence = refused(a, [b])
    assert f"has shards of 8 and of 16 images in {a} and {b}; extract" in sentence
    assert "with the other's --shard-images" in sentence
    assert "--shard-images" in refused(tmp_path / "new", [a, b], there=False)


def test_halves_of_different_encoders(tmp_path):
    a = part_of(tmp_path / "a", "train", weights="a", **SIZES)
    b = part_of(tmp_path / "b", "val", "test", weights="b", **SIZES)
    sentence = refused(a, [b])
    assert "hold different splits" in sentence
    assert "they differ in weights; make" in sentence
    assert "they differ in weights" in refused(tmp_path / "new", [a, b], there=False)


def test_halves_of_one_encoder_under_two_names(tiny_dataset, tmp_path, monkeypatch):
    manifest, urls = load_manifest(tiny_dataset(train=3, val=3, test=0)), []
    one = save_image_model(tmp_path / "one", "dinov2")
    for folder, split in ((one, "train"), (shutil.copytree(one, tmp_path / "two"), "val")):
        urls.append(str(tmp_path / f"{split}.zarr"))
        extract(manifest, urls[-1], Options(visual=f"hf:{folder}", text=None, splits=(split,), device="cpu"))
    assert "are the same features under two names in" in refused(tmp_path / "new", urls, there=False)
    both = shutil.copytree(urls[0], tmp_path / "both.zarr")
    add = Options(visual=f"hf:{tmp_path / 'two'}", text=None, splits=("val",), device="cpu")
    with monkeypatch.context() as patched:  # as an earlier version merged
        patched.setattr(SetFacts, "named_as", lambda facts, _: facts)
        extract(manifest, str(both), add)
    assert len(FeatureCache.open(str(both)).set_names("images")) == 2
    for _ in range(2):  # the second time as after a stop
        merge(str(tmp_path / "merged"), [str(both)])
    assert FeatureCache.open(str(tmp_path / "merged")).set_paths() == FeatureCache.open(str(both)).set_paths()


def test_one_name_but_another_set(apart):
    a, b, _ = apart
    features = FeatureCache.open(b).image_set()
    attributes = {**features.attributes, "fingerprint": features.fingerprint[:8] + "0" * 56}
    features.cache.store.seal_group(features.path, attributes, list(features.attributes["arrays"]))
    assert f"'{features.path}' is not the same set in {a} and {b}: they differ in fingerprint" in refused(a, [b])


def test_arrays_that_are_laid_out_otherwise(apart):
    a, b, _ = apart
    features = FeatureCache.open(b).image_set()
    store, path = features.cache.store, features.path
    store.create_array(f"{path}/global", (40, 16), 8, "float32")
    store.seal_group(path, features.attributes, list(features.attributes["arrays"]))
    assert "they differ in arrays" in refused(a, [b])


def test_other_samples(apart, tmp_path):
    a, b, _ = apart
    other = sound_store(tmp_path / "other", train=12, val=9, test=4)
    assert f"{a} holds other samples than {other}" in refused(tmp_path / "new", [other, a], there=False)
    assert f"{other} holds other samples than {b}" in refused(other, [b])


def test_stores_that_are_none(apart, tmp_path):
    a, b, _ = apart
    assert "no feature cache is there" in refused(a, [tmp_path / "none"])
    assert "no feature cache is there" in refused(tmp_path / "new", [b, tmp_path / "none"], there=False)
    assert "nothing to merge" in refused(a, [])
    assert f"{a} is the store to merge into" in refused(a, [b, a])
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes.txt").write_text("mine")
    assert "is not empty and holds no feature cache" in refused(tmp_path / "folder", [b])


def test_another_writer(apart):
    a, b, _ = apart
    with alone(Store(a)):
        assert "another process is writing" in refused(a, [b])


@pytest.mark.parametrize("damage", ["flip", "missing"])
def test_a_damaged_source_is_named_and_what_is_whole_stays(apart, tmp_path, damage):
    a, b, whole = apart
    path = Path(b) / FeatureCache.open(b).image_set().path / "local/c/3/0/0"  # the second shard of val
    data = path.read_bytes()
    path.unlink()
    if damage == "flip":
        path.write_bytes(data[:9] + bytes([data[9] ^ 16]) + data[10:])
    c = str(tmp_path / "c")
    with pytest.raises(CacheError, match=f"{b}: shard 3 of '.*/local' is damaged; repair that store and merge again"):
        merge(c, [a, b])
    report = verify(c)
    assert report.ok
    assert report.shards == 2 + 2 + 1  # train of images and captions, and the first shard of val
    path.write_bytes(data)
    merge(c, [a, b])
    assert files(c) == files(whole)


def test_a_half_of_an_earlier_version_is_named(tmp_path, monkeypatch):
    use(monkeypatch)
    manifest, options = write(tmp_path / "data", pictures(4, 2, 0)), replace(OPTIONS, text=None)
    create = layout.create_image_set
    older, newer = str(tmp_path / "a.zarr"), str(tmp_path / "b.zarr")
    extract(manifest, newer, replace(options, splits=("val",)))
    with monkeypatch.context() as earlier:
        earlier.setattr(layout, "create_image_set", lambda *arguments: create(*arguments[:6]))
        extract(manifest, older, replace(options, splits=("train",)))
    for sources in ([older, newer], [newer, older]):
        with pytest.raises(
            CacheError, match=f"an earlier version made 'images/small@.* in {older}, .* extract that part"
        ):
            merge(str(tmp_path / "c.zarr"), sources)
    assert not (tmp_path / "c.zarr").exists()


def test_parts_of_a_tar_before_and_after_its_change(tmp_path, monkeypatch):
    use(monkeypatch)
    data, options = PackedData(tmp_path / "data"), replace(OPTIONS, text=None)
    a, b, c = (str(tmp_path / name) for name in ("a.zarr", "b.zarr", "c.zarr"))
    extract(load_manifest(data.as_tars()), a, replace(options, splits=("train",)))
    data.rows[1] = (data.rows[1][0], data.rows[4][1], *data.rows[1][2:])
    extract(load_manifest(data.as_tars()), b, replace(options, splits=("val", "test")))
    with pytest.raises(
        CacheError, match=r"do not lie in the files of .*tar.*: they have changed, or were copied without"
    ):
        merge(c, [a, b])
    assert not Path(c).exists()
