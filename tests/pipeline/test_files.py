"""Places that cannot be written are refused beforehand; what is written appears whole or not at all."""

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from small_disk import small_disk

from xret.pipeline.errors import CacheError, OutputError, RunError
from xret.pipeline.files import (
    link,
    making,
    making_file,
    partials,
    partials_in,
    remove,
    require_new,
    require_writable,
    write_bytes,
    write_text,
    writing,
)


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


def test_a_file_appears_whole_or_stays_as_it_was(tmp_path):
    path = tmp_path / "deep" / "file"
    write_text(path, "oldé")
    with pytest.raises(ZeroDivisionError), writing(path) as partial:
        partial.write_text("half")
        assert path.read_bytes() == "oldé".encode()
        raise ZeroDivisionError
    assert [entry.name for entry in path.parent.iterdir()] == ["file"]
    write_bytes(path, b"new")
    assert path.read_bytes() == b"new"


def test_a_folder_appears_whole_in_a_place_that_is_absent_or_empty(tmp_path):
    (tmp_path / "empty").mkdir()
    for name in ("new", "empty"):
        with making(tmp_path / name) as partial:
            (partial / "file").write_text("mine")
        assert (tmp_path / name / "file").read_text() == "mine"
    (tmp_path / "file").write_text("mine")
    for name in ("new", "file"):
        with pytest.raises(OSError, match=r"not empty|Not a directory"), making(tmp_path / name) as partial:
            (partial / "other").mkdir()
    with pytest.raises(ZeroDivisionError), making(tmp_path / "failed") as partial:
        (partial / "file").write_text("mine")
        raise ZeroDivisionError
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["empty", "file", "new"]


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_files_and_folders_have_the_mode_that_the_user_chose(tmp_path, mask):
    before = os.umask(mask)
    try:
        write_text(tmp_path / "file", "mine")
        with making(tmp_path / "folder"):
            pass
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o666 & ~mask
    assert (tmp_path / "folder").stat().st_mode & 0o777 == 0o777 & ~mask


def put(path, data, *failure):
    with writing(path, *failure) as partial:
        partial.write_bytes(data)


def test_where_nothing_can_be_written_it_is_the_callers_error(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(RunError, match=r"file/x cannot be written: Not a directory; choose another --out$"):
        put(tmp_path / "file" / "x", b"", RunError, "choose another --out")
    with pytest.raises(RunError, match=r"tmp.* cannot be written: Is a directory$"):
        put(tmp_path, b"", RunError)
    with pytest.raises(NotADirectoryError):
        put(tmp_path / "file" / "x", b"")
    with pytest.raises(CacheError, match=r"^another error$"), writing(tmp_path / "x", RunError):
        raise CacheError("another error")
    with small_disk(100), pytest.raises(RunError, match=r"big cannot be written: File too large; make room$"):
        put(tmp_path / "big", bytes(1000), RunError, "make room")
    refusal = pytest.raises(RunError, match=r"big cannot be written: .*[tT]oo ?[lL]arge")  # in words of safetensors
    with small_disk(100), refusal, writing(tmp_path / "big", RunError) as partial:
        save_file({"zeros": np.zeros(1000)}, partial)
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_file_that_cannot_be_put_in_its_place_leaves_the_old_one(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    write_text(tmp_path / "file", "old")
    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(RunError, match=r"file cannot be written: No space left on device"):
        write_text(tmp_path / "file", "new", RunError)
    assert [entry.read_text() for entry in tmp_path.iterdir()] == ["old"]


def test_a_killed_writer_leaves_what_was_there_and_partials_that_are_found(tmp_path):
    folder = tmp_path / "folder"  # partial files below `tmp_path` are this test's own
    write_text(folder / "file", "old")
    code = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom xret.pipeline.files import making, writing\n"
        "with writing(Path('file')) as one, making(Path('[folder]')) as other:\n"
        "    one.write_text('half'); (other / 'file').touch(); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=folder, check=False).returncode == -signal.SIGKILL
    assert (folder / "file").read_text() == "old"
    assert not (folder / "[folder]").exists()
    left = [*partials(folder / "file"), *partials(folder / "[folder]")]
    assert sorted(left) == sorted(partials_in(tmp_path)) == sorted({*folder.iterdir()} - {folder / "file"})
    for path in (*left, folder / "absent"):
        remove(path)
    assert [entry.name for entry in folder.iterdir()] == ["file"]
    assert partials(folder / "nowhere" / "file") == []


def test_a_text_takes_the_place_of_what_a_killed_writer_of_it_left(tmp_path):
    for name in ("file", "other"):
        (tmp_path / f".{name}.0a1b2c3d.partial").write_text("half")
    write_text(tmp_path / "file", "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".other.0a1b2c3d.partial", "file"]
    assert (tmp_path / "file").read_text() == "whole"


def test_links_are_followed_and_pipes_written_as_they_stand(tmp_path):
    (tmp_path / "link").symlink_to("file")
    for text in ("old", "new"):
        write_text(tmp_path / "link", text)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "new"
    os.mkfifo(tmp_path / "pipe")
    with subprocess.Popen(["cat", tmp_path / "pipe"], stdout=subprocess.PIPE) as reader:
        write_text(tmp_path / "pipe", "through")
        assert reader.stdout.read() == b"through"
    with subprocess.Popen(["cat", tmp_path / "pipe"], stdout=subprocess.PIPE) as reader:
        with making_file(tmp_path / "pipe") as place:
            place.write_text("through")
        assert reader.stdout.read() == b"through"
    assert (tmp_path / "pipe").is_fifo()


def test_a_file_is_on_the_disk_before_it_is_renamed(tmp_path, monkeypatch):
    done = []
    sync, replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (done.append(stat.S_IFMT(os.fstat(handle).st_mode)), sync(handle)))
    monkeypatch.setattr(Path, "replace", lambda *paths: (done.append("replace"), replace(*paths)))
    with writing(tmp_path / "file") as partial:
        partial.write_text("mine")
    assert done == [stat.S_IFREG, "replace", stat.S_IFDIR]


@pytest.mark.parametrize("appearing", [making, making_file])
def test_what_a_killed_writer_left_is_removed_and_what_a_living_one_writes_stays(tmp_path, appearing):
    code = (
        f"import sys\nfrom pathlib import Path\nfrom xret.pipeline.files import {appearing.__name__}\n"
        f"with {appearing.__name__}(Path('out')) as partial:\n"
        "    print(partial, flush=True); sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", code]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=tmp_path, **pipes) as killed:
        assert Path(killed.stdout.readline().strip()).exists()
        killed.kill()
    assert len(partials(tmp_path / "out")) == 1
    with subprocess.Popen(command, cwd=tmp_path, **pipes) as living:
        its_own = Path(living.stdout.readline().strip())
        assert partials(tmp_path / "out") == [its_own]
        with appearing(tmp_path / "out") as partial:
            if partial.is_file():
                save_file({"a": np.zeros(3)}, partial)
            assert sorted(partials(tmp_path / "out")) == sorted([its_own, partial])
        remove(tmp_path / "out")
        living.stdin.close()
    assert living.returncode == 0
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_one_that_is_taken_for_abandoned_before_it_is_locked_is_made_again(tmp_path, monkeypatch):
    real, opened = os.open, []

    def removed_before(path, *arguments):
        if not opened:
            opened.append(path)
            remove(path)
        return real(path, *arguments)

    monkeypatch.setattr(os, "open", removed_before)
    with making(tmp_path / "out") as partial:
        assert partial.is_dir()
        assert opened == [partial]
    assert (tmp_path / "out").is_dir()


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077])
def test_files_get_what_the_umask_gives_whatever_library_wrote_them(tmp_path, mask):
    code = f"""
import os; os.umask({mask})
from pathlib import Path
import numpy as np
from safetensors.numpy import save_file
from xret.pipeline.files import making, writing
folder = Path({str(tmp_path)!r})
with writing(folder / "weights") as partial:
    save_file({{"a": np.zeros(2)}}, partial)
with making(folder / "run") as partial:
    save_file({{"a": np.zeros(2)}}, partial / "weights")
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    for path in (tmp_path / "weights", tmp_path / "run" / "weights"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask


def test_a_link_shares_the_bytes_and_replaces_what_is_there(tmp_path):
    source, place = tmp_path / "a", tmp_path / "below" / "b"
    write_bytes(source, b"one")
    write_bytes(place, b"other")
    for _ in range(2):  # the second time it is there
        link(source, place)
        assert place.samefile(source)
        assert [path.name for path in place.parent.iterdir()] == ["b"]
    write_bytes(source, b"two")  # a file that is replaced leaves its other name alone
    assert place.read_bytes() == b"one"
    with pytest.raises(FileNotFoundError):
        link(tmp_path / "none", place)
    assert place.read_bytes() == b"one"
