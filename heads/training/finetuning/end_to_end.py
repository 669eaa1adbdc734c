"""Batches whose images or captions are read for a network in the loop, beside features of the others from the cache.

Images come from the data set's files, captions are tokenised from their texts. Every random choice follows from the
seed, the epoch and the sample alone, so that threads may read in any order.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ....pipeline.data.images import open_image
from ....pipeline.data.sources import PictureReader
from ....pipeline.device import cores, send
from ....pipeline.encoders import wrappers
from ....pipeline.errors import EncoderError, SampleError
from ....pipeline.reading.batches import Batches
from ....pipeline.reading.features import Draws, Features, pad_ids
from ....pipeline.reading.pictures import unreadable
from ..augmentation import MASKED, REPLACED
from .reattached import read_image

_SMALLEST = {"sides": 0.6, "area": 0.08, "large-area": 0.36}  # that a window keeps: of each side, or of the area
_OF_IMAGE, _OF_CAPTION = 1, 2  # so that each draws numbers of its own


class Pictures:
    """The images of a split as pixels [B,3,S,S], which take the place of local features; a `features.FeatureSource`.

    `crop_and_flip` names the windows that are read in training, see `read_window`, or is ``none``; EncoderError if the
    `encoder` does not bring one to the size of a whole picture.
    """

    def __init__(
        self, encoder: Any, reader: PictureReader, names: Sequence[str], device: torch.device, crop_and_flip: str
    ) -> None:
        self.encoder, self.reader, self.names = encoder, reader, names
        self.device, self.crop_and_flip = device, crop_and_flip
        if crop_and_flip != "none" and encoder.identity["preprocessing"].get("do_resize") is False:
            raise EncoderError(
                f"the image processor of '{encoder.name}' resizes nothing, so that a window of a picture would be a"
                " smaller picture; set finetune.crop_and_flip=none"
            )
        self._pool = ThreadPoolExecutor(max(2, cores()), "read-images")

    def fetch(self, items: np.ndarray, draws: Draws | None = None) -> Callable[[], Features]:
        """Read these images, several at once; SampleError if one cannot be read."""

        def read(item: int) -> Tensor:
            name = self.names[item]
            if draws is None or self.crop_and_flip == "none":
                return read_image(self.encoder, self.reader, name)
            rng = np.random.default_rng([*draws, item, _OF_IMAGE])
            return read_window(self.encoder, self.reader, name, rng, self.crop_and_flip)

        pixels = torch.stack(list(self._pool.map(read, items.tolist())))
        length = torch.ones(len(items), dtype=torch.long)
        return lambda: Features(send(length, self.device), local=send(pixels, self.device))


class Tokens:
    """The captions of a split as token ids; a `features.FeatureSource`.

    In training the share `masked` of the words is changed, see `change_words`; EncoderError if the tokenizer cannot.
    """

    def __init__(self, encoder: Any, texts: Sequence[str], device: torch.device, masked: float) -> None:
        self.encoder, self.texts, self.device, self.masked = encoder, texts, device, masked
        self._lock = Lock()  # a tokenizer may not be used by two threads at once
        if masked:
            encoder.words(texts[:1])  # what cannot tell words is refused before the training begins

    def fetch(self, items: np.ndarray, draws: Draws | None = None) -> Callable[[], Features]:
        """Tokenise these captions."""
        texts = [self.texts[item] for item in items.tolist()]
        with self._lock:
            ids, words = self.encoder.tokenize(texts), self.encoder.words(texts) if self.masked and draws else []
        if self.masked and draws:
            rngs = [np.random.default_rng([*draws, item, _OF_CAPTION]) for item in items.tolist()]
            ids = [change_words(self.encoder, self.masked, *one) for one in zip(ids, words, rngs, strict=True)]
        token, length = pad_ids(ids)
        return lambda: Features(send(length, self.device), token=send(token, self.device))


def end_to_end_batches(
    stored: Batches, encoders: Mapping[str, Any], pictures: PictureReader | None, crop_and_flip: str, masked: float
) -> Batches:
    """Return batches in which a modality that is put back, ``image`` or ``text``, comes as what its network reads.

    `stored` has the same samples of one data set, and no fields of what is put back; `pictures` opens the images.
    """
    images, captions, device = stored.image_source, stored.caption_source, stored.device
    if "image" in encoders:
        assert pictures is not None, "images are read"
        images = Pictures(encoders["image"], pictures, stored.file_names(), device, crop_and_flip)
    if "text" in encoders:
        captions = Tokens(encoders["text"], stored.texts(), device, masked)
    return Batches(stored.parts, images, captions, device)


def read_window(
    encoder: Any, pictures: PictureReader, name: str, rng: np.random.Generator, kind: str = "sides"
) -> Tensor:
    """Return the pixels of a random window of an image, mirrored half the time, [3,S,S], or raise SampleError.

    It goes through the encoder's own preprocessing, which may take the centre of it as it does of a picture. `kind` is
    `sides`: the image's proportions and 60 to 100% of its sides (the published code of VSE-infinity, whose section
    5.1.1 names crops and flips); `area`: 8 to 100% of its area, a width of 3/4 to 4/3 of the height, then made square,
    as torchvision's `RandomResizedCrop` does (the published code of VSE++ and SetDiv); or `large-area`: the same from
    36% on (SetDiv's for ResNeXt, `gpo_aug`).
    """
    try:
        image = open_image(pictures.open(name), upright=True)
    except SampleError as error:
        raise unreadable(error) from error
    width, height = window_size(*image.size, rng, kind)
    left, top = (int(rng.integers(0, most + 1)) for most in (image.width - width, image.height - height))
    window = image.crop((left, top, left + width, top + height))
    if kind != "sides":
        window = window.resize((max(width, height),) * 2, Image.Resampling.BILINEAR)
    pixels: Tensor = encoder.prepare(window)
    return pixels.flip(2) if rng.random() < 0.5 else pixels


def window_size(width: int, height: int, rng: np.random.Generator, kind: str) -> tuple[int, int]:
    """Draw the width and height of a window of an image of this size; see `read_window`."""
    if kind == "sides":
        share = rng.uniform(_SMALLEST[kind], 1)
        return max(1, round(share * width)), max(1, round(share * height))
    return wrappers.window_size(width, height, rng, _SMALLEST[kind])[:2]


def change_words(
    encoder: Any, share: float, ids: Sequence[int], words: Sequence[int | None], rng: np.random.Generator
) -> list[int]:
    """Return the token ids of a caption, of which chosen words are changed; one id always stays.

    The size augmentation of VSE-infinity for captions that go through BERT, as its published code has it: words are
    chosen with the chance `share`; 50% of them are masked, 10% replaced by any tokens, 40% left out, with all pieces.
    """
    changed: list[int] = []
    lots: dict[int, float] = {}
    for token, word in zip(ids, words, strict=True):
        lot = 1.0 if word is None else lots.setdefault(word, rng.random() / share)
        if lot >= 1:
            changed.append(token)
        elif lot < MASKED:
            changed.append(encoder.mask_token)
        elif lot < REPLACED:
            changed.append(int(rng.choice(encoder.plain_tokens)))
    return changed or [encoder.mask_token]
