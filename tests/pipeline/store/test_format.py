"""The format of a store: any reader of Zarr opens it, its rows are its arrays', and no damage goes unseen."""

import fcntl
import json
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from small_store import make_store, new_store

from xret.pipeline.errors import CacheError, OutputError
from xret.pipeline.store import FAILED, CaptionSet, FeatureCache
from xret.pipeline.store.create import SetFacts, image_set
from xret.pipeline.store.folder import NewArray, write_group
from xret.pipeline.store.inspect import describe, remove_set, stores_at, verify
from xret.pipeline.store.regions import REGION_ARRAYS
from xret.pipeline.store.rows import StoredArray
from xret.pipeline.store.store import open_for_writing


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("store") / "s.zarr", text="tokens", broken=(3, 50), views=2)


@pytest.fixture
def own(tmp_path):
    """A store that a test may change."""
    return make_store(tmp_path / "s.zarr", text=("tokens", "words"), broken=(3,))


def test_any_reader_of_zarr_has_the_rows(url):
    cache, group = FeatureCache.open(url), zarr.open_group(url, mode="r")
    images, captions = cache.image_set(), cache.caption_set()
    local = group[images.path]["local"][:]
    assert np.array_equal(images.array_of("local")[:], local)
    rows = np.array([5, 0, 71, 5])
    for name in images.array_names:
        assert np.array_equal(images.array(name, rows), group[images.path][name][:][rows], equal_nan=True)
    assert np.array_equal(images.local(rows), local[rows, 0])
    for view in (0, 1):
        assert np.array_equal(images.local(rows, view), local[rows, view])
    assert np.array_equal(images.local(rows, np.array([0, 1, 0, 1])), local[rows, [0, 1, 0, 1]])
    starts, lengths = (group[captions.path][name][:] for name in ("start", "length"))
    expected = [group[captions.path]["local"][starts[row] : starts[row] + lengths[row]] for row in rows]
    assert np.array_equal(captions.local(rows), np.concatenate(expected))
    assert (lengths > 0).all()


@pytest.mark.parametrize("split", ["train", "test"])
def test_ragged_rows_are_those_of_each_sample(own, url, split):
    for place, names in ((own, ("images/grid", "words", "states")), (url, ("grid",))):
        cache, group = FeatureCache.open(place), zarr.open_group(place, mode="r")
        for name in names:
            rows, offsets = cache.ragged(name, split)
            (path,) = [path for path in cache.set_paths() if cache.fits(path, name)]
            arrays, within = group[path], cache.set_at(path).rows_of(split)
            assert (offsets[0], offsets[-1], len(offsets)) == (0, len(rows), within.stop - within.start + 1)
            for number, sample in enumerate(range(within.start, within.stop)):
                length = arrays["length"][sample]
                if name == "grid":  # of two views
                    expected = arrays["local"][sample, 0, :length]
                elif name == "images/grid":
                    expected = arrays["local"][sample, :length]
                else:
                    first = arrays["start"][sample]
                    expected = arrays["token" if name == "words" else "local"][first : first + length]
                found = rows[offsets[number] : offsets[number + 1]]
                assert np.array_equal(found, expected, equal_nan=found.dtype.kind == "f")


def test_ragged_rows_that_are_not_there_are_refused(tmp_path):
    cache = FeatureCache.open(make_store(tmp_path / "s.zarr", splits=("train",)))
    for name, split, message in (
        ("words", "dev", "no split 'dev'"),
        ("words", "test", "is not done"),
        ("bert", "train", "no feature set"),
    ):
        with pytest.raises(CacheError, match=message):
            cache.ragged(name, split)


def test_zarr_wonders_at_no_file_of_a_store(own):
    with open_for_writing(own, _samples(own), ()):
        pass
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert {name for name, _ in zarr.open_group(own, mode="r").members()} == {"samples", "images", "captions"}


def test_a_lock_whose_file_its_last_owner_removed_is_none(own, monkeypatch):
    """The second writer has opened the file while the first removes it; a third one must still be refused."""
    flock = fcntl.flock

    def late(handle, how):
        monkeypatch.setattr(fcntl, "flock", flock)
        Path(own, ".lock").unlink()
        flock(handle, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with (
        open_for_writing(own, _samples(own), ()),
        pytest.raises(CacheError, match="another process is writing"),
        open_for_writing(own, _samples(own), ()),
    ):
        pass


def test_chunks_are_the_bytes_that_zarr_writes(url, own):
    for place in (url, own):
        cache, group, written = FeatureCache.open(place), zarr.open_group(place, mode="r+"), 0
        for path in [*cache.set_paths("images"), *cache.set_paths("captions")]:
            for name, values in group[path].arrays():
                files = {file: file.read_bytes() for file in Path(place, path, name).glob("c.*")}
                array = values.with_config({"write_empty_chunks": True})
                array[:] = array[:]
                assert all(file.read_bytes() == data for file, data in files.items())
                written += len(files)
        assert written > 100


def test_xarray_opens_every_group_by_the_names_of_its_dimensions(url):
    xarray = pytest.importorskip("xarray", reason="xarray is not installed")
    cache = FeatureCache.open(url)
    images = xarray.open_zarr(url, group=cache.image_set().path, consolidated=False)
    assert dict(images.sizes) == {"image": 72, "view": 2, "row": 4, "channel": 16, "global_channel": 16, "side": 2}
    assert images["local"].dims == ("image", "view", "row", "channel")
    captions = xarray.open_zarr(url, group=cache.caption_set().path, consolidated=False)
    assert captions["local"].dims == ("token", "channel")
    assert xarray.open_zarr(url, group="samples", consolidated=False)["sentid"].dims == ("caption",)


WIDTHS = {"size": 2, "digest": 16, "stamp": 2, "boxes": 4}  # of a sample, or of a region
TYPES = {  # and what stands where nothing is written
    "local": ("float16", np.nan), "global": ("float16", np.nan), "length": ("int32", -1), "status": ("uint8", 255),
    "size": ("int32", -1), "digest": ("uint8", 0), "stamp": ("int64", 0),
    "boxes": ("float32", np.nan), "classes": ("int32", -1), "scores": ("float32", np.nan),
    "token": ("int32", 0), "start": ("int64", -1),
}  # fmt: skip


def test_arrays_are_those_of_stores_of_earlier_versions(tmp_path):
    cache = FeatureCache.open(make_store(tmp_path / "s.zarr", image=("grid", "roi"), text="tokens"))
    image_set(cache, SetFacts("all", "roi", {}, "float16", 4, 4, arrays=(*REGION_ARRAYS, "size", "digest", "stamp")))
    assert zarr.open_group(cache.url).attrs["version"] == 2
    seen = set()
    for modality in ("images", "captions"):
        for _, group in zarr.open_group(cache.url)[modality].groups():
            for name, array in group.arrays():
                seen.add(name)
                kind, fill = TYPES[name]
                assert array.dtype == kind and np.array_equal(array.fill_value, fill, equal_nan=True), name
                assert name not in WIDTHS or array.shape[-1] == WIDTHS[name]
    assert seen == {*TYPES}


@pytest.fixture(scope="module")
def writable(tmp_path_factory):
    url = make_store(tmp_path_factory.mktemp("rows") / "s.zarr", train=4, val=0, test=0)
    return FeatureCache.open(url)


@settings(max_examples=60)
@given(
    chunk=st.integers(1, 7),
    views=st.integers(1, 3),
    ranges=st.lists(st.tuples(st.integers(0, 19), st.integers(0, 6)), max_size=8),
)
def test_gathered_ranges_are_those_of_numpy(writable, chunk, views, ranges):
    values = np.random.default_rng(0).normal(size=(20, *([views] if views > 1 else []), 3)).astype(np.float16)
    features = _created(writable, values, chunk)
    rows = StoredArray(writable.folder, writable.array(f"{features.path}/local"), views)
    flat = values.reshape(20 * views, 3)
    first = np.array([a for a, _ in ranges], dtype=np.int64)
    count = np.array([min(n, len(flat) - a) for a, n in ranges], dtype=np.int64)
    expected = [flat[a : a + n] for a, n in zip(first, count, strict=True)]
    assert np.array_equal(rows.gather(first, count), np.concatenate([flat[:0], *expected]))
    with pytest.raises(CacheError, match="no such rows"):
        rows.gather(np.array([len(flat)]), 1)


def test_memory_is_used_again_when_nothing_refers_to_it(writable, monkeypatch):
    monkeypatch.setattr("xret.pipeline.store.rows.StoredArray.reused", range(1, 1 << 20))
    values = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float16)
    features = _created(writable, values, 7)
    rows, orders = features.stored("local"), np.random.default_rng(1)
    held, places = [], set()
    for number in range(60):
        order = orders.permutation(20)[: orders.integers(1, 21)]
        read = rows.gather(order)
        places.add(read.ctypes.data)
        view = (read, read[1:], torch.from_numpy(read)[:, :2].numpy(), read.view(np.uint16))[number % 4]
        held = [*held[-2:], (view, view.copy())]
        assert all(np.array_equal(kept, copy) for kept, copy in held)
        assert np.array_equal(read, values[order])
        del read, view
    assert len(places) < 12


def _created(cache, values, chunk):
    """Return a set of a store in which `local` has these values, so many rows in a chunk; it is made once."""
    path = f"images/{'x'.join(map(str, values.shape))}-{chunk}"
    if path in cache.set_paths("images"):
        return cache.set_at(path)
    arrays = {
        "local": NewArray(tuple("abcd"[: values.ndim]), values.shape, chunk, "float16", np.nan, [values]),
        "status": NewArray(("image",), (len(values),), chunk, "uint8", 255),
    }
    facts = {"kind": "grid", "fingerprint": "f", "identity": {}, "dtype": "float16", "rows": 1}
    facts |= {"channels": 3, "global_channels": 3, "arrays": [*arrays]}
    write_group(cache.folder, path, facts, arrays)
    return cache.set_at(path)


def test_a_flipped_bit_in_any_file_is_found(tmp_path):
    own = make_store(tmp_path / "s.zarr", train=8, val=4, test=4, text=("tokens", "words"), broken=(3,))
    files = sorted(p for p in Path(own).rglob("*") if p.is_file() and p.name != ".lock")
    rng = np.random.default_rng(0)
    assert verify(own).ok
    missed = []
    for _ in range(100):
        file = files[rng.integers(len(files))]
        raw = file.read_bytes()
        at = int(rng.integers(len(raw)))
        file.write_bytes(raw[:at] + bytes([raw[at] ^ (1 << int(rng.integers(8)))]) + raw[at + 1 :])
        try:
            if verify(own).ok:
                missed.append((file, at))
        except CacheError:  # a store whose own metadata is damaged is none
            pass
        file.write_bytes(raw)
    assert not missed


@pytest.mark.parametrize("damage", ["missing", "cut", "empty", "changed"])
@pytest.mark.parametrize("array", ["local", "global"])
def test_a_chunk_that_is_lost_or_damaged_is_never_read_as_numbers(own, array, damage):
    images = FeatureCache.open(own).image_set()
    (file,) = Path(own).glob(f"{images.path}/{array}/c.1.*")
    raw = file.read_bytes()
    match damage:
        case "missing":
            file.unlink()
        case "cut":
            file.write_bytes(raw[:-5])
        case "empty":
            file.write_bytes(b"")
        case "changed":
            file.write_bytes(b"\1" + raw[1:])
    read = images.local if array == "local" else images.global_
    assert len(read(np.arange(8))) == 8
    with pytest.raises(CacheError, match="missing" if damage == "missing" else "damaged"):
        read(np.array([9]))
    (found,) = verify(own).damaged
    assert (found.array, found.chunk, found.samples) == (f"{images.path}/{array}", 1, (8, 16))


@pytest.mark.parametrize("array", ["length", "start"])
def test_numbers_of_a_lost_chunk_are_not_made_up(own, array):
    captions = FeatureCache.open(own).caption_set("states")
    (Path(own) / captions.path / array / "c.0").unlink()
    with pytest.raises(CacheError, match=f"{array}/c.0 is missing"):
        captions.local(np.array([0]))


def test_a_full_table_of_file_descriptors_is_not_called_damage(own):
    program = f"""
import os, resource, numpy as np
from xret import FeatureCache
import torch
images = FeatureCache.open({own!r}).image_set()
images.status, images.length
rows = images.stored("local")
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
held = []
while True:
    try: held.append(os.open("/dev/null", os.O_RDONLY))
    except OSError: break
try: images.local(np.arange(72))
except Exception as error: print(type(error).__name__, error)
for handle in held: os.close(handle)
print(images.local(np.arange(72)).shape)
"""
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert "Too many open files" in said
    assert "damaged" not in said and "missing" not in said
    assert "(72, 4, 16)" in said


def test_maps_hold_no_file_descriptors(own):
    images, folder = FeatureCache.open(own).image_set(), Path("/proc/self/fd")
    before = len(list(folder.iterdir()))
    images.local(np.arange(72))
    assert len(list(folder.iterdir())) <= before  # what others held may be gone


def _samples(url):
    """Return samples that `open_for_writing` takes for those of a store."""
    from xret.pipeline.data.image_columns import Images
    from xret.pipeline.data.samples import Samples

    cache = FeatureCache.open(url)
    return Samples(cache.dataset, Images.of([]), cache.splits, cache.manifest_sha256)


def test_pictures_without_captions_make_a_store(tmp_path):
    from xret.pipeline.data.image_columns import Images, ImageSample
    from xret.pipeline.data.samples import Samples

    samples = Samples("silent", Images.of([ImageSample("0", "0.jpg", "train", -1, ())]), {"train": (0, 1)}, "x")
    with open_for_writing(str(tmp_path / "s.zarr"), samples, ()):
        pass
    cache = FeatureCache.open(str(tmp_path / "s.zarr"))
    assert (cache.images, cache.captions, cache.ids(0, 1)) == (1, 0, ["0"])


def test_one_writes_at_a_time(own):
    with open_for_writing(own, _samples(own), ()):
        with pytest.raises(CacheError, match="another process is writing"), open_for_writing(own, _samples(own), ()):
            pass
        with pytest.raises(CacheError, match="another process is writing"):
            remove_set(own, FeatureCache.open(own).image_set().path)
    with open_for_writing(own, _samples(own), ()):  # it is free again
        pass


def test_other_samples_or_something_else_are_refused(own, tmp_path):
    from dataclasses import replace

    with (
        pytest.raises(CacheError, match=r"holds other samples .* `reuse`"),
        open_for_writing(own, replace(_samples(own), digest="0" * 64), ()),
    ):
        pass
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    with pytest.raises(CacheError, match="not empty"), open_for_writing(tmp_path / "full", _samples(own), ()):
        pass
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OutputError, match="is a file"), open_for_writing(tmp_path / "file", _samples(own), ()):
        pass


def test_a_store_or_set_whose_creation_was_stopped_is_begun_again(own):
    root = Path(own) / "zarr.json"
    whole = root.read_text()
    root.write_text(json.dumps({**json.loads(whole), "attributes": {}}))
    with pytest.raises(CacheError, match="unfinished"):
        FeatureCache.open(own)
    root.write_text(whole)
    group = Path(own) / FeatureCache.open(own).image_set().path / "zarr.json"
    group.write_text(json.dumps({**json.loads(group.read_text()), "attributes": {}}, indent=2))
    cache = FeatureCache.open(own)
    assert cache.set_names("images") == []
    assert verify(own).ok


def test_what_is_done_is_known_row_by_row(tmp_path):
    cache = FeatureCache.open(make_store(tmp_path / "s.zarr", train=10, val=10, test=4, splits=("val",)))
    images = cache.image_set()
    assert [images.complete(split) for split in cache.splits] == [False, True, False]
    assert images.missing(["train"]) == [0, 1]  # chunk 1 has rows of train and of val
    assert images.missing(["val"]) == []
    described = next(one for one in describe(cache.url)["sets"] if one["name"] == images.name)
    assert described["done"] == {"train": (0, 2), "val": (2, 2), "test": (0, 1)}
    assert described["percent"] == 100 * 10 / 24
    assert describe(make_store(tmp_path / "one.zarr", train=1, val=0, test=0))["sets"][0]["percent"] == 100
    begun = images.read_chunk(1)
    assert (begun["status"] == [255, 255, 0, 0, 0, 0, 0, 0]).all()
    assert np.array_equal(begun["local"][2:], images.local(np.arange(10, 16)))


@pytest.mark.parametrize(
    "name", ["id", "file_name", "caption", "caption_offset", "caption_count", "cocoid", "sentid", "text_hash"]
)
def test_samples_of_which_a_file_is_lost_are_not_read(own, name):
    (Path(own) / "samples" / name / "c.0").unlink()
    with pytest.raises(CacheError, match=f"samples/{name}/c.0 is missing; copy the store again"):
        FeatureCache.open(own).sample_array(name)


@pytest.mark.parametrize("how", ["lost", "damaged"])
def test_a_begun_chunk_that_is_damaged_is_not_completed(tmp_path, how):
    cache = FeatureCache.open(make_store(tmp_path / "s.zarr", train=10, val=10, test=4, splits=("val",)))
    images = cache.image_set()
    file = tmp_path / "s.zarr" / images.path / "size" / "c.1.0"
    file.unlink() if how == "lost" else file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(CacheError, match=rf"{file} is (missing|damaged); .* `repair`"):
        images.read_chunk(1)


def test_lengths_that_are_lost_are_not_taken_for_one(own):
    images = FeatureCache.open(own).image_set()
    (Path(own) / images.path / "length" / "zarr.json").unlink()
    with pytest.raises(CacheError, match="length is missing or damaged"):
        _ = images.reopened().length


def test_a_set_with_a_row_is_in_the_choice(tmp_path):
    url = make_store(tmp_path / "s.zarr", train=10, val=3, test=0, image=("grid", "roi"), splits=("val",))
    whole = FeatureCache.open(url).image_set("grid")
    for chunk in range(whole.chunks):
        arrays = whole.read_chunk(chunk)
        arrays["status"][:] = 0
        whole.write(chunk, arrays)
    with pytest.raises(CacheError, match="several feature sets fit 'auto'"):
        FeatureCache.open(url).image_set()


def test_failures_have_their_reasons_and_are_forgotten_with_their_chunk(own):
    cache = FeatureCache.open(own)
    images = cache.image_set()
    assert images.failures == [("3", "it is broken")]
    images.forget(0)
    images = images.reopened()
    assert images.failures == [] and images.missing(["train"]) == [0]


def test_recorded_failures_do_not_slow_later_writes(own):
    images = FeatureCache.open(own).image_set()
    for chunk in range(4):
        arrays = images.read_chunk(chunk) | {"status": np.full(8, FAILED, np.uint8)}
        images.write(chunk, arrays, {8 * chunk + row: "x" * 100 for row in range(8)})
    written = [file.stat().st_size for file in Path(own, images.path, "status").glob("failed.*.jsonl")]
    assert len(written) == 4
    assert max(written) < 1.2 * min(written)  # each chunk writes its own reasons alone


def test_a_store_is_described(own):
    found = describe(own)
    assert (found["dataset"], found["images"]) == ("small", 72)
    assert found["splits"] == {"train": 48, "val": 12, "test": 12}
    images, tokens, words = found["sets"]
    facts = {"shape": (4, 16), "dtype": "float16", "failed": 1, "percent": 100.0}
    assert {key: images[key] for key in facts} == facts
    assert (tokens["shape"], words["shape"]) == ((12,), ())
    assert images["done"] == {"train": (6, 6), "val": (2, 2), "test": (2, 2)}
    assert found["bytes"] == sum(p.stat().st_size for p in Path(own).rglob("*") if p.is_file())


def test_stores_are_found_and_sets_removed(own, monkeypatch):
    folder = str(Path(own).parent)
    assert stores_at(own) == [own] and stores_at(folder) == [own]
    with pytest.raises(CacheError, match="neither a feature store nor a folder"):
        stores_at(str(Path(own) / "samples" / "id" / "c.0"))
    with pytest.raises(CacheError, match="no feature set fits 'grd'"):
        remove_set(own, "grd")
    name = FeatureCache.open(own).image_set().name
    with monkeypatch.context() as patch, pytest.raises(OutputError, match="permission denied"):
        patch.setattr("os.access", lambda *_: False)
        remove_set(own, name)
    path, size = remove_set(own, name)
    assert size > 0
    cache = FeatureCache.open(own)
    assert cache.set_names("images") == [] and not (Path(own) / path).exists()
    with pytest.raises(CacheError, match="no features of images; run `xret extract` on it without `visual=none`"):
        cache.image_set()
    assert verify(own).ok


def test_a_set_is_found_by_what_its_name_begins_with_or_its_encoder(own):
    cache = FeatureCache.open(own)
    names = cache.set_names("captions")
    assert isinstance(cache.caption_set("words"), CaptionSet)
    assert cache.caption_set(names[0][:-2]).name == names[0]
    with pytest.raises(CacheError, match=r"several feature sets fit 'auto'"):
        cache.caption_set()
    with pytest.raises(CacheError, match="there are captions/"):
        cache.caption_set("bert")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"zarr_format": 3, "node_type": "group", "attributes": {"a": 1}}', "not a feature store of xret"),
        (
            '{"zarr_format": 3, "node_type": "group", "attributes": {"format": "xret", "version": 1}}',
            "version 1, and this xret reads version 2",
        ),
        ("{", "damaged"),
    ],
)
def test_other_groups_are_refused(tmp_path, content, message):
    (tmp_path / "zarr.json").write_text(content)
    with pytest.raises(CacheError, match=message):
        FeatureCache.open(tmp_path)
    with pytest.raises(CacheError, match="there is no feature store"):
        FeatureCache.open(tmp_path / "absent")
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "zarr.json").unlink()
    for other in (tmp_path, tmp_path / "run.json"):
        with pytest.raises(CacheError, match="is no feature store; name the folder"):
            FeatureCache.open(other)
    (tmp_path / "run.json").rename(tmp_path / ".lock")  # as an extraction leaves it that is killed at once
    with pytest.raises(CacheError, match="holds nothing yet; run `xret extract"):
        FeatureCache.open(tmp_path)


def test_a_file_system_without_locks_is_said(tmp_path, lockless):
    assert FeatureCache.open(new_store(tmp_path / "s")).images
    assert len(lockless()) == 1


def test_equal_captions_have_equal_numbers_also_in_a_store_without_them(tmp_path):
    cache = FeatureCache.open(url := make_store(tmp_path / "s.zarr"))
    rows, texts = np.random.default_rng(0).permutation(cache.captions), cache.caption_texts(0, cache.captions)
    numbers = cache.text_hashes(rows)
    assert len(set(texts)) < len(texts)
    assert (numbers[:, None] == numbers).tolist() == [[texts[a] == texts[b] for b in rows] for a in rows]
    shutil.rmtree(tmp_path / "s.zarr" / "samples" / "text_hash")
    assert FeatureCache.open(url).text_hashes(rows).tolist() == numbers.tolist()


def test_samples_are_the_same_in_many_chunks(tmp_path, monkeypatch):
    whole = FeatureCache.open(make_store(tmp_path / "whole.zarr", train=9, val=5))
    monkeypatch.setattr("xret.pipeline.store.samples._SAMPLES_BYTES", 40)
    monkeypatch.setattr("xret.pipeline.store.samples._BLOCK", 4)
    parts = FeatureCache.open(new_store(tmp_path / "parts.zarr", train=9, val=5))
    assert parts.array("samples/caption").nchunks > 3 < parts.array("samples/sentid").nchunks
    for name, array in parts.group["samples"].arrays():
        assert np.array_equal(array[:], whole.group["samples"][name][:])
    assert parts.caption_texts(3, 11) == whole.caption_texts(3, 11)
    assert verify(parts.url).ok
