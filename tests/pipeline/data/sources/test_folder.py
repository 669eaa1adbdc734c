"""Which pictures of a folder are missing."""

import json
import os
import unicodedata
from pathlib import Path

import pytest

from xret.pipeline.data.manifest import load_manifest
from xret.pipeline.data.samples import read_samples
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


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
@pytest.mark.parametrize("there", [("NFC", "NFD"), ("NFD",), ()])
def test_names_in_two_normal_forms_are_two_pictures_where_there_are_two_files(tmp_path, suffix, there):
    for form in there:
        (tmp_path / unicodedata.normalize(form, "é.jpg")).write_text(form)
    names = [unicodedata.normalize(form, "é.jpg") for form in ("NFC", "NFD", "NFC")]
    rows = [
        f"{name},{number},train"
        if suffix == "csv"
        else json.dumps({"file_name": name, "caption": str(number), "split": "train"})
        for number, name in enumerate(names)
    ]
    (tmp_path / f"c.{suffix}").write_text("\n".join(["file_name,caption,split"] * (suffix == "csv") + rows))
    (tmp_path / "m.yaml").write_text(f"name: m\nimages: .\ncaptions: c.{suffix}\n")
    images = read_samples(load_manifest(tmp_path / "m.yaml")).images
    found = [[caption.text for caption in image.captions] for image in images]
    assert found == ([["0", "2"], ["1"]] if len(there) == 2 else [["0", "1", "2"]])
