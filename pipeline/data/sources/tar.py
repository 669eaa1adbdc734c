"""Tar shards as webdataset names them: ``key.jpg`` with ``key.txt`` or ``key.json``.

A key ends at the first dot of a file's name. The JSON has ``caption``, a text, or ``captions``, a list of texts, which
go before the text file, and perhaps ``split``. A hard link is what it leads to. Members with other suffixes are left
alone, as is ``key.seg.png`` beside a picture of its key.
"""

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ...documents import DocumentError, parse_json
from ...errors import ManifestError
from ..caption_files import Entry, Fault
from .files import File, open_file, url_of
from .handles import PackedReader, Place, UnreadPicture

PICTURES = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm", "jp2")
_KINDS = {**dict.fromkeys(PICTURES, "picture"), "txt": "text", "json": "document"}
_READ = ("captions", "caption", "split")  # of a JSON document
_MOST_BYTES = 10_000_000  # of captions
_PADDING = 1 << 20  # bytes of zeros that may stand after an archive's end


@dataclass(slots=True)
class _Sample:
    """The members of one key."""

    name: str = ""  # of the picture
    place: Place = (0, 0, 0)  # number of the file, offset and length of the picture
    text: str | None = None
    document: dict[str, Any] | None = None
    astray: tuple[tuple[str, str], ...] = ()  # names of links that lead nowhere, and what to do
    dotted: tuple[str, ...] = ()  # of pictures with further dots


class TarReader(PackedReader[tuple[BinaryIO, int]]):
    """Pictures in tar files; a place is an offset and so many bytes."""

    def begin(self, number: int) -> tuple[BinaryIO, int]:
        """Open an archive."""
        file = self.source.files[number]
        return open_file(self.folder, file), file.size

    def find(self, handle: tuple[BinaryIO, int], first: int, second: int) -> UnreadPicture:
        """Return the bytes from an offset, so many."""
        opened, size = handle
        if first + second > size:
            raise IndexError(first + second)

        def take() -> bytes:
            opened.seek(first)
            data = opened.read(second)
            if len(data) < second:
                raise EOFError("the file ends before it")
            return data

        return UnreadPicture(second, take)

    def end(self, handle: tuple[BinaryIO, int]) -> None:
        """Close an archive."""
        handle[0].close()


def tar_entries(folder: str | Path, number: int, file: File, split: str | None, fault: Fault) -> Iterator[Entry]:
    """Yield the pictures of one archive, in its order; the pictures themselves are not read.

    Args:
        folder: where the file's name starts.
        number: of the file, which stands in the places.
        file: the archive.
        split: of all its pictures; None: as its JSON says.
        fault: hears of a picture without captions, of captions without a picture, and of what is not read.

    Raises:
        ManifestError: it is damaged or incomplete, or has two members of a key that say the same thing.
    """
    url = url_of(folder, file.name)
    samples: dict[str, _Sample] = {}
    try:
        with open_file(folder, file) as opened, tarfile.open(fileobj=opened, mode="r:") as archive:
            end = 0
            while (member := archive.next()) is not None:
                archive.members = []  # type: ignore[attr-defined]  # they would fill the memory
                end = archive.offset
                if not member.isdir():
                    _take(samples, archive, member, number, url)
            _require_end(opened, end, file.size, url)
    except (tarfile.TarError, EOFError, OSError) as error:
        raise ManifestError(f"{url}: this is no whole tar file ({error}); restore it.") from error
    for key, sample in samples.items():
        captions = _captions(sample, f"{url}: {sample.name}") if sample.name else None
        for name, reason in _faults(key, sample, captions is not None):
            fault(f"{url}: {name}", reason)
        if captions is None:
            continue
        told = (sample.document or {}).get("split")
        if split is None and told is not None and (not isinstance(told, str) or not told):
            raise ManifestError(f"{url}: {key}.json: the split is no text; correct it.")
        yield Entry(sample.name, split or told, [(text, None) for text in captions], place=sample.place)


def _faults(key: str, sample: _Sample, captioned: bool) -> Iterator[tuple[str, str]]:
    """Yield names of members that are not read, or lack something, and what to do."""
    yield from sample.astray
    if not sample.name:
        for name in sample.dotted:
            yield (
                name,
                f"its key ends at the first dot, and '{key}' has no picture; take the other dots out of its name",
            )
        if not sample.astray and not sample.dotted:
            name = f"{key}.{'txt' if sample.document is None else 'json'}"
            yield name, f"it has no picture; add {key}.jpg or the like, or take it out"
    elif not captioned and not sample.astray:
        yield sample.name, f"it has no captions; add {key}.txt or {key}.json, or take the picture out"


def _take(
    samples: dict[str, _Sample], archive: tarfile.TarFile, member: tarfile.TarInfo, number: int, url: str
) -> None:
    """Take a member into the sample of its key, if it is of any use."""
    key, name, suffix = _parts(member.name)
    kind = _KINDS.get(suffix)
    dotted = kind is None and suffix.rpartition(".")[2] in PICTURES
    if not (kind or dotted) or name.rpartition("/")[2].startswith((".", "__")):
        return
    if name.startswith("/") or "\\" in name or "\0" in name or ".." in name.split("/"):
        raise ManifestError(f"{url}: '{name}' leaves the archive's folder; name its members otherwise.")
    sample = samples.setdefault(key, _Sample())
    if kind is None:
        sample.dotted += (name,)
        return
    held = {"picture": sample.name or None, "text": sample.text, "document": sample.document}
    if held[kind] is not None:
        what = {"picture": "two pictures", "text": "two texts", "document": "two JSON documents"}[kind]
        raise ManifestError(f"{url}: the key '{key}' has {what}, the second one is {name}; remove one of them.")
    if not member.isreg():
        _take_link(samples, sample, member, kind)
        return
    if kind == "picture":
        if member.sparse is not None:
            raise ManifestError(f"{url}: {name} is stored as a sparse file; pack it whole.")
        sample.name, sample.place = name, (number, member.offset_data, member.size)
        return
    if member.size > _MOST_BYTES:
        raise ManifestError(
            f"{url}: {name} has {member.size:,} bytes, and captions at most {_MOST_BYTES:,}; shorten it."
        )
    file = archive.extractfile(member)
    assert file is not None, "a regular file"
    try:
        text = file.read().decode("utf-8-sig")
        if kind == "text":
            sample.text = text.strip()
            return
        document = parse_json(text)
    except UnicodeDecodeError as error:
        raise ManifestError(f"{url}: {name} is not UTF-8 ({error.reason}); save it as UTF-8.") from error
    except DocumentError as error:
        raise ManifestError(f"{url}: {name} is not valid JSON ({error}); correct it.") from error
    if not isinstance(document, dict):
        raise ManifestError(f"{url}: {name} is no mapping with 'caption' or 'captions'; correct it.")
    sample.document = {key: document[key] for key in _READ if key in document}


def _take_link(samples: dict[str, _Sample], sample: _Sample, member: tarfile.TarInfo, kind: str) -> None:
    """Take what a hard link leads to, a member before it."""
    _, name, _ = _parts(member.name)
    key, target, suffix = _parts(member.linkname)
    other = samples.get(key) if member.islnk() and _KINDS.get(suffix) == kind else None
    if other is not None and kind == "picture" and other.name == target:
        sample.name, sample.place = name, other.place
    elif other is not None and kind == "text" and other.text is not None:
        sample.text = other.text
    elif other is not None and kind == "document" and other.document is not None:
        sample.document = other.document
    else:
        how = "--hard-dereference" if member.islnk() else "--dereference"
        sample.astray += ((name, f"it is a link, and not read; pack the file itself, as tar {how} does"),)


def _parts(name: str) -> tuple[str, str, str]:
    """Return the key of a member, its name, and its suffix in lower case: all after the first dot."""
    above, slash, last = name.removeprefix("./").rpartition("/")
    stem, _, suffix = last.partition(".")
    return f"{above}{slash}{stem}", f"{above}{slash}{last}", suffix.lower()


def _captions(sample: _Sample, where: str) -> list[str] | None:
    """Return the captions of a picture; None where it has none."""
    document = sample.document or {}
    for told in (document.get("captions"), document.get("caption")):
        texts = [told] if isinstance(told, str) else told
        if texts:
            if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
                raise ManifestError(f"{where}: its captions are neither a text nor a list of texts; correct them.")
            return texts
    return None if sample.text is None else [sample.text]


def _require_end(opened: BinaryIO, end: int, size: int, url: str) -> None:
    """Refuse an archive that was cut off, or after whose end something else stands."""
    opened.seek(end)
    rest = opened.read(_PADDING)
    if len(rest) < tarfile.BLOCKSIZE or any(rest[: tarfile.BLOCKSIZE]):
        raise ManifestError(f"{url}: the archive is cut off or damaged at byte {end:,}; restore it.")
    if any(rest) or end + len(rest) < size:
        raise ManifestError(f"{url}: something stands after the end of the archive at byte {end:,}; pack it anew.")
