"""Updates at files that change while nothing else does, at others that write meanwhile, and at parts of a store."""

import os
import shlex
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
from changing_data import OPTIONS, CountingEncoder, Picture, content, pictures, use, write
from packed_data import PackedData
from pyarrow import parquet

from xret.pipeline.cache import layout
from xret.pipeline.cache.feature_cache import FeatureCache
from xret.pipeline.cache.storage.generations import generations, make_current, store_of
from xret.pipeline.cache.upkeep.verify import verify
from xret.pipeline.data.manifest import load_manifest
from xret.pipeline.data.sources import tables
from xret.pipeline.encoders import registry
from xret.pipeline.errors import CacheError, ManifestError
from xret.pipeline.extraction import extraction
from xret.pipeline.extraction.extraction import extract

SMALL = replace(OPTIONS, text=None)
UPDATE = replace(SMALL, update=True)
DATA = pictures(train=2, val=1, test=1)


class Killed(BaseException):
    """What nobody catches."""


@pytest.fixture
def encoded(monkeypatch):
    return use(monkeypatch)[0]


@pytest.fixture
def url(encoded, tmp_path):
    url = str(tmp_path / "s.zarr")
    extract(write(tmp_path / "data", DATA), url, SMALL)
    encoded.clear()
    return url


def stopped(monkeypatch, manifest, url):
    """Update a store up to the moment before the new generation becomes the current one."""

    def die(_):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(extraction, "finish", die)
        with pytest.raises(Killed):
            extract(manifest, url, UPDATE)


def states(url):
    return [(one.number, one.state) for one in generations(url)]


def other(data, name, number=77):
    return [replace(one, content=number) if one.name == name else one for one in data]


def test_the_current_generation_never_goes_back(url, tmp_path, monkeypatch):
    stopped(monkeypatch, write(tmp_path / "data", DATA[1:]), url)
    choose_target = extraction.choose_target

    def late(*arguments):
        target = choose_target(*arguments)
        assert target.url.endswith("generations/2")
        monkeypatch.setattr(extraction, "choose_target", choose_target)
        extract(write(tmp_path / "b", DATA[:-1]), url, UPDATE)  # another process, which makes 3 and removes 2
        return target

    monkeypatch.setattr(extraction, "choose_target", late)
    with pytest.raises(CacheError, match=r"another process has updated .*s\.zarr meanwhile; run it again"):
        extract(write(tmp_path / "data", DATA[1:]), url, UPDATE)
    assert states(url) == [(1, "old"), (3, "current")]
    assert not Path(url, "generations/2").exists()
    with pytest.raises(CacheError, match="meanwhile"):
        make_current(store_of(url, generation=2))
    assert states(url) == [(1, "old"), (3, "current")]
    extract(write(tmp_path / "data", DATA[1:]), url, UPDATE)
    assert states(url) == [(1, "old"), (3, "old"), (4, "current")]


@pytest.mark.parametrize("later", ["another", "zero"])
def test_every_set_has_a_say_in_which_files_have_changed(url, encoded, tmp_path, monkeypatch, later):
    use_another(monkeypatch, later)
    manifest = write(tmp_path / "data", other(DATA, "1.png"))
    extract(manifest, url, replace(SMALL, visual="resnet34"))  # of the file as it is now
    use(monkeypatch)
    (images,) = extract(manifest, url, UPDATE).sets
    assert (images.samples, images.found) == (1, 3)
    assert states(url) == [(1, "old"), (2, "current")]


def use_another(monkeypatch, name):
    class Another(CountingEncoder):
        identity: ClassVar = {"encoder": name}

    Another.name = name
    monkeypatch.setattr(registry, "_visual", lambda *_: Another())


def test_an_interrupted_update_takes_a_file_that_has_changed_since(url, encoded, tmp_path, monkeypatch):
    data = [*DATA, Picture("new.png", 50, "train", ("a new one",))]
    stopped(monkeypatch, write(tmp_path / "data", data), url)
    data = other(data, "1.png")
    encoded.clear()
    extract(write(tmp_path / "data", data), url, UPDATE)
    assert sum(encoded) == 1  # the new picture is found in the generation that was begun
    assert states(url) == [(1, "old"), (3, "current")]
    extract(write(tmp_path / "data", data), str(tmp_path / "fresh.zarr"), SMALL)
    assert content(url) == content(tmp_path / "fresh.zarr")


def test_a_picture_that_was_missing_is_taken_when_it_is_there(encoded, tmp_path):
    url, manifest = str(tmp_path / "s.zarr"), write(tmp_path / "data", DATA)
    options = replace(UPDATE, on_error="skip")
    picture = tmp_path / "data" / "images" / "1.png"
    held = picture.rename(tmp_path / "held.png")
    extract(manifest, url, replace(options, update=False))
    extract(manifest, url, options)
    assert states(url) == [(1, "current")]
    held.rename(picture)
    (images,) = extract(manifest, url, options).sets
    assert (images.samples, images.found, images.failed) == (1, 3, 0)
    assert states(url) == [(1, "old"), (2, "current")]


def test_a_group_of_rows_is_read_once_to_compare_files(encoded, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    manifest = load_manifest(PackedData(tmp_path / "data", count=12).as_parquet(files=1, group=12))
    url, read, rows = str(tmp_path / "s.zarr"), tables._Cursor.find, []
    extract(manifest, url, SMALL)

    def noted(cursor, group, row):
        rows.append(row)
        return read(cursor, group, row)

    monkeypatch.setattr(tables._Cursor, "find", noted)
    extract(manifest, url, UPDATE)
    assert rows == list(range(12))


def test_repair_refuses_files_that_have_changed(encoded, tmp_path):
    data, url = PackedData(tmp_path / "data", count=6), str(tmp_path / "s.zarr")
    manifest = load_manifest(data.as_tars())
    extract(manifest, url, SMALL)
    (name, _, *rest), (_, swapped, *_) = data.rows[:2]
    data.rows[0] = (name, swapped, *rest)
    data.as_tars()
    with pytest.raises(ManifestError, match=r"it has changed since it was looked through .*; put the file back, or"):
        extract(manifest, url, replace(SMALL, repair=True))
    extract(manifest, url, UPDATE)
    extract(manifest, str(tmp_path / "fresh.zarr"), SMALL)
    assert content(url) == content(tmp_path / "fresh.zarr")


def test_another_column_of_the_same_files_is_refused(encoded, tmp_path):
    url, table = str(tmp_path / "s.zarr"), PackedData(tmp_path / "data", count=6)
    rows = table.table(table.rows, path=False)
    parquet.write_table(rows.append_column("other", rows["image"]), table.folder / "part.parquet")
    keys = {"parquet": "part.parquet", "caption_columns": "texts", "split_column": "split"}
    extract(load_manifest(table.manifest("one", image_column="image", **keys)), url, SMALL)
    with pytest.raises(ManifestError, match="are those of column 'image', not 'other'; name that one as image_column"):
        extract(load_manifest(table.manifest("one", image_column="other", **keys)), url, SMALL)


def test_splits_that_are_left_out_are_named(url, tmp_path, capsys):
    manifest = write(tmp_path / "data", DATA[1:])
    capsys.readouterr()
    extract(manifest, url, replace(UPDATE, splits=("train",)))
    said = capsys.readouterr().err
    assert " has lost val, test, which it had in generation 1: `xret extract /" in said
    words = shlex.split(said.rpartition("`xret ")[2].partition("`")[0])
    assert words[-4:] == ["--store", url, "--splits", "val,test"]
    extract(manifest, url, replace(UPDATE, splits=("val", "test")))
    assert "has lost" not in capsys.readouterr().err
    extract(manifest, str(tmp_path / "fresh.zarr"), SMALL)
    assert content(url) == content(tmp_path / "fresh.zarr")


def test_a_set_without_digests_says_so(encoded, tmp_path, monkeypatch, capsys):
    url, create = str(tmp_path / "s.zarr"), layout.create_image_set
    with monkeypatch.context() as earlier:
        earlier.setattr(layout, "create_image_set", lambda *arguments: create(*arguments[:6]))
        extract(write(tmp_path / "data", DATA), url, SMALL)
    capsys.readouterr()
    extract(write(tmp_path / "data", other(DATA, "1.png")), url, UPDATE)
    assert "does not say of which files it is, so pictures that have changed are not noticed" in capsys.readouterr().err


@pytest.mark.parametrize("damaged", [False, True])
def test_an_update_with_repair_computes_only_what_is_new_or_damaged(url, encoded, tmp_path, damaged):
    if damaged:  # of the shard of val, which would be shared
        path = Path(url, FeatureCache.open(url).image_set().path, "local/c/1/0/0")
        raw = path.read_bytes()
        path.write_bytes(bytes([raw[0] ^ 1]) + raw[1:])
    (images,) = extract(write(tmp_path / "data", DATA[1:]), url, replace(UPDATE, repair=True)).sets
    assert (images.samples, images.found) == (damaged, 3 - damaged)
    assert verify(url).ok
