"""Batches whose images or captions are read for a network in the loop, beside features of the others from the cache.

Images come from the data set's files, captions are tokenised from their texts. Every random choice follows from the
seed, the epoch and the sample alone, so that threads may read in any order.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..cache import CaptionSet, FeatureCache, ImageSet
from ..data.images import open_image
from ..device import cores
from ..errors import SampleError
from .batches import Batch, Batches, Unit
from .columns import Placement
from .features import Features, Fetched
from .reattachment import read_image, unreadable

_SMALLEST = 0.6  # of a side, that a crop keeps
_OF_IMAGE, _OF_CAPTION = 1, 2  # so that each draws numbers of its own
_MASKED, _REPLACED = 0.5, 0.6  # up to which of a chosen word's chance it is masked, or replaced; beyond, left out


class PictureSide:
    """The images of a split as pixels [B, 3, S, S], which take the place of local features; a `sides.Side`.

    Args:
        encoder: has `decode` and `prepare`.
        folder: of the images.
        names: of the files, below it.
        device: where the pixels are put.
        crop_and_flip: take a random window of each image while training, mirrored half the time.

    Attributes:
        draws: seed and epoch while training; None: nothing is drawn.
    """

    def __init__(
        self, encoder: Any, folder: Path, names: Sequence[str], device: torch.device, crop_and_flip: bool
    ) -> None:
        self.encoder, self.folder, self.names = encoder, folder, names
        self.device, self.crop_and_flip = device, crop_and_flip
        self.draws: list[int] | None = None
        self._pool = ThreadPoolExecutor(
            max(2, cores()),
            "read-images",
        )

    def fetch(self, items: np.ndarray) -> list[Fetched]:
        """Read these images, several at once.

        Raises:
            SampleError: one cannot be read.
        """
        draws = self.draws if self.crop_and_flip else None

        def read(item: int) -> Tensor:
            path = self.folder / self.names[item]
            if draws is None:
                return read_image(self.encoder, path)
            return read_window(self.encoder, path, np.random.default_rng([*draws, item, _OF_IMAGE]))

        pixels = torch.stack(list(self._pool.map(read, items.tolist())))
        return [Fetched(torch.ones(len(items), dtype=torch.long), {"local": pixels})]

    def finish(self, fetched: list[Fetched]) -> Features:
        """Put the pixels on the device."""
        return Features(_put(fetched[0].length, self.device), local=_put(fetched[0].columns["local"], self.device))


class TokenSide:
    """The captions of a split as token ids; a `sides.Side`.

    Args:
        encoder: has `tokenize`, `words`, `mask_token` and `plain_tokens`.
        texts: of the captions.
        device: where the ids are put.
        masked: the share of the words that are changed while training, see `change_words`.

    Attributes:
        draws: seed and epoch while training; None: nothing is drawn.
    """

    def __init__(self, encoder: Any, texts: Sequence[str], device: torch.device, masked: float) -> None:
        self.encoder, self.texts, self.device, self.masked = encoder, texts, device, masked
        self.draws: list[int] | None = None

    def fetch(self, items: np.ndarray) -> list[Fetched]:
        """Tokenise these captions."""
        texts, draws = [self.texts[item] for item in items.tolist()], self.draws
        ids = self.encoder.tokenize(texts)
        if self.masked and draws is not None:
            rngs = [np.random.default_rng([*draws, item, _OF_CAPTION]) for item in items.tolist()]
            words = self.encoder.words(texts)
            ids = [change_words(self.encoder, self.masked, *one) for one in zip(ids, words, rngs, strict=True)]
        token = nn.utils.rnn.pad_sequence([torch.tensor(caption) for caption in ids], batch_first=True)
        return [Fetched(torch.tensor([len(caption) for caption in ids]), {"token": token})]

    def finish(self, fetched: list[Fetched]) -> Features:
        """Put the ids on the device."""
        return Features(_put(fetched[0].length, self.device), token=_put(fetched[0].columns["token"], self.device))


class EndToEnd(Batches):
    """The usable samples of one split, where a modality that is put back comes as what its network reads.

    Args:
        cache, image_set, caption_set, split, device, image_fields, caption_fields: as for `Batches`; of what is put
            back no field is read.
        encoders: by ``image`` and ``text``, what is put back.
        folder: of the images, where they are put back.
        crop_and_flip: see `PictureSide`.
        masked: see `TokenSide`.
        placement: where features lie that are read; with none it decides nothing.
    """

    def __init__(
        self,
        cache: FeatureCache,
        image_set: ImageSet,
        caption_set: CaptionSet,
        split: str,
        *,
        device: str,
        image_fields: set[str],
        caption_fields: set[str],
        encoders: dict[str, Any],
        folder: Path | None,
        crop_and_flip: bool = False,
        masked: float = 0.0,
        placement: Placement = "mapped",
    ) -> None:
        super().__init__(
            cache,
            image_set,
            caption_set,
            split,
            device=device,
            image_fields=image_fields,
            caption_fields=caption_fields,
            placement=placement if image_fields or caption_fields else "mapped",
        )
        self._put_back: list[PictureSide | TokenSide] = []
        if "image" in encoders:
            assert folder is not None, "images are read from a folder"
            self._images = PictureSide(encoders["image"], folder, self.file_names(), self.device, crop_and_flip)
            self._put_back.append(self._images)
        if "text" in encoders:
            self._captions = TokenSide(encoders["text"], self.texts(), self.device, masked)
            self._put_back.append(self._captions)

    def epoch(
        self, *, unit: Unit, batch_size: int, seed: int, epoch: int, captions: int | None = None, first: int = 0
    ) -> Iterator[Batch]:
        """Yield the batches of `Batches.epoch`, augmented."""
        for side in self._put_back:
            side.draws = [seed, epoch]
        try:
            yield from super().epoch(
                unit=unit, batch_size=batch_size, seed=seed, epoch=epoch, captions=captions, first=first
            )
        finally:
            for side in self._put_back:
                side.draws = None


def read_window(encoder: Any, path: Path, rng: np.random.Generator) -> Tensor:
    """Return the pixels of a random window of an image, mirrored half the time, [3, S, S].

    The window has the image's proportions and 60 to 100% of its sides, and goes through the encoder's own
    preprocessing (the published code of VSE-infinity, whose section 5.1.1 names crops and flips).

    Raises:
        SampleError: the image cannot be read.
    """
    try:
        image = open_image(path)
    except SampleError as error:
        raise unreadable(error) from error
    share = rng.uniform(_SMALLEST, 1)
    width, height = (max(1, round(share * side)) for side in image.size)
    left, top = (int(rng.integers(0, most + 1)) for most in (image.width - width, image.height - height))
    pixels = encoder.prepare(image.crop((left, top, left + width, top + height)))
    return pixels.flip(2) if rng.random() < 0.5 else pixels


def change_words(
    encoder: Any, share: float, ids: Sequence[int], words: Sequence[int | None], rng: np.random.Generator
) -> list[int]:
    """Return the token ids of a caption, of which chosen words are changed; one id always stays.

    The size augmentation of VSE-infinity for captions that go through BERT, as its published code has it: of the
    chosen words 50% are masked, 10% replaced by any tokens, 40% left out, each with all its pieces.

    Args:
        encoder: has `mask_token` and `plain_tokens`.
        share: the chance of a word to be chosen.
        ids: the caption.
        words: to which word each id belongs; None: to none, it stays.
        rng: decides.
    """
    changed: list[int] = []
    lots: dict[int, float] = {}
    for token, word in zip(ids, words, strict=True):
        lot = 1.0 if word is None else lots.setdefault(word, rng.random() / share)
        if lot >= 1:
            changed.append(token)
        elif lot < _MASKED:
            changed.append(encoder.mask_token)
        elif lot < _REPLACED:
            changed.append(int(rng.choice(encoder.plain_tokens)))
    return changed or [encoder.mask_token]


def _put(values: Tensor, device: torch.device) -> Tensor:
    return values if device.type == "cpu" else values.pin_memory().to(device, non_blocking=True)
