"""A folder of pictures to search in: each is embedded once, and its embedding is kept beside the run."""

import json
import logging
import os
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Several
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from hashlib import sha256
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tqdm import tqdm

from ...pipeline.data.images import SUFFIXES, PictureFile, read_picture
from ...pipeline.device import cores, within_memory
from ...pipeline.errors import OutputError, QueryError, SampleError
from ...pipeline.files import making_file
from ...pipeline.reading.reencoding import BATCH, encode_decoded
from ...pipeline.wording import counted, some_of
from ..evaluation.scoring import embed_all
from ..model import Model, facts_of_each
from ..modules.embedding import Embedding, concatenate, each, embedding_of, tensors_of
from ..runs.encoders import Encoders
from ..runs.run import EMBEDDINGS, Run
from .gallery import Searched
from .hits import Modality

SAVED_AFTER = 4096  # new pictures, after which all embeddings are saved
log = logging.getLogger("xret")

Decoded = tuple[Any, ...]  # a picture as each encoder takes it
Stamp = tuple[int, int, int]  # size, and times of modification and change in nanoseconds, of a file


class PictureFolder(Searched):
    """The pictures in a folder and below it, in the order of their names; hidden ones are left out.

    Making it embeds those that are new or whose files have changed. Those that cannot be read are left out, and a
    warning names them. The embeddings of the folder are kept in one file in the run's folder, where that is writable.

    Args:
        run: the run.
        model: its model, on `device`.
        weights: the digest of the model's weights.
        encoders: gives the run's encoders; called only when a picture is new.
        folder: of the pictures.
        device: where the embeddings are.

    Attributes:
        file_names: of the pictures that can be read, below the folder.
        unreadable: the others, and folders that cannot be listed, each with why.

    Raises:
        QueryError: there is no such folder, no picture in it or none that can be read; or the run reads videos.
        EncoderError: the encoder's weights are not found, or its features were imported.
    """

    def __init__(
        self,
        run: Run,
        model: Model,
        weights: str,
        encoders: Callable[[], Encoders],
        folder: Path,
        device: torch.device,
    ) -> None:
        self._model, self._encoders, self._folder, self._device = model, encoders, folder, device
        if any(facts.kind == "frames" for facts in facts_of_each(run.image_facts)):
            raise QueryError(f"{run.path} searches videos, and a folder of pictures holds none; leave --images out")
        self.unreadable: dict[str, str] = {}
        stamps = self._list()
        key = sha256(
            "\n".join((weights, *run.info.fingerprints("image"), str(folder.resolve()))).encode("utf-8", "replace")
        )
        self._file = run.path / EMBEDDINGS / f"{key.hexdigest()[:32]}.safetensors"
        known, embedding = _load(self._file)
        same = {name: row for row, (name, stamp) in enumerate(known.items()) if stamps.get(name) == stamp}
        self._names = list(same)
        rows = torch.tensor(list(same.values()))
        self._parts = [each(itemgetter(rows), embedding)] if embedding is not None and same else []
        self._embed([name for name in stamps if name not in same], stamps)
        self.file_names = sorted(self._names)
        if self.unreadable:
            listed = some_of([f"{name} ({reason})" for name, reason in sorted(self.unreadable.items())])
            said = f"{counted(len(self.unreadable), 'picture')} of {folder} cannot be read: {', '.join(listed)}"
            if not self.file_names:
                raise QueryError(said)
            log.warning("%s", said)
        elif not self.file_names:
            raise QueryError(f"there is no picture in {folder} or below it; pictures end in {', '.join(SUFFIXES)}")

    @cached_property
    def images(self) -> Embedding:
        """The pictures' embeddings, float32: [I, D], [I, K, D], or a Gaussian or Sequence of I."""
        row_of = {name: row for row, name in enumerate(self._names)}
        order = torch.tensor([row_of[name] for name in self.file_names])
        return each(lambda t: t[order].to(self._device), concatenate(self._parts))

    def of(self, modality: Modality) -> Embedding:
        """Return the embeddings of the pictures; there are no captions."""
        assert modality == "images", "a folder has no captions"
        return self.images

    def names(self, modality: Modality) -> tuple[list[str], list[str]]:
        """Return the names of the pictures, which are their ids, too."""
        return self.file_names, self.file_names

    def picture(self, row: int) -> PictureFile | Path:
        """Return the content of the file of a picture, or its path where that has become unreadable."""
        return read_picture(self._folder / self.file_names[row])

    def _list(self) -> dict[str, Stamp]:
        """Return the stamps of all pictures by name, sorted."""
        if not self._folder.is_dir():
            raise QueryError(f"there is no folder {self._folder}; give one that holds pictures as --images")
        found: dict[str, Stamp] = {}
        for path, folders, names in os.walk(self._folder, onerror=self._note):
            folders[:] = [name for name in folders if not name.startswith(".")]
            for file in (Path(path, name) for name in names if name.lower().endswith(SUFFIXES) and name[0] != "."):
                try:
                    status = file.stat()
                    stamp = status.st_size, status.st_mtime_ns, status.st_ctime_ns
                    found[file.relative_to(self._folder).as_posix()] = stamp
                except OSError as error:
                    self._note(error)
        return dict(sorted(found.items()))

    def _note(self, error: OSError) -> None:
        self.unreadable[os.path.relpath(error.filename, self._folder)] = (error.strerror or str(error)).lower()

    def _embed(self, new: list[str], stamps: dict[str, Stamp]) -> None:
        """Embed pictures while threads decode the next ones, and save all embeddings now and then and at the end."""
        if not new:
            return
        encoders, unsaved = self._encoders(), 0
        try:
            with tqdm(total=len(new), desc="images", unit="image", disable=None) as bar:
                for decoded in _decoded_ahead(new, lambda name: self._decode(encoders, name)):
                    self._embed_batch(encoders, {name: one for name, one in decoded.items() if one is not None})
                    bar.update(len(decoded))
                    unsaved += len(decoded)
                    if unsaved >= SAVED_AFTER:
                        self._save(stamps)
                        unsaved = 0
        finally:  # also what was computed before Ctrl-C
            self._save(stamps)

    def _decode(self, encoders: Encoders, name: str) -> Decoded | None:
        """Return a picture as each encoder takes it; None, with the reason noted, where it cannot be read."""
        try:
            picture = read_picture(self._folder / name)
            return tuple(encoder.decode(picture)[0] for encoder, _ in encoders)
        except SampleError as error:
            self.unreadable[name] = error.reason
            return None

    def _embed_batch(self, encoders: Encoders, pictures: dict[str, Decoded]) -> None:
        """Embed up to `BATCH` pictures; those whose features are beyond their dtype are left out."""
        if not pictures:
            return
        with within_memory(self._device):
            features, usable = encode_decoded(encoders, str(self._device), list(zip(*pictures.values(), strict=True)))
            if usable.all():
                self._parts.append(each(lambda t: t.cpu(), embed_all(self._model.embed_images, [features])))
                self._names += pictures
                return
        for name in [name for name, good in zip(pictures, usable, strict=True) if not good]:
            self.unreadable[name] = "its features are beyond their dtype or no numbers"
            del pictures[name]
        self._embed_batch(encoders, pictures)

    def _save(self, stamps: dict[str, Stamp]) -> None:
        if not self._parts:
            return
        self._parts = [concatenate(self._parts)]
        known = json.dumps({name: stamps[name] for name in self._names})
        tensors = {name: tensor.contiguous() for name, tensor in tensors_of(self._parts[0]).items()}
        try:
            with making_file(self._file, OutputError) as partial:
                save_file(tensors, partial, {"files": known})
        except OutputError as error:
            log.warning("the embeddings of the pictures are not kept: %s", error)


def _load(file: Path) -> tuple[dict[str, Stamp], Embedding | None]:
    """Return the stamps of the pictures whose embeddings a file holds, and these; none where it is damaged."""
    try:
        with safe_open(file, "pt") as opened:
            embedding = embedding_of({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118
            known = json.loads(opened.metadata()["files"])
        return {name: tuple(stamp) for name, stamp in known.items()}, embedding
    except (OSError, SafetensorError, LookupError, TypeError, ValueError):
        return {}, None


def _decoded_ahead(names: Several[str], decode: Callable[[str], Decoded | None]) -> Iterator[dict[str, Decoded | None]]:
    """Yield what `decode` gives of names, a batch at a time, while threads decode the next batch."""
    with ThreadPoolExecutor(max(2, cores()), "decode-pictures") as pool:
        ahead: dict[str, Future[Decoded | None]] = {}
        for first in range(0, len(names) + BATCH, BATCH):
            begun = {name: pool.submit(decode, name) for name in names[first : first + BATCH]}
            if ahead:
                yield {name: future.result() for name, future in ahead.items()}
            ahead = begun
