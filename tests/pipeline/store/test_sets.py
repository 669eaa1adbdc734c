"""What a set holds and gives, against plain loops: its types, its rows and views, and what has failed."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_store import make_store

from xret.pipeline.errors import CacheError
from xret.pipeline.store import FAILED, NOT_DONE, OK, FeatureCache, create
from xret.pipeline.store.create import SetFacts, image_set, misfit, require_dtype
from xret.pipeline.store.inspect import verify
from xret.pipeline.store.regions import Regions, lay_out


def test_features_are_float16_or_float32():
    require_dtype("float16")
    require_dtype("float32")
    for dtype, why in (("bfloat16", "bfloat16: Zarr has no bfloat16; choose"), ("int8", "int8: choose float16")):
        with pytest.raises(CacheError, match=f"`dtype` {why}"):
            require_dtype(dtype)


@given(st.lists(st.sampled_from([0.0, 1.0, 65504.0, 7e4, 1e-9, 3e-8, 1e-7, 1e-5, 3e-3]), min_size=12, max_size=12))
def test_a_sample_that_float16_cannot_hold_is_the_first_one(values):
    rows = np.array(values).reshape(3, 2, 2)
    held = np.linalg.norm(rows - rows.clip(max=65504).astype(np.float16), axis=2) <= 0.01 * np.linalg.norm(rows, axis=2)
    found = misfit(rows.max(2), lambda where: rows[where], np.float16)
    for wrong, why in ((rows.max(2) > 65504, "a value of 7e+04 is beyond float16"), (~held, "too small for float16")):
        if wrong.any():
            assert found is not None and why in found[1]
            assert found[0] == wrong.any(1).argmax()
            if "small" in why:
                assert f"values of {rows[wrong].max(1)[0]:.3g} at most" in found[1]
            return
    assert found is None


def test_zeros_follow_the_regions_of_an_image():
    arrays = {
        name: np.full((2, 3, *shape), 7, kind)
        for name, shape, kind in (("local", (2,), "f4"), ("boxes", (4,), "f4"), ("classes", (), "i4"))
    }
    arrays |= {"global": np.full((2, 2), 7, "f4"), "length": np.full(2, 7)}
    lay_out(arrays, 1, Regions(np.array([[1, 2], [3, 6]]), np.arange(8).reshape(2, 4), np.array([5, 6])))
    assert arrays["local"][1].tolist() == [[1, 2], [3, 6], [0, 0]]
    assert arrays["boxes"][1].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 0, 0, 0]]
    assert arrays["classes"][1].tolist() == [5, 6, -1]
    assert arrays["global"][1].tolist() == [2, 4] and arrays["length"].tolist() == [7, 2]
    assert all((values[0] == 7).all() for values in arrays.values())


def test_pictures_of_other_files_differ_where_both_are_known(tmp_path):
    cache, sets = FeatureCache.open(make_store(tmp_path / "s.zarr", train=4, val=0, test=0)), []
    for name, digests in (("one", [[1, 5], [2, 5], [3, 5], [0, 0]]), ("two", [[1, 5], [2, 6], [0, 0], [4, 4]])):
        features = image_set(cache, SetFacts(name, "grid", {"encoder": name}, "float32", None, 1, arrays=("digest",)))
        arrays = features.blank(0)
        arrays["status"][:], arrays["global"][:], arrays["digest"][:] = OK, 1, np.repeat(digests, 8, axis=1)
        features.write(0, arrays)
        sets.append(features.reopened())
    assert sets[0].differing(sets[1]).tolist() == [1]
    differing = verify(cache.url).differing
    assert [(one.images, one.example) for one in differing] == [(1, cache.file_names(1, 2)[0])]
    assert not sets[0].stamps.any() and sets[0].stamps.shape == (4, 2)  # they are not known


def test_what_failed_in_a_split_is_tried_again_and_nothing_else(tmp_path):
    """Chunks of 8 images, the second of both splits."""
    cache = FeatureCache.open(make_store(tmp_path / "s.zarr", train=10, val=10, test=4))
    images, wrong = cache.image_set(), {1: "a", 9: "b", 12: "c", 21: "d"}
    for chunk, (first, last) in enumerate(pairwise([0, 8, 16, 24])):
        arrays = images.read_chunk(chunk)
        arrays["status"][[row - first for row in wrong if first <= row < last]] = FAILED
        images.write(chunk, arrays, {row: why for row, why in wrong.items() if first <= row < last})
    assert images.rows_left(["train", "val"], FAILED).tolist() == [1, 9, 12]
    assert images.rows_left(["val", "test"], FAILED, chunk=2).tolist() == [21]
    images.retry(["train"])
    again = FeatureCache.open(cache.url).image_set()
    for features in (images, again):
        assert np.flatnonzero(features.status == NOT_DONE).tolist() == [1, 9] == features.rows_left(["train"]).tolist()
        assert np.flatnonzero(features.status == FAILED).tolist() == [12, 21]
    assert {file.name for file in tmp_path.rglob("failed.*")} == {"failed.1.jsonl", "failed.2.jsonl"}


def test_values_that_no_encoder_gives_are_damage_where_samples_are_good(tmp_path, capsys):
    cache = FeatureCache.open(make_store(tmp_path / "s.zarr", train=20, val=0, test=0, text="tokens", broken=(3,)))
    sets = cache.image_set(), cache.caption_set()
    chunks = sum(features.chunks for features in sets)
    for features in sets:
        arrays = features.read_chunk(0)
        good = arrays["status"] == OK
        last = dict.fromkeys(("local", "global"), np.flatnonzero(good)[-1])
        if features is sets[1]:  # whose tokens stand side by side, and nothing after them
            last["local"] = arrays["length"][good].sum() - 1
            arrays["local"][last["local"] + 1 :] = np.nan
            features.write(0, arrays)
        for name, row in last.items():
            wrong = arrays[name].copy()
            wrong[row] = np.nan
            features.write(0, arrays | {name: wrong})
            assert [damage.array for damage in verify(cache.url).damaged] == [f"{features.path}/{name}"]
        for name in ("length", "size" if features is sets[0] else "start"):  # an older file came with a newer mark
            features.write(0, arrays | {name: np.full_like(arrays[name], -1)})
            assert f"{features.path}/{name}" in [damage.array for damage in verify(cache.url).damaged]
        features.write(0, arrays)
        assert verify(cache.url).ok and f"{chunks}/{chunks} chunks" in capsys.readouterr().err


def test_chunks_of_single_vectors_hold_more(tmp_path, monkeypatch):
    monkeypatch.setattr(create, "CHUNK_BYTES", 96)
    monkeypatch.setattr(create, "GLOBAL_CHUNK_BYTES", 160)
    cache = FeatureCache.open(make_store(tmp_path / "s.zarr"))
    for channels, bytes_, values in ((None, 160, 2), (2, 96, 2 + 2)):
        features = image_set(cache, SetFacts("s", "grid", {"channels": channels}, "float32", channels, 2))
        assert features.chunk_rows == bytes_ // (4 * values)
