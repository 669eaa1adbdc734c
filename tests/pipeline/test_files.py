"""Places that cannot be written are refused beforehand, and nothing is made."""

import os
from pathlib import Path

import pytest

from xret.pipeline.errors import OutputError
from xret.pipeline.files import require_new, require_writable


def test_what_can_be_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path, tmp_path / "file", tmp_path / "a" / "b" / "c", Path("a/b"), Path("new"), Path("../x")):
        require_writable(path, "--out")
    require_new(tmp_path / "a" / "b", folder=True)
    require_new(tmp_path / "a" / "b", folder=False)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OutputError, match=r"x cannot be made, because .*file is a file; choose another --store$"):
        require_writable(tmp_path / "file" / "x", "--store")
    with pytest.raises(OutputError, match="exists already; name another --out, or remove it"):
        require_new(tmp_path / "file", folder=False)
    with pytest.raises(OutputError, match="exists already"):
        require_new(tmp_path, folder=True)
    with pytest.raises(OutputError, match="is a folder, and a file is written"):
        require_new(tmp_path, folder=False)


def test_a_broken_link(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for path in (tmp_path / "link", tmp_path / "link" / "x"):
        with pytest.raises(OutputError, match=r"link is a link to nothing; remove it, or choose another --out$"):
            require_writable(path, "--out")


def test_a_folder_that_may_not_be_written(tmp_path, monkeypatch):
    closed = tmp_path / "closed"
    closed.mkdir()
    real = os.access  # as root, everything may be written
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != closed and real(path, mode))
    with pytest.raises(
        OutputError, match=r"x/y cannot be written: you may not write to .*closed; choose another --out"
    ):
        require_writable(closed / "x" / "y", "--out")
    require_writable(tmp_path / "x", "--out")
