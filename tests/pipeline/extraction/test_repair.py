"""What is to be done after `verify`, by doing it."""

import shlex
import sys
from dataclasses import replace

import pytest
from changing_data import OPTIONS, Picture, pictures, use, write
from click.testing import CliRunner
from region_sources import World
from small_extraction import SMALL, files

from xret.cli import main
from xret.pipeline.cache.feature_cache import FeatureCache
from xret.pipeline.cache.upkeep.verify import verify
from xret.pipeline.data.manifest import bundled_manifests, load_manifest
from xret.pipeline.exchange.importers.importing import ImportOptions, import_features
from xret.pipeline.extraction.command import command_of, written
from xret.pipeline.extraction.extraction import extract
from xret.pipeline.extraction.options import Options
from xret.pipeline.extraction.repair import commands_for_failed, remedies


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
    command = shlex.split(line.split("`")[1])
    assert command[:2] == ["xret", "extract"] and command[-1] == "--repair"
    assert CliRunner().invoke(main, command[1:]).exit_code == 0
    assert files(store) == before
    assert remedies(str(store), verify(str(store))) == []


def test_a_set_that_lost_its_metadata_is_made_again(store, manifest):
    before = files(store)
    (path,) = store.glob("images/resnet18*")
    damage(path / "local" / "zarr.json")
    (line,) = remedies(str(store), verify(str(store)))
    _, removal, _, command, _ = line.split("`")
    assert CliRunner().invoke(main, [*shlex.split(removal)[1:], "--yes"]).exit_code == 0
    assert CliRunner().invoke(main, shlex.split(command)[1:]).exit_code == 0
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
    assert line.startswith("repair the files of the failed samples and run `xret extract ")
    picture.write_bytes(whole)
    assert CliRunner().invoke(main, shlex.split(line.split("`")[1])[1:]).exit_code == 0
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


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"visual": None, "text": "words"},
        {"text": None, "pool": (2, 3), "image_size": 64, "dtype": "float32", "visual_layer": -2, "whole": True},
        {"regions": (10, 100), "visual": "butd", "visual_weights": "my weights.pth", "shard_images": 7},
        {"text_weights": "a'b", "special_tokens": False, "max_tokens": 9, "prompt": "-a {}", "text_layer": -2},
        {"views": 3, "augment": "dihedral", "batch_size": 8, "on_error": "skip"},
    ],
)
def test_the_command_says_what_made_a_set(options, manifest, monkeypatch):
    """Read by the command line itself, it gives the same options."""
    from xret.pipeline.extraction import extraction

    asked, found = Options(**options), []
    monkeypatch.setattr(extraction, "extract", lambda manifest, url, options: found.append((manifest, url, options)))
    monkeypatch.setattr(sys.modules["xret.cli.extract"], "print_summary", lambda *_: None)
    command = shlex.split(written(command_of(manifest, asked), "my store.zarr"))
    result = CliRunner().invoke(main, command[1:], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert found == [(manifest, "my store.zarr", replace(asked, repair=True))]


def test_the_data_root_and_bundled_names_are_told(tiny_dataset, tmp_path, monkeypatch):
    manifest = load_manifest(tiny_dataset(), tmp_path / "tiny")
    words = command_of(manifest, Options())
    assert words[:3] == [str(manifest.path.resolve()), "--data-root", str(tmp_path / "tiny")]
    bundled = replace(manifest, path=bundled_manifests()["rsicd"], data_root=None)
    assert command_of(bundled, Options())[0] == "rsicd"
    assert "--device" not in command_of(bundled, Options(device="cpu", trust=True, workers=2))


def test_a_set_of_some_splits_is_mended_in_these(manifest, tmp_path):
    url = tmp_path / "s.zarr"
    extract(manifest, str(url), replace(SMALL, splits=("val", "test")))
    before = files(url)
    damage(sorted(url.glob("images/resnet18*/local/c/*/0/0"))[0])
    (line,) = remedies(str(url), verify(str(url)))
    assert " --splits val,test --store " in line
    assert CliRunner().invoke(main, shlex.split(line.split("`")[1])[1:]).exit_code == 0
    assert files(url) == before


def test_a_set_of_an_earlier_version_needs_its_options(manifest, tmp_path, monkeypatch):
    monkeypatch.setattr("xret.pipeline.extraction.extraction.command_of", lambda *_: None)
    url = tmp_path / "s.zarr"
    extract(manifest, str(url), SMALL)
    damage(next(url.glob("images/resnet18*/local/c/0/0/0")))
    (line,) = remedies(str(url), verify(str(url)))
    begin = f"run `xret extract tiny.yaml --store {url} … --repair`, with the other options of that extraction"
    assert line == f"{begin}: it computes what is damaged again"


@pytest.mark.parametrize("same_names", [True, False])
def test_a_generation_is_named(same_names, tmp_path, monkeypatch):
    use(monkeypatch)
    url, data = str(tmp_path / "s.zarr"), pictures(4, 0, 0)
    options = replace(OPTIONS, text=None, on_error="skip")
    extract(write(tmp_path / "data", data), url, options)
    changed = data if same_names else [*data, Picture("new.png", 50, "train", ("x",))]
    manifest = write(tmp_path / "data", changed)
    (tmp_path / "data" / "images" / changed[-1].name).write_bytes(b"no picture")
    extract(manifest, url, replace(options, update=True))
    assert f" --store {url} --repair`" in commands_for_failed(url)
    for number in (1, 2):
        cache = FeatureCache.open(url, generation=number)
        array = tmp_path.joinpath(cache.store.root, cache.image_set().path, "status")
        damage(next(path for path in (array / "c").rglob("*") if path.is_file()))
    (line,) = remedies(f"{url}/generations/2", verify(f"{url}/generations/2"))
    assert f" --store {url} --repair`" in line
    (line,) = remedies(f"{url}/generations/1", verify(f"{url}/generations/1"))
    if same_names:
        assert f" --store {url}/generations/1 --repair`" in line
        assert commands_for_failed(f"{url}/generations/1") == ""  # there nothing failed
    else:
        assert line.startswith(
            "this generation is of what the data set was, and cannot be extracted again; `xret cache"
        )
        assert f"`xret cache rm {url} --old` frees it" in line
