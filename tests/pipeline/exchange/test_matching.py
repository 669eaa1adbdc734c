"""Which image of a source is which image of a data set."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from imported import assert_holds, bring, refused
from region_sources import World

from xret.pipeline.data.image_columns import Caption, Images, ImageSample
from xret.pipeline.data.samples import Samples
from xret.pipeline.exchange import matching
from xret.pipeline.exchange.importers.source import SourceError
from xret.pipeline.store.inspect import verify


def test_images_that_the_source_lacks_are_refused_or_recorded(world):
    gone = [world.of("train")[3], world.of("test")[0]]
    source = world.tsv(images=[image for image in world.images if image not in gone])
    name = f"val2014/{gone[0]['filename']}"
    refused(rf"lacks 1 of 20 images of split 'train' of 'world', .* '{name}'; `on_error`", world, source, "butd-tsv")
    assert not (world.folder / "s.zarr").exists()
    summary, cache = bring(world, source, "butd-tsv", on_error="skip")
    images = cache.image_set()
    assert (summary.sets[0].samples, summary.sets[0].failed) == (30, 2)
    assert dict(images.failures)[str(gone[0]["imgid"])] == f"{name}: the source has no features of it"
    rows = np.flatnonzero(images.status == 1)
    assert rows.tolist() == [3, 26]
    assert np.isnan(images.local(rows)).all()
    assert images.length[rows].tolist() == [0, 0]
    report = verify(cache.url)
    assert report.ok
    assert len(report.failed_samples) == 2


def test_images_of_the_source_that_the_data_set_lacks_are_counted(world):
    others = [{**image, "cocoid": image["cocoid"] + 10**7} for image in world.images[:3]]
    summary, cache = bring(world, world.tsv(images=others + world.images), "butd-tsv")
    assert summary.unmatched == 3
    assert_holds(cache, world.stored, ["boxes"])


def test_a_source_of_another_data_set_is_refused(world):
    others = [{**image, "cocoid": f"x{image['cocoid']}"} for image in world.images]
    sentence = "none of the source's 32 images is in 'world': its first ids are 'x1000', 'x1037', 'x1074'"
    refused(sentence, world, world.tsv(images=others), "butd-tsv")


def test_numbers_that_count_rows_of_a_file_are_no_ids(tmp_path):
    world = World(tmp_path / "w", train=60, val=20, test=20)
    source = world.scan(splits=("train", "dev", "testall"))
    for split, count in (("train", 60), ("dev", 20), ("testall", 20)):
        (source / f"{split}_ids.txt").write_text("".join(f"{row}\n" for row in range(count)))
    refused(r"only \d+ of 20 images of the source's val files are in split 'val'", world, source, "scan")


def samples(keys):
    images = [ImageSample(key, name, "train", cocoid, (Caption("a", 0),)) for key, cocoid, name in keys]
    return Samples("made", Images.of(images), {"train": (0, len(images))}, "")


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=12, unique=True), st.data())
def test_ids_are_matched_by_the_kind_that_finds_most(pairs, data):
    keys = [(str(imgid), cocoid, f"x{n}.jpg") for n, (imgid, cocoid) in enumerate(dict(pairs).items())]
    asked = data.draw(st.lists(st.integers(0, 45).map(str), min_size=1, max_size=20))
    by_id = [next((n for n, key in enumerate(keys) if key[0] == one), -1) for one in asked]
    owners = [[n for n, key in enumerate(keys) if key[1] == int(one)] for one in asked]
    by_cocoid = [rows[0] if len(rows) == 1 else -1 for rows in owners]
    kinds = [by_id, by_cocoid]
    counts = [sum(row >= 0 for row in rows) for rows in kinds]
    most = max(counts)
    best = [rows for rows, count in zip(kinds, counts, strict=True) if count == most]
    differ = any(a != b and min(a, b) >= 0 for a, b in zip(*kinds, strict=True))
    clash = differ and min(counts) >= 0.9 * most  # one id that the data set lacks does not decide
    if not most or clash:
        with pytest.raises(SourceError, match="none of the source's" if not most else "to different images"):
            matching.match_images(asked, samples(keys))
    else:
        assert matching.match_images(asked, samples(keys))[0].tolist() == best[0]


def test_leading_zeros_suffixes_and_shared_names():
    kinds = [("7", 391895, "x.jpg"), ("8.0", 12, "y.jpg")]
    assert matching.match_images(["391895.0", "12.00", "7.5"], samples(kinds))[0].tolist() == [0, 1, -1]
    assert matching.match_images(["8", "7.0"], samples(kinds))[0].tolist() == [1, 0]
    made = samples([("7", 391895, "a/x.jpg"), ("8", 12, "b/x.jpg"), ("9", -1, "b/y.png")])
    assert matching.match_images(["000000391895", "000000000012", "-1"], made)[0].tolist() == [0, 1, -1]
    assert matching.match_images(["b/y.jpg", "x", "q"], made)[0].tolist() == [2, -1, -1]
    assert matching.match_images(["b/x.jpg", "a/x.jpg"], made) == (pytest.approx([1, 0]), "file name")
    assert matching.match_images(["8", "8"], made)[0].tolist() == [1, 1]
    with pytest.raises(SourceError, match=r"'c/y\.jpg' and 'd/y\.jpg' in the source are both 'b/y\.png' of"):
        matching.match_images(["c/y.jpg", "d/y.jpg"], made)


@pytest.mark.parametrize("on_error", ["fail", "skip"])
def test_captions_of_another_image_refuse_a_match_by_row_numbers(world, on_error):
    source = world.scan(splits=["train"])
    (source / "train_ids.txt").write_text("".join(f"{row}\n" for row in range(20)))
    first = next(row for row, image in enumerate(world.of("train")) if image["imgid"] != row)
    meant, other = world.images[first]["filename"], world.of("train")[first]["imgid"]
    line = rf"train_caps\.txt: line {2 * first + 1}:"
    sentence = f"{line}.*'thing {other} in scene 0.*{meant}.*'thing {first} in"
    refused(sentence, world, source, "scan", splits=("train",), on_error=on_error)
    assert not (world.folder / "s.zarr").exists()


def test_captions_may_be_cut_and_spelt_otherwise(world):
    source = world.scan()
    for path in source.glob("*_caps.txt"):
        path.write_text(path.read_text().upper().replace(" IN ", " , IN ").replace("SCENE 1", "SC"))
    assert_holds(bring(world, source, "scan")[1], world.stored, size=False)


@pytest.mark.parametrize("whole", ["first", "second"])
@pytest.mark.parametrize("damage", [lambda fields: [*fields[:-1], b"AAAA"], lambda fields: fields[:3], lambda f: f[:1]])
def test_of_two_lines_of_an_image_the_whole_one_counts(world, whole, damage):
    image = world.images[0]
    line = world.line(image)
    bad = b"\t".join(damage(line.rstrip().split(b"\t"))) + b"\n"
    lines = [world.line(one) for one in world.images[1:]]
    source = world.folder / "butd.tsv"
    source.write_bytes(b"".join([line, *lines, bad] if whole == "first" else [bad, *lines, line]))
    assert_holds(bring(world, source, "butd-tsv")[1], world.stored, ["boxes"])


@pytest.mark.parametrize("what", ["local", "boxes"])
@pytest.mark.parametrize("format_", ["butd-tsv", "hdf5"])
def test_an_image_that_is_there_twice_and_differs_is_refused(world, format_, what):
    twice = {**world.images[0], "regions_of_test": dict(world.images[0]["regions_of_test"])}
    twice["regions_of_test"][what] = twice["regions_of_test"][what] + 20
    images, world.images = world.images, [*world.images, twice]
    source = world.tsv() if format_ == "butd-tsv" else world.hdf5()
    world.images = images
    with pytest.raises(SourceError, match="more than once, with different"):
        bring(world, source, format_, on_error="skip")
