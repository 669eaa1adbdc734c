"""A store of a stranger may be sealed and still tell nonsense: one sentence, and no memory on its word."""

import json
import shutil
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from small_store import make_store, seal_anew

from xret.pipeline.cache.feature_cache import FeatureCache
from xret.pipeline.cache.layout import open_for_writing, require_place
from xret.pipeline.cache.storage.store import Store
from xret.pipeline.cache.upkeep.contents import describe
from xret.pipeline.data.samples import Samples
from xret.pipeline.errors import CacheError
from xret.pipeline.exchange.exporters.export import export
from xret.pipeline.reading.batches import stored_batches

NONE = Samples("none", (), {}, "0" * 64)


def path_of(url, modality):
    return FeatureCache.open(url).set_paths(modality)[0]


def forge(url, path, **values):
    """Seal a group with other attributes; None takes one away."""
    store = Store(url)
    attributes = {**store.read_group(path), **values}
    arrays = list(store.read_group(path)["arrays"])
    store.seal_group(path, {key: value for key, value in attributes.items() if value != "gone"}, arrays)


def forge_array(url, path, array, **values):
    """Give an array other metadata, and seal its group again."""
    name = f"{path}/{array}/zarr.json"
    metadata = json.loads(Store(url).read_bytes(name)) | values
    Store(url).write_bytes(name, json.dumps(metadata).encode())
    Store(url).seal_group(path, _sealed(url, path), [*_sealed(url, path)["arrays"]])


def _sealed(url, path):
    return json.loads(Store(url).read_bytes(f"{path}/zarr.json"))["attributes"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("whole") / "s.zarr")


@pytest.fixture
def url(tmp_path, whole):
    return str(shutil.copytree(whole, tmp_path / "s.zarr"))


def sentence(url):
    tracemalloc.start()
    with pytest.raises(CacheError) as caught:
        describe(url)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 50e6
    assert "\n" not in str(caught.value)
    return str(caught.value)


# By attribute the type of which any value will do.
TYPES = dict.fromkeys(("encoder", "fingerprint"), str) | dict.fromkeys(("identity", "recorded"), dict)
TYPES |= dict.fromkeys(("kind", "dtype", "channels", "failed", "shard_images", "rows"))
VALUES = ("gone", "x", -1, 1.5, [1], {"a": [1]}, True)
WRONG = [
    (key, value) for key, right in TYPES.items() for value in VALUES if value == "gone" or type(value) is not right
]


@pytest.mark.parametrize(("key", "value"), WRONG)
def test_an_attribute_of_a_set_that_is_missing_or_of_another_type(url, key, value):
    path = path_of(url, "images")
    forge(url, path, **{key: value})
    found = "is missing" if value == "gone" else f"is {value!r}, not"
    assert f"{path}/zarr.json is damaged: '{key}' {found}" in sentence(url)


@pytest.mark.parametrize(
    ("modality", "key", "value"),
    [
        ("images", "views", 0),
        ("images", "grid", [2]),
        ("images", "space", 3),
        ("images", "asked", [1]),
        ("captions", "shard_tokens", 1 << 40),
        ("captions", "shard_captions", None),
        ("captions", "vocabulary", [1]),
        ("captions", "counts", {"tokens": "x"}),
    ],
)
def test_what_only_some_sets_have(url, modality, key, value):
    path = path_of(url, modality)
    forge(url, path, **{key: value})
    assert f"{path}/zarr.json is damaged: '{key}' is {value!r}, not" in sentence(url)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("dataset", 3),
        ("manifest_sha256", "gone"),
        ("protocols", "full"),
        ("protocols", [1]),
        ("splits", []),
        ("splits", {}),
        ("splits", {"train": 3}),
        ("splits", {"train": [0, "x"]}),
        ("splits", {"train": [0, 5, 9]}),
        ("splits", {"train": [0, 5], "val": [4, 9]}),
        ("splits", {"train": [0, 1 << 40]}),
    ],
)
def test_root_attributes(url, key, value):
    attributes = {key: one for key, one in {**Store(url).read_group(""), key: value}.items() if one != "gone"}
    Store(url).seal_group("", attributes, [])
    assert f"{url}/zarr.json is damaged: '{key}' is " in sentence(url)
    for look in (lambda: require_place(url, NONE), lambda: open_for_writing(url, NONE, ()).__enter__()):
        with pytest.raises(CacheError, match=rf"{url}/zarr\.json is damaged: '{key}' is "):
            look()


@pytest.mark.parametrize("array", ["status", "length", "done", "local"])
def test_an_array_that_is_larger_than_its_set(url, array):
    path = path_of(url, "images")
    shape = list(Store(url).open_array(f"{path}/{array}").shape)
    forge_array(url, path, array, shape=[1 << 40, *shape[1:]])
    features = FeatureCache.open(url).set_at(path)
    with pytest.raises(CacheError, match=rf"{path}/{array}/zarr\.json is damaged: it tells of .*\(1099511627776,"):
        features.local(np.arange(1)) if array == "local" else getattr(features, array)
        features.done()


@pytest.mark.parametrize("array", ["caption_start", "caption_count", "caption_image"])
def test_samples_that_are_more_than_the_splits_have(url, array):
    forge_array(url, "samples", array, shape=[1 << 40])
    assert f"samples/{array}/zarr.json is damaged: its shape is (1099511627776,)" in sentence(url)


def test_texts_that_are_none(url):
    store = Store(url)
    values = store.read_array("samples/caption")
    store.open_array("samples/caption", writable=True)[...] = np.full_like(values, 0xFF)
    with pytest.raises(CacheError, match="'samples/caption' is not what was written there"):
        FeatureCache.open(url).caption_texts(0, 3)


def forge_values(url, modality, array, change):
    """Let a set hold other values, sealed as if they had been written."""
    features = FeatureCache.open(url).set_at(path_of(url, modality))
    values = features.cache.store.read_array(f"{features.path}/{array}")
    change(values)
    features.cache.store.open_array(f"{features.path}/{array}", writable=True)[...] = values
    seal_anew(FeatureCache.open(url).set_at(features.path))


def put(value, at=slice(0, 1)):
    def change(values):
        values[at] = value

    return change


@pytest.mark.parametrize(
    ("modality", "array", "change", "said"),
    [
        ("images", "length", put(5), "shard 0 of '.*/length' tells of rows that are not there"),
        ("images", "length", put(-1), "shard 0 of '.*/length' tells of rows that are not there"),
        ("captions", "length", put(2**31 - 1), "shard 0 of '.*/length' tells of rows that are not there"),
        ("captions", "length", put(-1), "shard 0 of '.*/length' tells of rows that are not there"),
        ("captions", "length", put(2**31 - 1, slice(None)), "shard 0 of '.*/length' tells of rows that are not there"),
        ("captions", "start", put(-1), "token has not the rows that its set names"),
        ("captions", "start", put(1 << 40), "token has not the rows that its set names"),
        ("captions", "start", put(2**63 - 1), "token has not the rows that its set names"),
        ("captions", "token", put(1 << 20), "token' has words beyond its vocabulary"),
        ("captions", "token", put(-1), "token' has words beyond its vocabulary"),
    ],
)
def test_values_that_cannot_be(url, tmp_path, modality, array, change, said):
    forge_values(url, modality, array, change)
    for work in (
        lambda cache: list(_batches(cache).epoch(unit="image", batch_size=8, seed=0, epoch=0)),
        lambda cache: export(url, "hdf5", tmp_path / "e.h5"),
    ):
        tracemalloc.start()
        with pytest.raises(CacheError, match=said):
            work(FeatureCache.open(url))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 50e6
    assert not (tmp_path / "e.h5").exists()


def _batches(cache):
    fields = {"image_fields": {"local"}, "caption_fields": {"token"}}
    return stored_batches(cache.image_set(), cache.caption_set(), "train", **fields)


def test_a_file_that_is_smaller_than_its_rows(url):
    path = path_of(url, "images")
    file = Path(url, path, "local", "c", "0", "0", "0")
    file.write_bytes(file.read_bytes()[4:])
    with pytest.raises(CacheError, match=r"is damaged \(size\)"):
        FeatureCache.open(url).set_at(path).local(np.arange(8))


@pytest.mark.parametrize(
    ("array", "value"),
    [("caption_count", -1), ("caption_count", 2**31 - 1), ("caption_start", 7), ("caption_image", -1)]
    + [(f"{text}_offset", value) for text in ("caption", "id", "file_name") for value in (-1, 1 << 40)],
)
def test_numbers_of_samples_that_cannot_be(url, array, value):
    store = Store(url)
    attributes = store.read_group("samples")
    values = store.read_array(f"samples/{array}")
    values[1] = value
    attributes["seals"][array] = store.write_array(f"samples/{array}", values)
    store.seal_group("samples", attributes, list(attributes["arrays"]))
    cache = FeatureCache.open(url)
    with pytest.raises(CacheError, match=f"samples/{array} has numbers that cannot be"):
        _ = cache.caption_image, cache.caption_start
        cache.caption_texts(0, 4), cache.ids(0, 4), cache.file_names(0, 4)


@pytest.mark.parametrize("seals", [3, [1], {"id": 3}, {"id": ["x"]}, {"id": []}])
def test_seals_of_samples_that_are_none(url, seals):
    attributes = Store(url).read_group("samples") | {"seals": seals}
    Store(url).seal_group("samples", attributes, list(attributes["arrays"]))
    with pytest.raises(CacheError, match=r"samples/zarr\.json is damaged: 'seals' is|'samples/id' is not what was"):
        FeatureCache.open(url).ids(0, 3)


FILE = ["a.tar", 9, "a time"]
SOURCE = {"kind": "tar", "files": [FILE], "column": "", "keys": "k"}


@pytest.mark.parametrize(
    "change",
    [
        {"files": []},
        {"files": {"a": 1}},
        {"files": ["abc"]},
        *({"files": [FILE, ["b.tar", size, "x"]]} for size in (1e400, 1.5, -1, "1", True)),
        {"files": [["a.tar", 9]]},
        {"kind": 3},
        {"column": None},
    ],
)
def test_sources_that_are_none(url, change):
    forge(url, "samples", source=SOURCE | change)
    assert f"{url}: samples/zarr.json is damaged: 'source' " in sentence(url)


@pytest.mark.parametrize(
    "change",
    [
        lambda place: place[:, :2],
        lambda place: place[:, 0],
        lambda place: place[:-1],
        lambda place: place.astype(float) + 0.5,
        lambda place: place.astype(np.int32),
    ],
)
def test_places_of_pictures_that_are_none(url, change):
    store = Store(url)
    cache = FeatureCache.open(url)
    place = np.zeros((cache.images, 3), np.int64)
    for values, right in ((place, True), (change(place), False)):
        attributes = store.read_group("samples")
        seals = attributes["seals"] | {"place": store.write_array("samples/place", values)}
        names = [*{*attributes["arrays"], "place"}]
        store.seal_group("samples", attributes | {"source": SOURCE, "seals": seals}, names)
        forged = FeatureCache.open(url)
        if right:
            assert forged.places(0, 2) == [(0, 0, 0)] * 2
            continue
        with pytest.raises(CacheError, match="samples/place has numbers that cannot be; get that store anew"):
            forged.open_pictures("photos", 0, cache.images)
