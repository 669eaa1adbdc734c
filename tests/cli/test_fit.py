"""What ``xret fit`` prints: a table, and commands that run as printed."""

import json
import shlex

from command_line import run
from small_store import make_store

from xret.cli import main


def test_the_commands_that_it_ends_with_run_as_printed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_store("s.zarr", text="tokens", space="one")
    fitted = run("fit", "s.zarr", "--out", "a fit", "--minutes", 0, "--device", "cpu")
    assert "Encoding" not in fitted.stderr
    printed = fitted.stdout.splitlines()
    assert [line.split()[-6] for line in printed[2:6]] == ["frozen", "cca", "linear", "mlp"]
    assert sum(line.startswith("*") for line in printed[2:6]) == 1
    search, serve, export = (shlex.split(line, comments=True)[1:] for line in printed[-3:])
    assert main.commands["search"].make_context("search", search[1:]).params["run"] == "a fit"
    assert main.commands["serve"].make_context("serve", serve[1:]).params["run"] == "a fit"
    run(*export)
    assert "a fit" in run("eval", "a fit").stdout
    again = json.loads(run("fit", "s.zarr", "--out", "a fit", "--device", "cpu", "--json").stdout)
    assert len(again["rows"]) == 4 and all(row["complete"] for row in again["rows"])
