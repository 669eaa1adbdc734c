"""Tar shards as webdataset names them: ``key.jpg`` with ``key.txt`` or ``key.json``.

A key ends at the first dot of a file's name. The JSON has ``caption``, a text, or ``captions``, a list of texts, which
go before the text file, and perhaps ``split``. Members with other suffixes are left alone, as is ``key.seg.png`` beside
a picture of its key.
"""

import tarfile
from collections.abc import Iterator
from typing import Any, BinaryIO

import fsspec

from ...documents import DocumentError, parse_json
from ...errors import ManifestError
from ...wording import reason
from ..caption_files import Entry, Fault, file_name
from ..images import SUFFIXES, PictureFile
from .source import PackedReader

_PADDING = 1 << 20  # bytes of zeros that may follow an archive's end


class TarReader(PackedReader):
    """Pictures in tar files; a place is an offset and so many bytes."""

    def _read(self, url: str, name: str, first: int, second: int) -> PictureFile:
        fs, path = fsspec.core.url_to_fs(url)
        data = fs.cat_file(path, start=first, end=first + second) if second else b""
        if len(data) != second:
            raise ValueError("the file ends before it")
        return PictureFile(data, f"{url}: {name}")


# Members of a key with their names, by kind: ``picture``, ``txt``, ``json``, and the last ``dotted`` and ``link``.
_Sample = dict[str, tuple[str, Any]]


def tar_entries(url: str, number: int, split: str | None, fault: Fault) -> Iterator[Entry]:
    """Yield the pictures of archive `number`, in its order; the pictures themselves are not read.

    `split` is that of all; None: as their JSON says. `fault` is called for a picture without captions, captions without
    a picture, and links. ManifestError: it is damaged or incomplete, or two members of a key say the same thing.
    """
    samples: dict[str, _Sample] = {}
    try:
        with fsspec.open(url, "rb").open() as opened, tarfile.open(fileobj=opened, mode="r:") as archive:
            while (member := archive.next()) is not None:
                archive.members = []  # type: ignore[attr-defined]  # they would fill the memory
                if not member.isdir():
                    _take(samples, archive, member, number, url)
            _require_end(opened, archive.offset, url)
    except (tarfile.TarError, EOFError, OSError) as error:
        raise ManifestError(f"{url}: this is not a whole tar file ({reason(error)}); restore it.") from error
    for key, sample in samples.items():
        captions, (name, place) = _captions(sample, f"{url}: {key}"), sample.get("picture", ("", None))
        if "link" in sample:
            advice = "pack the file itself, as tar --dereference --hard-dereference does"
            fault(f"{url}: {sample['link'][0]}", f"it is a link, or sparse; {advice}")
        elif name and captions:
            yield Entry(name, split or sample.get("json", ("", {}))[1].get("split"), captions, place=place)
        elif name:
            fault(f"{url}: {name}", f"it has no captions; add {key}.txt or {key}.json, or take the picture out")
        elif "dotted" in sample:
            advice = f"its key ends at the first dot, and '{key}' has no picture; take the other dots out of its name"
            fault(f"{url}: {sample['dotted'][0]}", advice)
        else:
            fault(f"{url}: {key}", f"these captions have no picture; add {key}.jpg or the like, or take them out")


def _take(
    samples: dict[str, _Sample], archive: tarfile.TarFile, member: tarfile.TarInfo, number: int, url: str
) -> None:
    """Add a member to the sample of its key, unless it is of another kind."""
    above, _, last = member.name.rpartition("/")
    stem, _, suffix = last.partition(".")
    kind = suffix.lower()
    if f".{kind}".endswith(SUFFIXES):
        kind = "dotted" if "." in kind else "picture"
    if kind not in ("picture", "dotted", "txt", "json") or last.startswith((".", "__")):
        return
    name, key = file_name(last, url, above), file_name(stem, url, above)
    if kind != "dotted" and (not member.isreg() or member.sparse is not None):
        kind = "link"
    found: Any = (number, member.offset_data, member.size)
    try:
        if kind in ("txt", "json"):
            file = archive.extractfile(member)
            assert file is not None, "a regular file"
            text = file.read().decode("utf-8-sig")
            found = text.strip() if kind == "txt" else parse_json(text)
    except (UnicodeDecodeError, DocumentError) as error:
        raise ManifestError(f"{url}: {name} is not UTF-8 or not valid JSON ({error}); correct it.") from error
    if kind == "json":
        if not isinstance(found, dict) or not isinstance(found.get("split"), str | None) or found.get("split") == "":
            raise ManifestError(f"{url}: {name} is not a mapping with captions and texts; correct it.")
        found = {one: found[one] for one in ("captions", "caption", "split") if found.get(one)}
    sample = samples.setdefault(key, {})
    if kind in sample and kind not in ("dotted", "link"):
        raise ManifestError(f"{url}: the key '{key}' has {name} and {sample[kind][0]}; remove one of them.")
    sample[kind] = name, found


def _captions(sample: _Sample, where: str) -> list[tuple[str, int | None]]:
    """Return the captions of a key, perhaps none."""
    document = sample.get("json", ("", {}))[1]
    texts = document.get("captions") or document.get("caption")
    if texts is None:
        texts = [sample["txt"][1]] if "txt" in sample else []
    texts = [texts] if isinstance(texts, str) else texts
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ManifestError(f"{where}: its captions are not a text or a list of texts; correct them.")
    return [(text, None) for text in texts]


def _require_end(opened: BinaryIO, end: int, url: str) -> None:
    """Refuse an archive that was cut off, or one that another follows."""
    size = opened.seek(0, 2)
    opened.seek(end)
    rest = opened.read(_PADDING)
    if len(rest) < tarfile.BLOCKSIZE or any(rest) or end + len(rest) < size:
        raise ManifestError(f"{url}: the archive is cut off or goes on after its end, at byte {end:,}; restore it.")
