"""Which pictures of a folder are missing."""

import os
import unicodedata
from pathlib import Path

import pytest

from xret.pipeline.data.sources import FolderReader, missing_from


@pytest.fixture
def folder(tmp_path):
    for name in ("a.jpg", "sub/b.jpg", "sub/deep/c.jpg", "video/0.jpg"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "good.jpg").symlink_to("a.jpg")
    (tmp_path / "linked").symlink_to("sub")
    return tmp_path


def test_what_does_not_exist_is_missing(folder):
    names = ["a.jpg", "b.jpg", "sub/b.jpg", "sub/a.jpg", "sub/deep/c.jpg", "none/a.jpg", "a.jpg/x", "video", "good.jpg"]
    names += ["linked/b.jpg", "linked/x.jpg"]
    expected = [name for name in names if not Path(f"{folder}/{name}").exists()]
    assert missing_from(folder, names) == expected
    assert expected == ["b.jpg", "sub/a.jpg", "none/a.jpg", "a.jpg/x", "linked/x.jpg"]


def test_a_folder_is_listed_once_and_no_file_asked_for(folder, monkeypatch):
    for number in range(50):
        (folder / "sub" / f"{number}.jpg").write_bytes(b"")
    listed, listdir = [], os.listdir
    with monkeypatch.context() as patched:
        patched.setattr(os, "listdir", lambda path: listed.append(path) or listdir(path))
        patched.setattr(os.path, "exists", None)
        assert missing_from(folder, [f"sub/{number}.jpg" for number in range(50)]) == []
    assert listed == [folder / "sub"]


@pytest.mark.parametrize(("there", "named"), [("NFD", "NFC"), ("NFC", "NFD")])
def test_a_name_in_another_normal_form_is_found(tmp_path, there, named):
    name = "é/café.jpg"
    path = tmp_path / unicodedata.normalize(there, name)
    path.parent.mkdir()
    path.write_bytes(b"picture")
    other = unicodedata.normalize(named, name)
    assert missing_from(tmp_path, [other, "ü.jpg"]) == ["ü.jpg"]
    assert FolderReader(tmp_path).open(other).getvalue() == b"picture"
