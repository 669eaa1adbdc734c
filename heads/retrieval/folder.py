"""A folder of pictures to search in: each is embedded once, and its embedding is kept beside the run."""

import json
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from ...pipeline.data.images import SUFFIXES, PictureFile, read_picture
from ...pipeline.device import cores, within_memory
from ...pipeline.errors import OutputError, QueryError, SampleError
from ...pipeline.files import making_file, walk
from ...pipeline.progress import hidden
from ...pipeline.wording import counted, printable, some_of
from ..evaluation.scoring import Modality, Ranker, embed_all
from ..modules.embedding import Embedding, concatenate, each, embedding_of, tensors_of
from ..runs.encoders import BATCH, Encoders, encode_decoded
from ..runs.run import EMBEDDINGS
from .gallery import Searched

SAVED_AFTER = 128  # batches of new pictures, after which all embeddings are saved
FILES = "files"  # the stamps by name, beside the embeddings: a header would hold those of a million pictures at most
log = logging.getLogger("xret")

Stamp = tuple[int, int, int]  # size, and times of modification and change in nanoseconds, of a file


class PictureFolder(Searched):
    """The pictures in a folder and below it, in the order of their names; hidden ones are left out.

    Making it embeds, with the `encoders` of a run, those that are new or whose files have changed. Those that cannot be
    read are left out, and a warning names them. The embeddings of the folder are kept in one file in the run's folder,
    where that is writable; a user-defined model has none.

    Attributes:
        file_names, images: of the pictures that can be read, and their embeddings.
        unreadable: the others, and folders that cannot be listed, each with why.

    Raises:
        QueryError: there is no such folder, no picture in it or none that can be read; or the run reads videos.
        EncoderError: the encoder's weights are not found, or its features were imported.
    """

    def __init__(self, ranker: Ranker, folder: Path, encoders: Callable[[], Encoders]) -> None:
        self._ranker, self._folder, self._encoders, origins = ranker, folder, encoders, ranker.origins("image")
        if any(origin.kind == "frames" for origin in origins):
            raise QueryError(f"{ranker.name} searches videos, and a folder of pictures holds none; leave --images out")
        self.unreadable: dict[str, str] = {}
        stamps = self._stamps()
        key = "\n".join((ranker.digest, *(origin.fingerprint for origin in origins), str(folder.resolve())))
        digest = sha256(key.encode("utf-8", "replace")).hexdigest()
        self._file: Path | None = None
        if ranker.run is not None:
            self._file = ranker.run.path / EMBEDDINGS / f"{digest[:32]}.safetensors"
        known, embedding = _load(self._file) if self._file else ({}, None)
        same = {name: row for row, (name, stamp) in enumerate(known.items()) if stamps.get(name) == stamp}
        self._names = list(same)
        self._parts = [] if embedding is None or not same else [_rows(embedding, list(same.values()))]
        if new := [name for name in stamps if name not in same]:
            self._embed(new, stamps)
        self._report_unreadable()
        order = sorted(range(len(self._names)), key=self._names.__getitem__)
        self.file_names = [self._names[row] for row in order]
        images = each(lambda t: t.to(ranker.device), _rows(concatenate(self._parts), order))
        self.images = ranker.model.compare.normalised(images)

    def names(self, modality: Modality) -> tuple[list[str], list[str]]:
        """Return the names of the pictures, which are their ids, too."""
        return self.file_names, self.file_names

    def picture(self, row: int) -> PictureFile | Path:
        """Return the content of the file of a picture, or its path where that has become unreadable."""
        return read_picture(self._folder / self.file_names[row])

    def _stamps(self) -> dict[str, Stamp]:
        if not self._folder.is_dir():
            raise QueryError(f"there is no folder {self._folder}; give one that holds pictures as --images")
        stamps: dict[str, Stamp] = {}
        others: list[str] = []

        def note(error: OSError) -> None:
            self.unreadable[os.path.relpath(error.filename, self._folder)] = (error.strerror or str(error)).lower()

        for path, folders, names in walk(self._folder, note):
            folders[:] = [name for name in folders if not name.startswith(".")]
            for file in (Path(path, name) for name in names if name[0] != "."):
                if not file.name.lower().endswith(SUFFIXES):
                    others.append(file.relative_to(self._folder).as_posix())
                    continue
                try:
                    status = file.stat()
                    stamp = status.st_size, status.st_mtime_ns, status.st_ctime_ns
                    stamps[file.relative_to(self._folder).as_posix()] = stamp
                except OSError as error:
                    note(error)
        if others and stamps:
            named = printable(", ".join(some_of(sorted(others))))
            what = f"{counted(len(others), 'file')} of {self._folder}"
            log.warning("%s passed over, whose suffix is no picture's: %s", what, named)
        return dict(sorted(stamps.items()))

    def _report_unreadable(self) -> None:
        named = ", ".join(some_of([f"{name} ({reason})" for name, reason in sorted(self.unreadable.items())]))
        if not self._names:
            why = named or f"pictures end in {', '.join(SUFFIXES)}"
            raise QueryError(f"there is no picture that can be read in {self._folder} or below it: {why}")
        if named:
            log.warning("%s of %s cannot be read: %s", counted(len(self.unreadable), "picture"), self._folder, named)

    def _embed(self, new: list[str], stamps: dict[str, Stamp]) -> None:
        encoders = self._encoders()

        def decode(name: str) -> tuple[Any, ...] | None:  # as each encoder takes it
            try:
                picture = read_picture(self._folder / name)
                return tuple(encoder.decode(picture)[0] for encoder, _ in encoders)
            except SampleError as error:
                self.unreadable[name] = error.reason
                return None

        try:
            with ThreadPoolExecutor(cores()) as pool, tqdm(total=len(new), desc="images", disable=hidden()) as bar:
                for number, first in enumerate(range(0, len(new), BATCH), 1):
                    names = new[first : first + BATCH]
                    decoded = zip(names, pool.map(decode, names), strict=True)
                    self._embed_batch(encoders, {name: picture for name, picture in decoded if picture is not None})
                    bar.update(len(names))
                    if number % SAVED_AFTER == 0:
                        self._save(stamps)
        finally:  # also what was computed before Ctrl-C
            self._save(stamps)

    def _embed_batch(self, encoders: Encoders, pictures: dict[str, tuple[Any, ...]]) -> None:
        """Embed up to `BATCH` decoded pictures; those whose features are beyond their dtype are left out."""
        if not pictures:
            return
        decoded, device = list(zip(*pictures.values(), strict=True)), self._ranker.device
        with within_memory(device):
            features, usable = encode_decoded(encoders, str(device), decoded)
            embedding = each(Tensor.cpu, embed_all(self._ranker.model.embed_images, [features]))
        for name, good in zip(pictures, usable, strict=True):
            if good:
                self._names.append(name)
            else:
                self.unreadable[name] = "its features are beyond their dtype or no numbers"
        if usable.any():
            self._parts.append(_rows(embedding, usable.nonzero()[0].tolist()))

    def _save(self, stamps: dict[str, Stamp]) -> None:
        if not self._parts or self._file is None:
            return
        self._parts = [concatenate(self._parts)]
        known = json.dumps({name: stamps[name] for name in self._names})
        tensors = {name: tensor.contiguous() for name, tensor in tensors_of(self._parts[0]).items()}
        tensors[FILES] = torch.frombuffer(bytearray(known, "ascii"), dtype=torch.uint8)
        try:
            with making_file(self._file, OutputError) as partial:
                save_file(tensors, partial)
        except OutputError as error:
            log.warning("the embeddings of the pictures are not kept: %s", error)


def _rows(embedding: Embedding, rows: list[int]) -> Embedding:
    return each(itemgetter(torch.tensor(rows)), embedding)


def _load(file: Path) -> tuple[dict[str, Stamp], Embedding | None]:
    """Return the stamps of the pictures whose embeddings a file holds, and these; none where it is damaged."""
    try:
        with safe_open(file, "pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        known = json.loads(bytes(tensors[FILES].numpy()))
        return {name: tuple(stamp) for name, stamp in known.items()}, embedding_of(tensors)
    except (OSError, SafetensorError, LookupError, ValueError):
        return {}, None
