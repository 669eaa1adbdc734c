"""Tar shards as webdataset names them: ``key.jpg`` with ``key.txt`` (or ``.text``, ``.caption``) or ``key.json``.

A key ends at the first dot of a file's name. The JSON has ``captions``, ``caption`` or ``text``, a text or a list of
texts, which go before the text file, and perhaps ``split``. Members with other suffixes are left alone, as is
``key.seg.png`` beside a picture of its key.
"""

import tarfile
from collections.abc import Iterator
from typing import Any, BinaryIO

from ...documents import DocumentError, parse_json, reading
from ...errors import ManifestError
from ..image_columns import ImageSample
from ..images import SUFFIXES, PictureFile
from ..rows import CAPTIONS, RowReader, file_name
from .files import file_system
from .source import PackedReader

_PADDING = 1 << 20  # bytes of zeros that may follow an archive's end


class TarReader(PackedReader):
    """Pictures in tar files; a place is an offset and so many bytes."""

    def _read(self, url: str, name: str, first: int, second: int) -> PictureFile:
        fs, path = file_system(url)
        data = fs.cat_file(path, start=first, end=first + second) if second else b""
        if len(data) != second:
            raise ValueError("the file ends before it")
        return PictureFile(data, f"{url}: {name}")


# Members of a key with their names, by kind: ``picture``, ``txt``, ``json``, the last ``dotted`` and ``link``; and
# ``wrong``, what is wrong with one.
_Sample = dict[str, tuple[str, Any]]


def tar_rows(url: str, number: int, split: str | None, reader: RowReader) -> Iterator[tuple[str, ImageSample | None]]:
    """Yield the pictures of archive `number` with its URL, in its order; the pictures themselves are not read.

    `split` is that of all; None: as their JSON says. Wrong are a picture without captions, captions without a picture,
    links, and two members of a key that say the same thing. ManifestError: the archive is damaged or incomplete.
    """
    samples: dict[str, _Sample] = {}
    with reading(url, errors=(tarfile.TarError, EOFError, OSError)):
        fs, path = file_system(url)
        with fs.open(path, "rb") as opened, tarfile.open(fileobj=opened, mode="r:") as archive:
            while (member := archive.next()) is not None:
                archive.members = []  # type: ignore[attr-defined]  # they would fill the memory
                try:
                    _take(samples, archive, member, number, url)
                except ManifestError as error:
                    reader.leave_out(error)
            _require_end(opened, archive.offset, url)
    for key, sample in samples.items():
        (name, place), (document, row) = sample.get("picture", ("", None)), sample.get("json", ("", {}))
        if fault := _fault(sample, key):
            reader.leave_out(f"{url}: {fault}")
        else:
            text = sample.get("txt", [None])[-1]
            image = reader.image(row, f"{url}: {document or name}", split, name=name, text=text)
            if image is not None:
                image.place = place
            yield url, image


def _fault(sample: _Sample, key: str) -> str | None:
    if "wrong" in sample:
        return str(sample["wrong"][1])
    if "link" in sample:
        advice = "pack the file itself, as `tar --dereference --hard-dereference` does"
        return f"{sample['link'][0]}: it is a link, or sparse; {advice}"
    if "picture" in sample:
        advice = f"it has no captions; add {key}.txt or {key}.json with 'caption', or take the picture out"
        return None if {"txt", "json"} & sample.keys() else f"{sample['picture'][0]}: {advice}"
    if "dotted" in sample:
        advice = f"its key ends at the first dot, and '{key}' has no picture; take the other dots out of its name"
        return f"{sample['dotted'][0]}: {advice}"
    return f"{key}: these captions have no picture; add {key}.jpg or the like, or take them out"


def _take(
    samples: dict[str, _Sample], archive: tarfile.TarFile, member: tarfile.TarInfo, number: int, url: str
) -> None:
    above, _, last = member.name.rpartition("/")
    stem, _, suffix = last.partition(".")
    kind = suffix.lower()
    if f".{kind}".endswith(SUFFIXES):
        kind = "dotted" if "." in kind else "picture"
    kind = "txt" if kind in CAPTIONS else kind
    if kind not in ("picture", "dotted", "txt", "json") or last.startswith((".", "__")) or member.isdir():
        return
    name, key = file_name(last, url, above), file_name(stem, url, above)
    if kind != "dotted" and (not member.isreg() or member.sparse is not None):
        kind = "link"
    sample, wrong = samples.setdefault(key, {}), ""
    found: Any = (number, member.offset_data, member.size)
    try:
        if kind in ("txt", "json"):
            file = archive.extractfile(member)
            assert file is not None, "a regular file"
            text = file.read().decode("utf-8-sig")
            found = text.strip() if kind == "txt" else parse_json(text)
            if kind == "json" and not isinstance(found, dict):
                wrong = f"{name} is not a mapping with captions and texts; correct it."
    except (UnicodeDecodeError, DocumentError) as error:
        wrong = f"{name} is not UTF-8 or not valid JSON ({error}); correct it."
    if kind in sample and kind not in ("dotted", "link"):
        wrong = f"the key '{key}' has {name} and {sample[kind][0]}; remove one of them."
    if wrong:
        sample["wrong"] = name, wrong
    sample[kind] = name, found


def _require_end(opened: BinaryIO, end: int, url: str) -> None:
    size = opened.seek(0, 2)
    opened.seek(end)
    rest = opened.read(_PADDING)
    if len(rest) < tarfile.BLOCKSIZE or any(rest) or end + len(rest) < size:
        raise ManifestError(f"{url}: the archive is cut off or goes on after its end, at byte {end:,}; restore it.")
