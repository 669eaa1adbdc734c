"""The commands of the README are commands, and the recipes' settings in it are accepted."""

import re
import shlex
from pathlib import Path

import click
import pytest

from xret.cli import main
from xret.heads.recipes.recipe import load_recipe

README = Path(__file__).resolve().parents[1] / "README.md"
BLOCKS = re.findall(r"^```\w*\n(.*?)^```$", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
COMMANDS = [
    line for block in BLOCKS for line in block.replace("\\\n", " ").splitlines() if re.match(r"xret [a-z-]+ ", line)
]


def test_there_are_commands():
    assert len(COMMANDS) >= 8


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_of_the_readme(line):
    name, *words = shlex.split(line)[1:]
    command = main.commands[name]
    parameters = command.make_parser(click.Context(command)).parse_args(args=words)[0]  # refuses unknown options
    if name == "train-head":
        assert load_recipe(parameters["recipe"], parameters.get("settings", []))


@pytest.mark.parametrize("target", ["demo", "test", "check", "format"])
def test_a_target_of_make(target):
    makefile = (README.parent / "Makefile").read_text(encoding="utf-8")
    assert re.search(rf"^{target}:", makefile, re.MULTILINE)


def test_the_makefile_runs_what_ci_runs():
    script = (README.parent / ".ci" / "run").read_text(encoding="utf-8")
    assert "make test" in script
    assert "make test" in README.read_text(encoding="utf-8")
