"""What splits share, against plain loops."""

import itertools

import numpy as np
import pytest
from small_store import make_store

from xret.pipeline.data.image_columns import Caption, Images, ImageSample
from xret.pipeline.data.images import PictureFile, digest_of
from xret.pipeline.data.samples import Samples
from xret.pipeline.store import OK, FeatureCache, leaks
from xret.pipeline.store.create import SetFacts, image_set
from xret.pipeline.store.leaks import find_leaks, near_pairs, taught_in
from xret.pipeline.store.store import open_for_writing


@pytest.fixture
def make(tmp_path):
    """Make a store of these pictures: split, content of the file (None: not known) and captions of each."""

    def make(*pictures, name="s.zarr"):
        images, splits = [], {}
        for row, (split, _, *texts) in enumerate(pictures):
            spoken = tuple(Caption(text, 10 * row + k) for k, text in enumerate(texts))
            images.append(ImageSample(str(row), f"{row}.jpg", split, -1, spoken))
            splits[split] = (splits.get(split, (row,))[0], row + 1)
        url = str(tmp_path / name)
        with open_for_writing(url, Samples("small", Images.of(images), splits, "digest"), ("full",)) as cache:
            facts = SetFacts("known", "grid", {}, "float32", None, 1, arrays=("digest",))
            features = image_set(cache, facts)
            for chunk in range(features.chunks):
                arrays, (first, last) = features.blank(chunk), features.rows_in(chunk)
                arrays["status"][:] = OK
                for at, (_, content, *_) in enumerate(pictures[first:last]):
                    if content is not None:
                        arrays["digest"][at] = np.frombuffer(digest_of(PictureFile(content, "")), np.uint8)
                features.write(chunk, arrays)
        return FeatureCache.open(url)

    return make


def test_what_is_in_several_splits_is_counted_once_with_an_example(make):
    found = find_leaks(
        make(
            ("train", b"a", "one", "two"),
            ("train", b"a", "three"),
            ("train", b"b", "two"),
            ("train", None, "seven"),
            ("val", b"a", "one"),
            ("val", None, "nine"),
            ("test", b"c", "two", "Two"),
            ("test", b"a", "two", "four"),
            ("test", b"c", "three"),
            ("test", b"c", "five"),
            ("test", None, "six"),
            ("other", b"c", "four"),
        )
    )
    assert (found.pictures, found.captions, found.copies) == (1, 3, 2)
    pictures, captions, copies = found.sentence.split("; ")
    assert copies.startswith("2 of 5 pictures of test are")
    assert all(word in pictures for word in ("1 picture", "0.jpg (train)", "4.jpg (val)"))
    assert all(word in captions for word in ("3 of 7 captions", "'two'"))


def test_pictures_of_test_that_another_store_was_taught(make):
    other = make(("train", b"a", "one"), ("train", None, "two"), ("val", b"d", "two"), ("test", b"b", "three"))
    here = [
        ("train", b"a", "one"),
        ("test", b"b", "two"),
        ("test", None, "three"),
        ("test", b"a", "four"),
        ("test", b"d"),
    ]
    assert taught_in(other, make(*here, name="here.zarr")) == [3]
    alike = [make(("val", content, "one"), name=f"{number}.zarr") for number, content in enumerate((b"b", b"a"))]
    assert taught_in(alike[0], other) == taught_in(other, alike[1]) == []


def test_nothing_is_said_where_nothing_is_shared(make):
    found = find_leaks(make(("train", b"a", "one"), ("val", b"b", "one"), ("test", b"c", "two")))
    assert (found.sentence, found.pictures, found.captions, found.copies) == ("", 0, 0, 0)


@pytest.mark.parametrize("block", [5, 4096])
def test_the_nearest_of_another_split_by_the_cosine_without_the_mean(tmp_path, monkeypatch, capsys, block):
    monkeypatch.setattr(leaks, "_BLOCK", block)
    cache = FeatureCache.open(make_store(tmp_path / "s.zarr", train=20, val=7, test=6, broken=(3, 22), text="tokens"))
    features = cache.image_set()
    good = [row for row in range(33) if row not in (3, 22)]
    values = {row: features.global_(np.array([row]))[0].astype(np.float64) for row in good}
    mean = sum(values.values()) / len(good)
    split_of = {row: split for split, rows in cache.splits.items() for row in range(*rows)}
    values = {row: (value - mean) / np.linalg.norm(value - mean) for row, value in values.items()}
    expected = {}
    for row, other in itertools.product(good, ("train", "val")):
        if split_of[row] not in ("train", other):
            cosines = {at: values[row] @ values[at] for at in good if split_of[at] == other}
            nearest = max(cosines, key=cosines.get)
            if cosines[nearest] >= 0.3:
                expected[split_of[row], f"{row}.jpg", other, f"{nearest}.jpg"] = cosines[nearest]
    found = near_pairs(features, 0.3)
    assert [pair.cosine for pair in found] == pytest.approx(sorted(expected.values(), reverse=True), abs=1e-5)
    assert len(found) > 3
    pairs = f"{(20 - 1) * (7 - 1) + (20 - 1 + 7 - 1) * 6}"
    assert f"compared: {pairs}/{pairs} pairs" in capsys.readouterr().err
    assert {(one.split, one.image, one.other_split, one.other) for one in found} == expected.keys()
