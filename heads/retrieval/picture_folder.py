"""A folder of pictures to search in: each is embedded once, by what stands in its file, and kept beside the run."""

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Several
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...pipeline.data.digests import digest, digest_of
from ...pipeline.data.images import SUFFIXES, picture_file
from ...pipeline.device import cores, within_memory
from ...pipeline.encoders.weights import digest as digest_of_tensors
from ...pipeline.errors import QueryError, SampleError
from ...pipeline.progress import Progress
from ...pipeline.reading.reencoding import BATCH, encode_decoded
from ...pipeline.wording import counted, printable, some_of
from ..evaluation.scoring import embed_all
from ..model import Model, facts_of_each
from ..modules.embedding import Embedding, each
from ..runs.encoders import ImageEncoders
from ..runs.run import EMBEDDINGS, Run
from .gallery import Searched
from .hits import Modality
from .kept import Kept, KnownFiles, Stamp

_FORMAT, _DIGITS = "1", 12


class _Seen(NamedTuple):
    """What is known of a picture: its name, and its digest or why it cannot be read."""

    name: str
    stamp: Stamp | None = None
    key: bytes | None = None
    reason: str = ""
    read: bool = False  # its file was
    decoded: "tuple[Any, ...] | None" = None  # by each encoder; None where its embedding is kept


class PictureFolder(Searched):
    """The pictures in a folder and below it, in the order of their names; hidden ones are left out.

    Making it embeds those that are new, and keeps their embeddings. Those that cannot be read are left out, as a note
    says. Of the pixels it holds those of a few batches.

    Args:
        run: the run.
        model: its model, on `device`.
        encoders: gives its encoders; called where there is a new picture.
        folder: of the pictures.
        place: where embeddings are kept; None: in the folder of the run.
        device: where the embeddings are.

    Attributes:
        folder: as given.
        file_names: of the pictures that can be read, below the folder.
        unreadable: the others, and files that cannot be listed, each with why.

    Raises:
        QueryError: there is no such folder, no picture in it or none that can be read; or the run reads videos.
        EncoderError: the encoder's weights are not found, or its features were imported.
        OutputError: embeddings cannot be kept there.
    """

    def __init__(
        self,
        run: Run,
        model: Model,
        encoders: Callable[[], ImageEncoders],
        folder: Path,
        place: Path | None,
        device: torch.device,
    ) -> None:
        super().__init__(run)
        self._model, self._encoders, self.folder, self._device = model, encoders, folder, device
        if any(facts.kind == "frames" for facts in facts_of_each(run.image_facts)):
            raise QueryError(f"{run.path} searches videos, and a folder of pictures holds none; leave --images out")
        place = place or run.path / EMBEDDINGS
        parts = run.recipe.model, run.recipe.adapter, run.recipe.aggregator["image"], run.image_facts
        # Of the weights that are loaded: another process may have exchanged the file since.
        made_by = digest_of_tensors(model.image.state_dict()), repr(parts), *run.info.prints("image")
        self._kept = Kept(place / digest("\n".join((_FORMAT, *made_by)).encode()).hex())
        self._known, self._loading = KnownFiles(place, folder), threading.Lock()
        self.unreadable: dict[str, str] = {}
        names = self._listed()
        self._keys = self._look_through(names)
        self.file_names = list(self._keys)
        if self.unreadable:
            listed = some_of([f"{name} ({reason})" for name, reason in self.unreadable.items()])
            said = f"{counted(len(self.unreadable), 'picture')} of {folder} cannot be read: {', '.join(listed)}"
            if not self.file_names:
                raise QueryError(f"{said}; give a folder with other pictures as --images")
            print(printable(f"Note: {said}."), file=sys.stderr)
        elif not names:
            kinds = ", ".join(SUFFIXES)
            raise QueryError(f"there is no picture in {folder} or below it; pictures end in {kinds}")

    @cached_property
    def images(self) -> Embedding:
        """The pictures' embeddings, float32: [I, D], [I, K, D], or a Gaussian or Sequence of I."""
        try:
            found = self._kept.of(list(self._keys.values()))
        except KeyError:  # a file of embeddings is damaged
            self._keys = self._look_through(self.file_names)
            self.file_names = list(self._keys)
            return self.images
        return each(lambda t: t.to(self._device), found)

    def of(self, modality: Modality) -> Embedding:
        """Return the embeddings of the pictures; there are no captions."""
        assert modality == "images", "a folder has no captions"
        return self.images

    def names(self, modality: Modality) -> tuple[list[str], list[str]]:
        """Return the ids of the pictures, of what stands in their files, and their names."""
        return [key.hex()[:_DIGITS] for key in self._keys.values()], self.file_names

    def _listed(self) -> list[str]:
        if not self.folder.is_dir():
            raise QueryError(f"there is no folder {self.folder}; give one that holds pictures as --images")
        found: list[str] = []
        for path, folders, names in os.walk(self.folder, onerror=self._cannot_list):
            folders[:] = [name for name in folders if not name.startswith(".")]
            pictures = (name for name in names if name.lower().endswith(SUFFIXES) and not name.startswith("."))
            found += [Path(path, name).relative_to(self.folder).as_posix() for name in pictures]
        return sorted(found)

    def _cannot_list(self, error: OSError) -> None:
        self.unreadable[str(error.filename)] = (error.strerror or str(error)).lower()

    def _look_through(self, names: list[str]) -> dict[str, bytes]:
        """Return the digests of the pictures that can be read, by their names; all of them are embedded and kept."""
        keys: dict[str, bytes] = {}
        new: list[_Seen] = []
        with ExitStack() as stack:
            stack.push(lambda error, *_: self._known.save(complete=error is None))
            stack.callback(self._kept.flush)  # also of what was stopped
            pool = stack.enter_context(ThreadPoolExecutor(max(2, cores()), "read-pictures"))
            stack.callback(pool.shutdown, cancel_futures=True)
            progress: Progress | None = None
            for number, seen in enumerate(_ahead(pool, self._look_at, names)):
                if seen.read and progress is None:
                    progress = stack.enter_context(Progress("images", len(names), "images", done=number))
                if seen.key is None or seen.stamp is None:
                    self.unreadable[seen.name] = seen.reason
                else:
                    keys[seen.name] = seen.key
                    self._known.note(seen.name, seen.stamp, seen.key)
                if seen.decoded is not None:
                    new.append(seen)
                if len(new) == BATCH or number == len(names) - 1:
                    self._embed(new)
                    new.clear()
                if progress is not None:
                    progress.update(1)
        return {name: key for name, key in keys.items() if key in self._kept}

    def _look_at(self, name: str) -> _Seen:
        """Find out what a picture is, and decode one that is new; runs in a thread."""
        try:
            stamp = self._known.stamp(name)
            key = self._known.digest(name, stamp)
            if key is not None and key in self._kept:
                return _Seen(name, stamp, key)
            picture = picture_file(self.folder / name)
            key = digest_of(picture)
            if key in self._kept:
                return _Seen(name, stamp, key, read=True)
            with self._loading:
                self._kept.require_writable()
                encoders = self._encoders()
            return _Seen(name, stamp, key, "", True, tuple(encoder.decode(picture)[0] for encoder, _ in encoders))
        except SampleError as error:
            return _Seen(name, reason=error.reason, read=True)
        except OSError as error:
            return _Seen(name, reason=(error.strerror or str(error)).lower(), read=True)

    def _embed(self, new: Several[_Seen]) -> None:
        """Embed new pictures, and keep what comes of it; one whose features are no numbers is left out."""
        if not new:
            return
        decoded = list(zip(*(one.decoded or () for one in new), strict=True))
        with within_memory(self._device):
            features, usable = encode_decoded(self._encoders(), str(self._device), decoded)
            if usable.all():
                self._kept.add([one.key or b"" for one in new], embed_all(self._model.embed_images, [features]))
                return
        for one in (one for one, good in zip(new, usable, strict=True) if not good):
            self.unreadable[one.name] = "its features are beyond their dtype or no numbers"
        self._embed([one for one, good in zip(new, usable, strict=True) if good])


def _ahead(pool: ThreadPoolExecutor, look: Callable[[str], _Seen], names: Several[str]) -> Iterator[_Seen]:
    """Yield what is seen of each name, in order, while threads look at the next two batches."""
    begun: deque[Future[_Seen]] = deque()
    for name in names:
        begun.append(pool.submit(look, name))
        if len(begun) > 2 * BATCH:
            yield begun.popleft().result()
    while begun:
        yield begun.popleft().result()
