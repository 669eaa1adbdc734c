"""The command line: what it prints, its exit codes, and the sentence each mistake gets."""

import asyncio
import gc
import json
import shlex
import warnings

import click
from click.testing import CliRunner
from command_line import refused, run

from xret.cli import Commands


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


def test_a_run_that_is_not_there_is_begun_and_one_that_is_there_is_left_alone(store, tmp_path):
    words = ["train-head", store, "--out", tmp_path / "r", "--recipe", "vsepp", "--set", "model.dim=8"]
    assert "loss.triplet.margn is not a key" in refused(*words, "--set", "loss.triplet.margn=1")
    assert not (tmp_path / "r").exists()
    begun = run(*words, "--set=schedule.epochs=1", "--resume")
    assert f"--resume: there is nothing to resume in {tmp_path / 'r'}, a new run is begun\n" in begun.stderr
    assert f"{tmp_path / 'r'}: 1 epoch in " in begun.stdout
    assert "exists" in refused(*words)


def test_an_error_as_json(tmp_path):
    result = run("eval", tmp_path, "--json", code=1)
    assert result.stdout == ""
    assert "is no run" in json.loads(result.stderr)["error"]
    result = run("extract", "coco", "--json", code=2)
    assert "Missing option '--store'" in json.loads(result.stderr)["error"]
    result = run("--strore", "extract", "--json", code=2)
    assert "No such option '--strore'" in json.loads(result.stderr)["error"]
    assert "No such command 'extrac'" in refused("extrac", code=2)


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
