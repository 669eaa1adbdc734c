"""`xret import`: what it prints, its exit codes, and a head trained on what it brought."""

import json
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from region_sources import World

from xret.cli import Commands, main
from xret.cli.import_ import import_

TRAIN = [
    "--set=model.dim=16",
    "--set=aggregator.image.head_dim=16",
    "--set=aggregator.text.head_dim=16",
    "--set=schedule.epochs=2",
]
XRET = Commands("xret", commands={**main.commands, "import": import_})


def run(*words, code=0):
    result = CliRunner().invoke(XRET, [str(word) for word in words])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == code, result.output
    return result


@pytest.fixture
def world(tmp_path):
    return World(tmp_path / "w", ragged=True, captions=5)


def test_imported_features_train_a_head(tmp_path):
    world, store, out = World(tmp_path / "w", captions=5), tmp_path / "s.zarr", tmp_path / "run"
    words = ["import", world.manifest, "--store", store, "--from", "scan", "--source", world.scan(rows="caption")]
    summary = json.loads(run(*words, "--json").stdout)
    assert (summary["images"], summary["captions"], summary["matched_by"]) == (32, 160, "id")
    assert {key: summary["sets"][0][key] for key in ("samples", "shards", "shards_before", "failed")} == {
        "samples": 32,
        "shards": 5,
        "shards_before": 0,
        "failed": 0,
    }
    run("extract", world.manifest, "--store", store, "--visual", "none", "--text", "words")
    run("train-head", store, "--recipe", "setdiv", "--out", out, *TRAIN)
    result = json.loads(run("eval", out, "--json").stdout)["results"][0]
    assert (result["images"], result["captions"], result["skipped"]) == (6, 30, 0)
    info = run("cache", "info", store).stdout
    assert f"images/{summary['sets'][0]['name']}: roi, 4 x 16, float16" in info


def test_regions_of_varying_number_train_a_head(world, tmp_path):
    store, out = tmp_path / "s.zarr", tmp_path / "run"
    source = world.tsv(images=world.images[1:])
    words = ["import", world.manifest, "--store", store, "--from", "butd-tsv", "--source", source]
    printed = run(*words, "--on-error", "skip")
    assert "32 images, 160 captions" in printed.stdout
    assert "matched by COCO id, 5 shards written, 0 there before, 1 failed" in printed.stdout
    failed = f"{world.images[0]['filepath']}/{world.images[0]['filename']}"
    assert f"\n    failed: {failed}: the source has no features of it\n" in printed.stdout
    assert "32/32 images" in printed.stderr
    assert "0 shards written, 5 there before" in run(*words, "--on-error", "skip").stdout
    run("extract", world.manifest, "--store", store, "--visual", "none", "--text", "words")
    run("train-head", store, "--recipe", "vsepp", "--out", out, "--set=model.dim=16", "--set=schedule.epochs=1")
    assert json.loads(run("eval", out, "--json").stdout)["results"][0]["rsum"] > 0


def test_arrays_of_hdf5_are_named(world, tmp_path):
    words = ["import", world.manifest, "--store", tmp_path / "s", "--from", "hdf5", "--source", world.hdf5()]
    run(*words, "--arrays", "local=regions/local, length=count,id=name,boxes=regions/boxes")
    assert json.loads(run("cache", "verify", tmp_path / "s", "--json").stdout)["ok"]
    assert "'local' is not ROLE=NAME" in run(*words, "--arrays", "local", code=2).stderr
    assert "each role once" in run(*words, "--arrays", "id=a,id=b", code=2).stderr
    sentence = json.loads(run(*words, "--arrays", "local=regions/local", "--json", code=1).stderr.splitlines()[-1])
    assert "which array" in sentence["error"]


def test_mistakes(world, tmp_path):
    words = ["import", world.manifest, "--store", tmp_path / "s", "--source", world.tsv()]
    assert "'tsv' is not one of 'scan'" in run(*words, "--from", "tsv", code=2).stderr
    assert "Missing option '--from'" in run(*words, code=2).stderr
    assert "nothing to import" in run(*words, "--from", "butd-tsv", "--splits", "", code=2).stderr
    both = ["--scheduler", "tcp://127.0.0.1:9", "--workers", "2"]
    assert "--workers has no effect beside --scheduler" in run(*words, "--from", "butd-tsv", *both, code=2).stderr
    error = run(*words, "--from", "lxmert-tsv", code=1).stderr.splitlines()[-1]
    assert error.startswith("Error: ")
    assert error.endswith("try --from butd-tsv")
    error = run(*words, "--from", "scan", "--source", tmp_path / "x", code=1).stderr.splitlines()[-1]
    assert error == f"Error: {tmp_path / 'x'} is not there; give the file or folder of the features as --source"
    assert not (tmp_path / "s").exists()


def test_help_has_an_example_and_names_every_format():
    text = run("import", "--help").stdout
    assert "xret import flickr30k" in text
    option = next(option for option in import_.params if option.name == "format_")
    assert isinstance(option.type, click.Choice)
    for name in option.type.choices:
        assert f"\n  {name} " in text


def test_the_command_imports_nothing_heavy():
    source = Path(import_.callback.__code__.co_filename).read_text()
    tops = [line.split()[1] for line in source.splitlines() if line.startswith(("import ", "from "))]
    ours = ["..pipeline.exchange.importers", ".extract", ".parsing", ".summaries"]
    assert tops == ["pathlib", "typing", "click", *ours]
