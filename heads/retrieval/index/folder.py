"""The folder of an index: files that only grow, and one record that says how much of them counts.

    index.json      the record, with its own digest; replaced in one step, last of all
    *.bin           embeddings, ids and labels, appended to
    elements-N.faiss    FAISS over all elements, written anew at every addition

What stands after the recorded length of a file was left by an addition that was stopped: nobody reads it, and the
next addition writes over it. A folder without a record is unfinished.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

from ....pipeline.documents import read_json
from ....pipeline.errors import RunError
from ....pipeline.files import making, to_disk, write_text

FORMAT, VERSION = "xret-index", 1
RECORD = "index.json"
CHUNK = 1 << 24  # bytes checked in one go

Facts = dict[str, Any]


class GrowingFile:
    """A file that is appended to, with its length and checksum.

    Args:
        path: the file.
        entry: ``{"bytes", "crc32c"}`` of what counts of it; None where it is new.
    """

    def __init__(self, path: Path, entry: dict[str, int] | None = None) -> None:
        self._bytes, self._crc = (entry["bytes"], entry["crc32c"]) if entry else (0, 0)
        path.touch()
        self._file = path.open("r+b")
        self._file.truncate(self._bytes)
        self._file.seek(self._bytes)

    def write(self, values: np.ndarray) -> None:
        """Append an array's bytes."""
        flat = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        self._file.write(flat.data)
        self._crc = google_crc32c.extend(self._crc, flat)
        self._bytes += len(flat)

    def close(self) -> dict[str, int]:
        """Bring all to the disk; return the entry for the record."""
        self._file.close()
        to_disk(Path(self._file.name))
        return {"bytes": self._bytes, "crc32c": self._crc}


def entry_of(path: Path) -> dict[str, int]:
    """Return ``{"bytes", "crc32c"}`` of a whole file, after bringing it to the disk."""
    to_disk(path)
    size = path.stat().st_size
    return {"bytes": size, "crc32c": checksum(path, size)}


def checksum(path: Path, size: int) -> int:
    """Return the crc32c of the first `size` bytes of a file."""
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(min(CHUNK, size)):
            crc, size = google_crc32c.extend(crc, chunk), size - len(chunk)
    return crc


def write_record(folder: Path, record: dict[str, Any]) -> None:
    """Put the record in its place in one step."""
    sealed = {"format": FORMAT, "version": VERSION, **record}
    text = json.dumps({**sealed, "digest": _digest(sealed)}, indent=1, ensure_ascii=False)
    to_disk(folder)  # the names of new files, before the record names them
    write_text(folder / RECORD, text)


def read_record(folder: Path) -> dict[str, Any]:
    """Return the record of an index, after checking it and every byte of the files that it names.

    Raises:
        RunError: there is no index; or it is unfinished, damaged, or of another version.
    """
    if not (folder / RECORD).is_file():
        raise RunError(f"{folder} is not an index, or was never finished; make one with `xret index RUN --out …`")
    try:
        record: dict[str, Any] = read_json(folder / RECORD)
        digest = record.pop("digest")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise _damaged(folder, RECORD) from error
    if digest != _digest(record):
        raise _damaged(folder, RECORD)
    if (record.get("format"), record.get("version")) != (FORMAT, VERSION):
        raise RunError(f"{folder} is not of format {FORMAT}, version {VERSION}; build it again with `xret index`")
    try:
        for name, entry in record["files"].items():
            path = folder / name
            if not path.is_file() or checksum(path, entry["bytes"]) != entry["crc32c"]:
                raise _damaged(folder, name)
    except (KeyError, AttributeError, TypeError) as error:
        raise _damaged(folder, RECORD) from error
    return record


def holds(parts: Iterable[Facts], facts: Facts) -> bool:
    """Return whether one of the `parts` of an index has all these facts."""
    return any(facts.items() <= part.items() for part in parts)


def require_part(folder: Path, parts: list[Facts], expected: Facts) -> None:
    """Raise RunError, naming what differs, if none of the `parts` of an index has the `expected` facts."""
    if holds(parts, expected):
        return
    differing = ([key for key in expected if part.get(key) != expected[key]] for part in parts)
    keys, part = min(zip(differing, parts, strict=True), key=lambda pair: len(pair[0]))
    if "weights" in keys:
        there, here = short(part.get("weights")), short(expected["weights"])
        raise RunError(
            f"{folder} is an index of another run: the weights there have the SHA-256 {there}…, those of this run"
            f" {here}…; name the run that it was built from, or build one of this run with `xret index RUN --out …`"
        )
    what = "; ".join(f"{key} is {short(part.get(key))} there and {short(expected[key])} here" for key in keys)
    raise RunError(
        f"{folder} is an index of something else: {what}; name what it was built from, or build another with"
        " `xret index RUN --out …`"
    )


@contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """Give a temporary folder that becomes `path` in one step at the end, and vanishes on an error.

    Raises:
        RunError: something is at `path` already, or it cannot be written.
    """
    if path.exists():
        raise RunError(f"{path} exists; take another --out, or add to the index there with --add")
    with making(path, RunError, "make room, or take another --out") as partial:
        yield partial


def short(value: object) -> str:
    """Return a fact as it is shown: of a digest the beginning."""
    text = str(value)
    return text[:8] if len(text) == 64 else text  # a SHA-256


def _digest(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _damaged(folder: Path, name: str) -> RunError:
    return RunError(f"{folder / name} is missing or damaged; build the index again with `xret index RUN --out …`")
