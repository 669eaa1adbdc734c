"""What is to be done after `verify`, by doing it."""

import shlex
from dataclasses import replace

import pytest
from click.testing import CliRunner
from region_sources import World
from small_extraction import SMALL, files

from xret.cli import main
from xret.pipeline.cache.verify import verify
from xret.pipeline.data.manifest import load_manifest
from xret.pipeline.exchange.importers.importing import ImportOptions, import_features
from xret.pipeline.extraction.extraction import extract
from xret.pipeline.extraction.repair import remedies, repair_command


def damage(path):
    data = path.read_bytes()
    path.write_bytes(bytes([data[0] ^ 1]) + data[1:])


@pytest.fixture
def manifest(tiny_dataset):
    return load_manifest(tiny_dataset(train=12, val=3, test=3))


@pytest.fixture
def store(manifest, tmp_path):
    extract(manifest, str(tmp_path / "s.zarr"), SMALL)
    return tmp_path / "s.zarr"


@pytest.mark.parametrize(
    "node", ["images/resnet18*/local/c/0/0/0", "captions/*/token/c/1", "samples/caption/c/0", "images"]
)
def test_a_repair_restores_every_byte(node, store, manifest):
    before = files(store)
    (path,) = store.glob(node)
    damage(path / "zarr.json" if path.is_dir() else path)
    (line,) = remedies(str(store), verify(str(store)))
    assert line.startswith(f"run `xret extract tiny.yaml --store {store} … --repair`")
    extract(manifest, str(store), replace(SMALL, repair=True))
    assert files(store) == before
    assert remedies(str(store), verify(str(store))) == []


def test_a_set_that_lost_its_metadata_is_made_again(store, manifest):
    before = files(store)
    (path,) = store.glob("images/resnet18*")
    damage(path / "local" / "zarr.json")
    (line,) = remedies(str(store), verify(str(store)))
    command = line.split("`")[1]
    assert CliRunner().invoke(main, [*shlex.split(command)[1:], "--yes"]).exit_code == 0
    extract(manifest, str(store), SMALL)
    assert files(store) == before


def test_the_root_cannot_be_repaired(store):
    damage(store / "zarr.json")
    (line,) = remedies(str(store), verify(str(store)))
    assert line == f"restore {store}/zarr.json from a copy, or extract into another --store"


def test_failed_samples_are_tried_again(manifest, tmp_path):
    url, picture = str(tmp_path / "s"), manifest.images / "2.jpg"
    whole = picture.read_bytes()
    picture.write_bytes(b"")
    extract(manifest, url, replace(SMALL, on_error="skip"))
    (line,) = remedies(url, verify(url))
    assert line.startswith("repair the files of the failed samples and run `xret extract tiny.yaml ")
    picture.write_bytes(whole)
    assert extract(manifest, url, replace(SMALL, repair=True)).sets[0].reasons == ()
    assert remedies(url, verify(url)) == []


def test_an_import_is_not_repaired_by_an_extraction(tmp_path):
    world, url = World(tmp_path / "w", captions=5), str(tmp_path / "s")
    source = world.tsv(images=world.images[1:])
    import_features(load_manifest(world.manifest), url, ImportOptions("butd-tsv", source, on_error="skip"))
    report = verify(url)
    assert len(report.failed_samples) == 1 and remedies(url, report) == []
    (path,) = (tmp_path / "s").glob("images/butd-tsv*")
    damage(path / "global" / "c" / "0" / "0")
    (line,) = remedies(url, verify(url))
    assert line == f"run `xret cache rm {url} images/{path.name}`, then extract or import that set again"


def test_a_manifest_that_is_bundled_has_a_name():
    assert repair_command("rsicd", "r.zarr") == "xret extract rsicd --store r.zarr … --repair"
    assert repair_command("my/own.yml", "r.zarr") == "xret extract my/own.yml --store r.zarr … --repair"
    assert repair_command("own", "s3://a/b.zarr") == "xret extract own.yaml --store s3://a/b.zarr … --repair"
