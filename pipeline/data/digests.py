"""What tells pictures and captions apart, whatever their names and places: a digest of their content."""

import hashlib
import itertools
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np

from ..errors import SampleError
from ..progress import Progress
from .images import PictureFile, frame_names, read_picture
from .samples import ImageSample, Samples
from .sources import PictureReader, open_pictures

BYTES = 16  # of a digest
NONE = bytes(BYTES)  # of what cannot be read


def digest(data: bytes) -> bytes:
    """Return the BLAKE2b of some bytes, 16 bytes."""
    return hashlib.blake2b(data, digest_size=BYTES).digest()


def digest_of(picture: PictureFile | Path) -> bytes:
    """Return the digest of a file's bytes; of a folder, of its frames' names and digests; `NONE`: it cannot be read."""
    if isinstance(picture, PictureFile):
        return digest(picture.getvalue())
    try:
        frames = frame_names(picture)
        return digest(b"".join(name.encode() + b"\0" + digest_of(read_picture(picture / name)) for name in frames))
    except (SampleError, UnicodeEncodeError):
        return NONE


def digest_at(pictures: PictureReader, name: str) -> bytes:
    """Return the digest of a picture of a source; errors but those of the sample itself as of `PictureReader.open`."""
    try:
        return digest_of(pictures.open(name))
    except SampleError:
        return NONE


def as_row(digest: bytes) -> np.ndarray:
    """Return a digest as it stands in a store, uint8 [16]."""
    return np.frombuffer(digest, dtype=np.uint8)


class Digests:
    """The digests of a data set's pictures; each is read once, when it is asked for.

    Args:
        samples: the data set.
        folder: the manifest's.
    """

    def __init__(self, samples: Samples, folder: Path) -> None:
        self._source, self._folder = samples.source, folder
        self._known: dict[str, bytes] = {}

    def of(self, images: Iterable[ImageSample]) -> list[bytes]:
        """Return the digest of each picture; errors as of `digest_at`.

        Several files are read at once; one that holds many pictures from its beginning to its end, since to go back in
        a group of rows is to read it again.
        """
        images = list(images)
        left = [image for image in images if image.file_name not in self._known]
        if left:
            left.sort(key=lambda image: image.place or (0, 0, 0))
            files = [list(of_file) for _, of_file in itertools.groupby(left, _file_of)]
            with Progress("compare files", len(left), "images") as progress, ThreadPoolExecutor(os.cpu_count()) as pool:
                for _ in pool.map(partial(self._read, progress), files):
                    pass
        return [self._known[image.file_name] for image in images]

    def _read(self, progress: Progress, images: list[ImageSample]) -> None:
        places = {image.file_name: image.place for image in images if image.place is not None}
        with closing(open_pictures(self._source, self._folder, places)) as pictures:
            for image in images:
                self._known[image.file_name] = digest_at(pictures, image.file_name)
                progress.update(1)


def _file_of(image: ImageSample) -> str | int:
    return image.file_name if image.place is None else image.place[0]
