"""Places that cannot be written are refused beforehand; what is written appears whole or not at all."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from small_disk import small_disk

from xret.pipeline import files
from xret.pipeline.errors import CacheError, OutputError, RunError


def test_each_real_folder_is_walked_once_and_under_its_own_path(tmp_path):
    top = tmp_path / "top"
    for name in ("a/deep/1", "b/2", "../outside/in/3", "../.hidden/4"):
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).touch()
    links = ("A", "a"), ("loop", "."), ("b/up", ".."), ("c", "../outside"), ("d", "../outside/in"), ("e", "no")
    for name, target in links:
        (top / name).symlink_to(target)
    found = [Path(path, name).relative_to(top).as_posix() for path, _, names in files.walk(top) for name in names]
    assert sorted(found) == ["a/deep/1", "b/2", "c/in/3", "e"]
    (top / "b/up").unlink()
    (top / "b/up").symlink_to("../..")  # out, and back in by another way
    found = [Path(path, name).relative_to(top).as_posix() for path, _, names in files.walk(top) for name in names]
    assert sorted(found) == ["a/deep/1", "b/2", "b/up/.hidden/4", "c/in/3", "e"]
    assert [path for path, *_ in files.walk(tmp_path / "none")] == []


def test_places_that_cannot_be_written(tmp_path, monkeypatch):
    file, link, closed = (tmp_path / name for name in ("file", "link", "closed"))
    file.write_text("mine")
    link.symlink_to(tmp_path / "nowhere")
    closed.mkdir()
    real = os.access  # as root, everything may be written
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != closed and real(path, mode))
    for path in (tmp_path, file, tmp_path / "a" / "b"):
        files.require_writable(path, "--out")
    files.require_new(tmp_path / "a" / "b", folder=True)
    for path, sentence in (
        (file / "x", "x cannot be made, because .*file is a file; choose another `out`$"),
        (link, "link is a link to nothing; remove it, or choose another `out`$"),
        (closed / "x" / "y", "x/y cannot be written: permission denied: .*closed; choose another `out`"),
    ):
        with pytest.raises(OutputError, match=sentence):
            files.require_writable(path, "--out")
    for path, folder, sentence in (
        (file, False, "exists already; name another `out`, or remove it"),
        (tmp_path, True, "exists already"),
        (tmp_path, False, "is a folder, and a file is written"),
    ):
        with pytest.raises(OutputError, match=sentence):
            files.require_new(path, folder=folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["closed", "file", "link"]


def test_a_file_appears_whole_or_stays_as_it_was(tmp_path):
    path = tmp_path / "deep" / "file"
    files.write_text(path, "oldé")
    with pytest.raises(ZeroDivisionError), files.writing(path) as partial:
        partial.write_text("half")
        assert path.read_bytes() == "oldé".encode()
        raise ZeroDivisionError
    assert [entry.name for entry in path.parent.iterdir()] == ["file"]
    (tmp_path / "link").symlink_to("deep/file")
    files.write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert path.read_text() == "new"
    os.mkfifo(tmp_path / "pipe")
    with subprocess.Popen(["cat", tmp_path / "pipe"], stdout=subprocess.PIPE) as reader:
        files.write_text(tmp_path / "pipe", "through")
        assert reader.stdout.read() == b"through"


def test_a_folder_appears_whole_in_a_place_that_is_absent_or_empty(tmp_path):
    (tmp_path / "empty").mkdir()
    for name in ("new", "empty"):
        with files.making(tmp_path / name) as partial:
            (partial / "file").write_text("mine")
        assert (tmp_path / name / "file").read_text() == "mine"
    with pytest.raises(OSError, match="not empty"), files.making(tmp_path / "new") as partial:
        (partial / "other").mkdir()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["empty", "new"]


def put(path, data, *failure):
    with files.writing(path, *failure) as partial:
        partial.write_bytes(data)


def test_where_nothing_can_be_written_it_is_the_callers_error(tmp_path, monkeypatch):
    files.write_text(tmp_path / "file", "mine")
    with pytest.raises(RunError, match=r"file/x cannot be written: Not a directory; choose another `out`$"):
        put(tmp_path / "file" / "x", b"", RunError, "choose another `out`")
    with pytest.raises(NotADirectoryError):
        put(tmp_path / "file" / "x", b"")
    with pytest.raises(CacheError, match=r"^another error$"), files.writing(tmp_path / "x", RunError):
        raise CacheError("another error")
    with small_disk(100), pytest.raises(RunError, match=r"big cannot be written: File too large; make room$"):
        put(tmp_path / "big", bytes(1000), RunError, "make room")
    refusal = pytest.raises(RunError, match=r"big cannot be written: .*[tT]oo ?[lL]arge")  # in words of safetensors
    with small_disk(100), refusal, files.writing(tmp_path / "big", RunError) as partial:
        save_file({"zeros": np.zeros(1000)}, partial)
    assert [entry.read_text() for entry in tmp_path.iterdir()] == ["mine"]


def test_a_file_is_on_the_disk_before_it_is_renamed(tmp_path, monkeypatch):
    done = []
    sync, replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (done.append(stat.S_IFMT(os.fstat(handle).st_mode)), sync(handle)))
    monkeypatch.setattr(Path, "replace", lambda *paths: (done.append("replace"), replace(*paths)))
    files.write_text(tmp_path / "file", "mine")
    assert done == [stat.S_IFREG, "replace", stat.S_IFDIR]


@pytest.mark.parametrize("appearing", [files.making, files.making_file])
def test_what_a_killed_writer_left_is_removed_and_what_a_living_one_writes_stays(tmp_path, appearing):
    code = (
        f"import sys\nfrom pathlib import Path\nfrom xret.pipeline.files import {appearing.__name__}\n"
        f"with {appearing.__name__}(Path('[out]')) as partial:\n"
        "    print(partial, flush=True); sys.stdin.read()\n"
    )
    command, out = [sys.executable, "-c", code], tmp_path / "[out]"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=tmp_path, **pipes) as killed:
        assert Path(killed.stdout.readline().strip()).exists()
        killed.kill()
    assert files.partials(out) == list(tmp_path.iterdir()) != []
    with subprocess.Popen(command, cwd=tmp_path, **pipes) as living:
        its_own = Path(living.stdout.readline().strip())
        assert files.partials(out) == [its_own]
        with appearing(out) as partial:
            assert sorted(files.partials(out)) == sorted([its_own, partial])
        files.remove(out)
        living.stdin.close()
    assert living.returncode == 0
    assert list(tmp_path.iterdir()) == [out]


def test_a_file_system_without_locks_is_named_once_and_nothing_of_others_is_removed(tmp_path, lockless):
    for name in ("a", ".b.12345678.partial"):  # the second may be of a living writer
        (tmp_path / name).touch()
    files.write_text(tmp_path / "b", "written")
    assert (tmp_path / ".b.12345678.partial").exists() and not lockless()
    for place in (tmp_path, tmp_path / "a", tmp_path / "a"):
        with files.locked(place, RunError("busy")):
            pass
    assert len(lockless()) == 1
    with pytest.raises(OSError, match="No locks"), files.locked(tmp_path, strict=True):
        pass


@pytest.mark.parametrize("appearing", [files.making, files.making_file])
def test_what_is_written_is_locked_until_it_has_its_name(tmp_path, monkeypatch, appearing):
    def renamed(partial, place):
        with pytest.raises(BlockingIOError), files.locked(partial):
            pass
        os.rename(partial, place)  # noqa: PTH104 -- `Path.replace` is this function now

    monkeypatch.setattr(Path, "replace", renamed)
    with appearing(tmp_path / "out"):
        pass
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077])
def test_files_get_what_the_umask_gives_whatever_library_wrote_them(tmp_path, mask):
    before = os.umask(mask)
    try:
        with files.writing(tmp_path / "weights") as partial:
            save_file({"a": np.zeros(2)}, partial)
        with files.making(tmp_path / "run") as partial:
            save_file({"a": np.zeros(2)}, partial / "weights")
    finally:
        os.umask(before)
    for path in (tmp_path / "weights", tmp_path / "run" / "weights"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o777 & ~mask
