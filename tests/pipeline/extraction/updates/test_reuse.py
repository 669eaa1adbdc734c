"""What an update takes over: views, videos, what earlier versions wrote, no hard links; and when the power fails."""

import gc
import os
import random
import shutil
from dataclasses import replace
from pathlib import Path
from weakref import ref

import pytest
from changing_data import OPTIONS, Picture, content, pictures, use, write
from power_cut import recorded

from xret.pipeline.cache import layout
from xret.pipeline.cache.feature_cache import FeatureCache
from xret.pipeline.cache.storage.generations import free_old, generations
from xret.pipeline.cache.upkeep.verify import verify
from xret.pipeline.errors import CacheError
from xret.pipeline.extraction.extraction import extract
from xret.pipeline.extraction.summary import Extraction
from xret.pipeline.extraction.updates import reuse

DATA = [replace(pictures()[0], content=99), *pictures()[2:], Picture("new.png", 50, "train", ("a new one",))]


def updated(tmp_path, options, data=DATA) -> Extraction:
    """Extract a data set, and once more when it has changed; check that it ends as an extraction from the beginning."""
    url, other = str(tmp_path / "s.zarr"), str(tmp_path / "fresh.zarr")
    extract(write(tmp_path / "data", pictures()), url, options)
    manifest = write(tmp_path / "data", data)
    summary = extract(manifest, url, replace(options, update=True))
    extract(manifest, other, options)
    assert content(url) == content(other)
    assert verify(url).ok
    return summary


def test_views(tmp_path):
    options = replace(
        OPTIONS, visual_weights="random:0", image_size=64, batch_size=1, views=2, augment="crop-flip", text=None
    )
    (found,) = updated(tmp_path, options).sets
    assert (found.samples, found.found) == (2, 18)


def test_frames(tmp_path):
    options = replace(
        OPTIONS, visual_weights="random:0", image_size=64, batch_size=1, frames=2, text=None, shard_images=2
    )
    splits = ["train"] * 4 + ["val", "test"]

    def videos(contents):
        shutil.rmtree(tmp_path / "data" / "images", ignore_errors=True)
        data = [
            Picture(f"{number}.png", one, split, ("x",))
            for number, (one, split) in enumerate(zip(contents, splits, strict=True))
        ]
        manifest = write(tmp_path / "data", data)
        for one in data:
            file = tmp_path / "data" / "images" / one.name
            file.rename(file.with_suffix(".tmp"))
            file.mkdir()
            file.with_suffix(".tmp").rename(file / "1.png")
        return manifest

    url, other = str(tmp_path / "s.zarr"), str(tmp_path / "fresh.zarr")
    extract(videos([0, 1, 2, 3, 4, 5]), url, options)
    manifest = videos([0, 1, 9, 3, 4, 5])
    (found,) = extract(manifest, url, replace(options, update=True)).sets
    assert (found.samples, found.found) == (1, 5)
    extract(manifest, other, options)
    assert content(url) == content(other)


def test_a_disk_without_hard_links(tmp_path, monkeypatch):
    use(monkeypatch)

    def refuse(*_):
        raise OSError("not here")

    monkeypatch.setattr(os, "link", refuse)
    images, captions = updated(tmp_path, OPTIONS).sets
    assert (images.samples, captions.samples) == (2, 1)


def test_a_set_without_digests_is_computed_anew(tmp_path, monkeypatch, capsys):
    use(monkeypatch)
    url, create = str(tmp_path / "s.zarr"), layout.create_image_set
    with monkeypatch.context() as earlier:
        earlier.setattr(layout, "create_image_set", lambda *arguments: create(*arguments[:6]))
        extract(write(tmp_path / "data", pictures()), url, OPTIONS)
    assert "digest" not in FeatureCache.open(url).image_set().array_names()
    capsys.readouterr()
    images, captions = extract(write(tmp_path / "data", DATA), url, replace(OPTIONS, update=True)).sets
    assert (images.samples, captions.samples) == (20, 1)
    assert "does not say of which files it is; all its pictures are computed anew" in capsys.readouterr().err
    assert "digest" in FeatureCache.open(url).image_set().array_names()


def test_failed_pictures_are_tried_again(tmp_path, monkeypatch):
    use(monkeypatch)
    options, url = replace(OPTIONS, on_error="skip", text=None), str(tmp_path / "s.zarr")
    manifest = write(tmp_path / "data", pictures())
    (tmp_path / "data" / "images" / "3.png").write_bytes(b"no picture")
    extract(manifest, url, options)
    manifest = write(tmp_path / "data", [*DATA[1:]])
    (tmp_path / "data" / "images" / "4.png").write_bytes(b"neither")
    (found,) = extract(manifest, url, replace(options, update=True)).sets
    assert (found.samples, found.found, found.failed) == (2, 16, 1)
    extract(manifest, str(tmp_path / "fresh.zarr"), options)
    assert content(url) == content(tmp_path / "fresh.zarr")


@pytest.mark.parametrize(
    "damaged",
    [
        "images/*/status",
        "images/*/digest",
        "images/*/length",
        "captions/*/status",
        "captions/*/length",
        "samples/caption",
    ],
)
def test_what_is_damaged_in_another_generation_is_computed(tmp_path, monkeypatch, capsys, damaged):
    use(monkeypatch)
    url = str(tmp_path / "s.zarr")
    extract(write(tmp_path / "data", pictures()), url, OPTIONS)
    (array,) = Path(url).glob(damaged)
    file = next(path for path in sorted((array / "c").rglob("*")) if path.is_file())
    raw = bytearray(file.read_bytes())
    raw[0] ^= 1
    file.write_bytes(raw)
    manifest = write(tmp_path / "data", DATA)
    with pytest.raises(CacheError, match="go on with --update, which computes only what is new"):
        extract(manifest, url, OPTIONS)
    capsys.readouterr()
    extract(manifest, url, replace(OPTIONS, update=True))
    noted = capsys.readouterr().err.count("of generation 1, which is damaged")
    assert noted == (0 if damaged.endswith("length") else 1)  # of an array that is read by rows, these alone are lost
    extract(manifest, str(tmp_path / "fresh.zarr"), OPTIONS)
    assert content(url) == content(tmp_path / "fresh.zarr")
    assert verify(url).ok


def test_nothing_of_other_generations_is_kept(tmp_path, monkeypatch):
    use(monkeypatch)
    url, kept = str(tmp_path / "s.zarr"), []
    extract(write(tmp_path / "data", pictures()), url, OPTIONS)
    look_through = reuse.Earlier

    def recorded_by(sets):
        found = look_through(sets)
        kept.append(ref(found))
        return found

    monkeypatch.setattr(reuse, "Earlier", recorded_by)
    extract(write(tmp_path / "data", DATA), url, replace(OPTIONS, update=True))
    gc.collect()
    assert [one() for one in kept] == [None, None]  # images and captions, each looked through once


@pytest.mark.parametrize("count", [5, pytest.param(150, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_the_power_fails(tmp_path, monkeypatch, count):
    use(monkeypatch)
    place = tmp_path / "place"
    place.mkdir()
    url, options = str(place / "s.zarr"), replace(OPTIONS, text=None)
    extract(write(tmp_path / "data", pictures(6, 2, 2)), url, options)
    before = content(url)
    manifest = write(tmp_path / "data", [*pictures(6, 2, 2)[:-1], DATA[-1]])

    def work(store):
        extract(manifest, store, replace(options, update=True))
        free_old(store)

    with recorded(place) as log:
        work(url)
    whole, seen = content(url), set()
    for number in range(count):
        cut = tmp_path / f"cut-{number}"
        log.cut(cut, random.Random(number))
        there = str(cut / "s.zarr")
        current = next(one.number for one in generations(there) if one.state == "current")
        seen.add(current)
        assert content(there) == (before if current == 1 else whole)
        work(there)
        assert content(there) == whole
        assert verify(there).ok
        assert [one.number for one in generations(there)] == [2]
        shutil.rmtree(cut)
    assert count < 100 or seen == {1, 2}
    assert sorted(path.name for path in Path(url).iterdir()) == ["generations", "zarr.json"]
