"""Options that several commands have: what nothing can be written to is refused before any work begins."""

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from xret.cli.parsing import NEW_FILE, NEW_FOLDER
from xret.pipeline.errors import XretError


@click.command()
@click.option("--file", type=NEW_FILE)
@click.option("--folder", type=NEW_FOLDER)
def writes(file, folder):
    click.echo(repr(file or folder))


def call(*words):
    return CliRunner().invoke(writes, [str(word) for word in words])


def test_what_may_be_written_is_a_path_and_nothing_is_made_yet(tmp_path):
    for option in ("--file", "--folder"):
        assert call(option, tmp_path / "a" / "b").stdout == f"{Path(tmp_path / 'a' / 'b')!r}\n"
    assert call("--folder", tmp_path).stdout == f"{tmp_path!r}\n"
    assert call("--folder", "/").exit_code == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("option", ["--file", "--folder"])
def test_what_stands_in_the_way_is_said(tmp_path, option):
    (tmp_path / "file").touch()
    below = call(option, tmp_path / "file" / "b" / "c").exception
    assert isinstance(below, XretError)
    assert str(below).endswith(f"because {tmp_path / 'file'} is a file; choose another `{option[2:]}`")


def test_a_folder_is_no_file(tmp_path):
    result = call("--file", tmp_path)
    assert result.exit_code == 2
    assert "is a directory" in result.stderr
