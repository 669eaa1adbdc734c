"""The command line: what it prints, its exit codes, and the sentence each mistake gets."""

import asyncio
import gc
import json
import shlex
import warnings

import click
import pytest
from click.testing import CliRunner
from command_line import refused, run
from PIL import Image

from xret.cli import Commands

EXTRACT = ["--visual", "resnet18", "--visual-weights", "random:0", "--image-size", "64", "--text", "words"]
TRAIN = [
    "--set=model.dim=16",
    "--set=aggregator.image.head_dim=16",
    "--set=aggregator.text.head_dim=16",
    "--set=schedule.epochs=2",
]


@pytest.fixture
def store(tiny_dataset, tmp_path):
    run("extract", tiny_dataset(), "--store", tmp_path / "s.zarr", *EXTRACT)
    return tmp_path / "s.zarr"


def test_mistakes_of_extract(tiny_dataset, tmp_path, store):
    manifest, other = tiny_dataset("second"), tmp_path / "new.zarr"
    Image.new("RGB", (9, 9)).save(manifest.parent / "images" / "0.jpg")
    cases = {
        ("extract", "coko", "--store", other): "did you mean 'coco'?",
        ("extract", "coco", "--store", other): "coco/dataset_coco.json",
        ("extract", manifest, "--store", store, *EXTRACT): "holds other samples (data set 'tiny'",
        ("extract", manifest, "--store", other, *EXTRACT, "--visual", "resnet81"): "did you mean",
        ("extract", manifest, "--store", other, *EXTRACT, "--visual-weights", "none.pth"): "none.pth",
        ("extract", manifest, "--store", other, *EXTRACT, "--splits", "tests"): "it has train, val, test",
        ("extract", manifest, "--store", other, *EXTRACT, "--text", "bert", "--text-weights", tmp_path): str(tmp_path),
        ("extract", manifest, "--store", other, *EXTRACT, "--device", "cuda:77"): "is missing",
    }
    for words, sentence in cases.items():
        assert sentence in refused(*words), words
        assert not other.exists(), words
    (manifest.parent / "images" / "30.jpg").write_bytes(b"")
    assert "30.jpg" in refused("extract", manifest, "--store", other, *EXTRACT)


def test_wrong_usage_is_code_2():
    assert "Missing option '--store'" in refused("extract", "coco", code=2)
    assert "No such command 'extrac'" in refused("extrac", code=2)
    assert "'stop' is not one of" in refused("extract", "coco", "--store", "s", "--on-error", "stop", code=2)


def test_an_interrupt_ends_with_130_and_the_command_that_goes_on(store, tmp_path, monkeypatch):
    from xret.heads.training import train as training
    from xret.pipeline.extraction import extraction
    from xret.pipeline.store import inspect

    def interrupted(*_words, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr(inspect, "verify", interrupted)
    said = refused("cache", "verify", store, code=130)
    assert said == f"stopped by Ctrl-C; run again `xret cache verify {store}`"
    said = json.loads(run("cache", "verify", store, "--json", code=130).stderr)["error"]
    assert said == f"stopped by Ctrl-C; run again `xret cache verify {store} --json`"
    monkeypatch.setattr(training, "train", interrupted)
    words = ["train-head", str(store), "--recipe", "vsepp", "--out", f"{tmp_path}/a run"]
    expected = f"stopped by Ctrl-C; run again `{shlex.join(['xret', *words, '--resume'])}`"
    assert refused(*words, code=130) == refused(*words, "--resume", code=130) == expected
    monkeypatch.setattr(extraction, "extract", interrupted)
    words = ["extract", "coco", "--data-root", str(tmp_path), "--store", "s"]
    monkeypatch.setattr("xret.pipeline.data.manifest.load_manifest", lambda *_: None)
    assert refused(*words, code=130).endswith(f"run again `xret {shlex.join(words)}`")


def test_what_ctrl_c_cut_off_prints_nothing():
    @click.group(cls=Commands)
    def group():
        pass

    async def write():
        pass

    @group.command()
    def stopped():
        _under_way = write()
        raise KeyboardInterrupt

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert CliRunner().invoke(group, ["stopped"]).exit_code == 130
        gc.collect()
    assert told == []


def test_mistakes_of_train_and_eval(store, tmp_path):
    train = ["train-head", store, "--out", tmp_path / "r"]
    assert "did you mean 'setdiv'?" in refused(*train, "--recipe", "setdif")
    sentence = refused(*train, "--recipe", "setdiv", "--set", "loss.triplet.margn=1", "--set", "similarity.name=cosin")
    assert "loss.triplet.margn is not a key (did you mean 'loss.triplet.margin'?)" in sentence
    assert "did you mean 'cosine'?" in sentence
    assert "there is no feature store" in refused("train-head", tmp_path / "none", "--recipe", "vsepp", "--out", "x")
    assert not (tmp_path / "r").exists()
    assert "is no run" in refused("eval", tmp_path)
    begun = run(*train, "--recipe", "setdiv", *TRAIN[:-1], "--set=schedule.epochs=1", "--resume")
    assert f"--resume: there is nothing to resume in {tmp_path / 'r'}, a new run is begun\n" in begun.stderr
    assert f"{tmp_path / 'r'}: 1 epoch in " in begun.stdout
    assert "exists" in refused(*train, "--recipe", "setdiv", *TRAIN)
    assert "has no split 'dev'" in refused("eval", tmp_path / "r", "--split", "dev")
    assert "1k-folds needs exactly 5,000 images" in refused("eval", tmp_path / "r", "--protocol", "1k-folds")


def test_an_error_as_json(tmp_path):
    result = run("eval", tmp_path, "--json", code=1)
    assert result.stdout == ""
    assert "is no run" in json.loads(result.stderr)["error"]
    result = run("extract", "coco", "--json", code=2)
    assert "Missing option '--store'" in json.loads(result.stderr)["error"]


def test_of_two_writes_that_fail_the_second_prints_nothing(caplog):
    @click.group(cls=Commands)
    def group():
        pass

    @group.command()
    def fail():
        loop = asyncio.new_event_loop()
        loop.create_future().set_exception(OSError("no space"))  # asyncio speaks up when it is collected
        gc.collect()
        loop.call_exception_handler({"message": "something else"})
        loop.close()
        raise OSError(28, "No space left on device", "s.zarr")

    result = CliRunner().invoke(group, ["fail"])
    assert result.stderr.startswith("Error: No space left on device (s.zarr)")
    assert [record.getMessage() for record in caplog.records] == ["something else"]
