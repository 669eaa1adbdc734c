"""Where weights came from, and whether they are still there."""

import hashlib

import pytest

from xret.pipeline.encoders import weights_source
from xret.pipeline.encoders.weights_source import WeightsSource, sha256_of
from xret.pipeline.errors import EncoderError


def test_the_sha256_of_a_file_is_that_of_its_bytes_and_of_a_folder_tells_its_files_apart(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"weights")
    assert sha256_of(tmp_path / "a.bin") == hashlib.sha256(b"weights").hexdigest()
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "b.bin").write_bytes(b"more")
    whole, flat = sha256_of(tmp_path), sha256_of(tmp_path, flat=True)
    (tmp_path / "inner" / "b.bin").write_bytes(b"other")
    assert sha256_of(tmp_path) != whole
    assert sha256_of(tmp_path, flat=True) == flat


def test_a_hub_id_is_found_anywhere():
    source = WeightsSource.of("sentence-transformers/all-MiniLM-L6-v2", "revision:ab")
    assert source == WeightsSource(id="sentence-transformers/all-MiniLM-L6-v2")
    assert source.find("set@1", "--text-weights") == "sentence-transformers/all-MiniLM-L6-v2"


def test_a_file_is_found_where_it_was_as_long_as_it_is_the_same(tmp_path):
    file = tmp_path / "w.pth"
    file.write_bytes(b"weights")
    source = WeightsSource.of(str(file), None)
    assert WeightsSource.of(str(file), f"sha256:{source.sha256}") == source
    assert source.find("set@1", "--visual-weights") == str(file)
    assert WeightsSource.from_json(source.to_json()) == source
    file.write_bytes(b"others")
    begin = f"'set@1' was made with w.pth (SHA-256 {source.sha256[:8]}…)"
    with pytest.raises(EncoderError) as caught:
        source.find("set@1", "--visual-weights")
    assert str(caught.value) == f"{begin}, and {file} is another one by now; give its place as --visual-weights"
    file.unlink()
    with pytest.raises(EncoderError) as caught:
        source.find("set@1", "--visual-weights")
    assert str(caught.value) == f"{begin}, which is no longer at {file}; give its place as --visual-weights"
    with pytest.raises(EncoderError) as caught:
        WeightsSource(file="w.pth", sha256=source.sha256).find("set@1", "--visual-weights")
    assert str(caught.value) == f"{begin}; give its place as --visual-weights"


def test_a_folder_is_found_whatever_else_lies_in_it_and_its_name_says_not_what_it_is(tmp_path, monkeypatch):
    folder = tmp_path / "bge-small-en-v1.5"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    source = WeightsSource.of(str(folder), None)
    (folder / ".DS_Store").write_bytes(b"1")
    with monkeypatch.context() as patch:
        patch.setattr(weights_source, "sha256_of", None)  # nobody may look
        assert source.find("set@1", "--text-weights") == str(folder)
    with pytest.raises(
        EncoderError, match=r"'set@1' was made with bge-small-en-v1\.5 \(.*; give its place as --text-w"
    ):
        WeightsSource(file=source.file, sha256=source.sha256).find("set@1", "--text-weights")


@pytest.mark.parametrize("value", [None, "text", {"id": 1}, {"id": "a", "command": "rm"}, [1]])
def test_what_a_stranger_wrote_is_no_source(value):
    assert WeightsSource.from_json(value) is None
