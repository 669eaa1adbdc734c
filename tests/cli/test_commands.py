"""The command line: what it prints, its exit codes, and the sentence each mistake gets."""

import asyncio
import gc
import json
import os
import shlex
import subprocess
import sys
import warnings
from pathlib import Path

import click
import command_line
from click.shell_completion import ShellComplete
from click.testing import CliRunner
from command_line import refused, run

from xret.cli import Commands, main
from xret.cli.parsing import typed
from xret.heads.recipes.names import recipe_names


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


def test_a_command_in_a_clone_is_named_by_its_path(monkeypatch):
    monkeypatch.setattr(sys, "argv", [".venv/bin/xret"])
    for path, expected in ((os.defpath, ".venv/bin/xret"), (str(Path(sys.executable).parent), "xret")):
        monkeypatch.setenv("PATH", path)
        assert typed() == expected


def test_what_a_terminal_cannot_show_is_escaped(store):
    for words in (["ablate", "--help"], ["eval", "nothing"], ["search", "nothing", "\u4e00"]):
        done = subprocess.run(
            [sys.executable, "-m", "xret.cli", *words],
            capture_output=True,
            env={**os.environ, "PYTHONIOENCODING": "latin-1"},
            check=False,
        )
        said = (done.stdout + done.stderr).decode("latin-1")
        assert "Traceback" not in said and "\\u2026" in said


WRONG_PATHS = """
eval nothing; search nothing x; serve nothing; report nothing; export nothing --out e; index nothing --out i;
finetune nothing --out f; train-head nothing --recipe mlp --out r; train-head . --recipe mpl --out r;
tune nothing --recipe mlp --out t; cache info nothing; ablate nothing --recipe mlp --vary model.dim=3 --out a;
recipes show nothing; eval . --store nothing
"""


def test_a_wrong_path_is_refused_before_libraries_are_imported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = f"""if True:
        import sys
        from command_line import refused
        for line in {WRONG_PATHS!r}.split(";"):
            refused(*line.split())
            assert not {{"torch", "numpy", "zarr"}} & sys.modules.keys(), line
    """
    environment = {**os.environ, "PYTHONPATH": str(Path(command_line.__file__).parent)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    assert list(tmp_path.iterdir()) == []


def test_recipes_complete_by_tab():
    for words in (["train-head", "s", "--recipe", "setdiv/f30k-b"], ["recipes", "show", "setdiv/f30k-b"]):
        found = ShellComplete(main, {}, "xret", "").get_completions(words[:-1], words[-1])
        names = [name for name in recipe_names() if name.startswith("setdiv/f30k-b")]
        assert names and set(names) <= {one.value for one in found}


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
