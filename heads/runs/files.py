"""The files of a run, which change together.

`run.json` has the SHA-256 of each file, and so says which is meant. New files are written beside their places, called
``next.NAME``; then `run.json` is replaced, which alone makes them count; then they take their places. Whoever opens a
run that was killed between two of these steps finds the files that `run.json` means, in either place.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from ...pipeline.errors import RunError
from ...pipeline.files import remove, to_disk, writing

REMEDY = "make room, or take another --out"  # where a file cannot be written
_NEXT = "next."
Writer = Callable[[Path], object]  # makes a file or a folder at a path


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, or of the names and contents of all files in a folder; OSError as of reading."""
    if path.is_file():
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    inside = sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())
    lines = "".join(f"{sha256_of(path / name)} {name}\n" for name in inside)
    return hashlib.sha256(lines.encode()).hexdigest()


def find(folder: Path, name: str, sha256: str) -> Path | None:
    """Return where the file or folder with this SHA-256 is: in its place, or still beside it; None: nowhere."""
    for path in (folder / name, folder / f"{_NEXT}{name}"):
        try:
            if path.exists() and sha256_of(path) == sha256:
                return path
        except OSError:  # it cannot be read, or has just been put in its place
            continue
    return None


def run_inside(folder: Path) -> Path | None:
    """Return a run in a folder of runs, such as the best one of a tuning; None where none is found."""
    with suppress(OSError):  # a folder that is being removed
        for pattern in ("[!.]*/run.json", "[!.]*/[!.]*/run.json"):
            for file in folder.glob(pattern):
                return file.parent
    return None


@contextmanager
def replacing(folder: Path, writers: Mapping[str, Writer]) -> Iterator[dict[str, str]]:
    """Write files or folders beside their places; they take these when the block ends, which writes `run.json`.

    Yields:
        Their SHA-256 by name.

    Raises:
        RunError: one cannot be written; all is as it was.
    """
    made: dict[str, str] = {}
    try:
        for name, write in writers.items():
            beside = folder / f"{_NEXT}{name}"
            remove(beside)
            with writing(beside, RunError, REMEDY) as partial:
                write(partial)
            made[name] = sha256_of(beside)
    except BaseException:
        for name in writers:
            remove(folder / f"{_NEXT}{name}")
        raise
    yield made
    for name in made:
        _put(folder, name)


def settle(folder: Path, files: Mapping[str, str]) -> None:
    """Finish what a kill interrupted: put in place what `files` of `run.json` means, and remove what it does not."""
    for beside in folder.glob(f"{_NEXT}*"):
        name = beside.name.removeprefix(_NEXT)
        if name in files and find(folder, name, files[name]) == beside:
            _put(folder, name)
        else:
            remove(beside)


def _put(folder: Path, name: str) -> None:
    place = folder / name
    if place.is_dir():  # a folder is not replaced in one step
        remove(place)
    (folder / f"{_NEXT}{name}").replace(place)
    to_disk(folder)  # before another is written beside it
