"""Encoders around that of a grid: its cells pooled, several views of a picture, or the frames of a video."""

import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from ..data.images import AnyPicture, PictureFile, frame_names, open_image
from ..device import to_host
from ..errors import EncoderError, SampleError
from ..store.regions import Regions
from .base import encode_layers
from .spec import EncoderSpec

_AREA, _RATIO = (0.36, 1.0), (3 / 4, 4 / 3)  # of a window: its share of the picture, and width over height
_TRIES = 10  # to find a window that fits
_AT_ONCE = 64  # frames that go through the network together


def wrap(encoder: Any, spec: EncoderSpec) -> Any:
    """Return the encoder of a grid with what a spec wants around it."""
    if spec.pool is not None:
        encoder = PoolEncoder(encoder, spec.pool)
    if spec.views is not None:
        encoder = ViewsEncoder(encoder, spec.views)
    return encoder if spec.frames is None else FramesEncoder(encoder, spec.frames)


class Wrapper:
    """What an encoder takes over from the one within; `entry` joins the identity."""

    kind = "grid"
    extras: tuple[str, ...] = ()

    def __init__(self, encoder: Any, entry: dict[str, Any]) -> None:
        self._encoder = encoder
        self.name, self.versions, self.space = encoder.name, encoder.versions, encoder.space
        self.spec: EncoderSpec = encoder.spec
        self.grid, self.rows = encoder.grid, encoder.rows
        self.channels, self.global_channels = encoder.channels, encoder.global_channels
        self.longest = getattr(encoder, "longest", None)
        self.cells: tuple[int, int] | None = None  # of a pooled grid, before that
        self.identity: dict[str, Any] = {**encoder.identity, **entry}

    def encode(self, batch: Any) -> Any:
        """Encode a decoded batch: local [B,N,C] and global features [B,D]; of views [B,V,N,C] and [B,V,D]."""
        return to_host(*encode_layers([self], batch)[0])


class PoolEncoder(Wrapper):
    """Average a grid's cells in windows of `pool` (height, width) cells side by side; the global feature stays.

    At an edge that a window crosses, it averages the cells that are there.
    """

    def __init__(self, encoder: Any, pool: tuple[int, int]) -> None:
        super().__init__(encoder, {"pool": list(pool)})
        height, width = encoder.grid or (0, 0)
        if not (1 <= pool[0] <= height and 1 <= pool[1] <= width) or pool == (1, 1):
            raise EncoderError(
                f"--pool {pool[0]}x{pool[1]} averages nothing in the grid of {height} x {width} cells of"
                f" '{encoder.name}'; give a smaller window, as 2x2, or leave it out"
            )
        self._pool, self.cells = pool, (height, width)
        self.grid = -(-height // pool[0]), -(-width // pool[1])
        self.rows = self.grid[0] * self.grid[1]

    def decode(self, picture: AnyPicture) -> tuple[Tensor, tuple[int, int]]:
        """Read an image as the encoder within does."""
        return self._encoder.decode(picture)

    def prepare(self, image: Image.Image) -> Tensor:
        """Prepare an image as the encoder within does."""
        return self._encoder.prepare(image)

    @torch.inference_mode()
    def encode_layers(self, pixels: Tensor, encoders: "Sequence[PoolEncoder]") -> list[tuple[Tensor, Tensor]]:
        """Return what `encode` of each encoder does, on the device."""
        found = encode_layers([one._encoder for one in encoders], pixels)
        return [(one._pooled(local), global_) for one, (local, global_) in zip(encoders, found, strict=True)]

    @property
    def network(self) -> torch.nn.Module:
        """The network within."""
        return self._encoder.network

    def features(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Encode a batch as the encoder within does, by operations that a graph can hold."""
        local, global_ = self._encoder.features(pixels)
        return self._pooled(local), global_

    def _pooled(self, local: Tensor) -> Tensor:
        maps = local.transpose(1, 2).unflatten(2, self.cells)
        pooled = functional.avg_pool2d(maps, self._pool, ceil_mode=True, count_include_pad=False)
        return pooled.flatten(2).transpose(1, 2).contiguous()


class ViewsEncoder(Wrapper):
    """Encode V views of each picture, as ``dihedral:8`` names them; view 0 is the picture as it is."""

    def __init__(self, encoder: Any, views: str) -> None:
        augment, _, number = views.partition(":")
        if augment not in AUGMENTATIONS or not number.isdecimal() or int(number) < 2:
            known = " or ".join(f"{name}:N" for name in AUGMENTATIONS)
            raise EncoderError(f"--views {views}: give {known}, with two or more views N")
        self.views = int(number)
        self._view, parameters = AUGMENTATIONS[augment]
        super().__init__(encoder, {"views": {"number": self.views, "augment": augment, **parameters}})
        self.cells = encoder.cells if "pool" in encoder.identity else None
        if augment == "dihedral" and self.views > 8:
            raise EncoderError(f"--views {views}: a square has eight turns and mirrorings; ask for at most 8")
        seen = self.cells or encoder.grid
        if augment == "dihedral" and seen is not None and seen[0] != seen[1]:
            raise EncoderError(f"--views {views} turns squares, and '{encoder.name}' sees none; take crop-flip")

    def decode_views(self, picture: AnyPicture, key: str) -> tuple[Tensor, tuple[int, int]]:
        """Read a picture; return its views as the encoder within takes them [V,3,S,S], and its own (width, height).

        The `key` names it on every machine; with a view's number it decides what is drawn.
        """
        image = open_image(picture, upright=True, longest=self.longest)
        whole = self._encoder.prepare(image)
        others = [self._view(self._encoder, image, whole, key, view) for view in range(1, self.views)]
        return torch.stack([whole, *others]), image.size

    @torch.inference_mode()
    def encode_layers(self, pixels: Tensor, encoders: "Sequence[ViewsEncoder]") -> list[tuple[Tensor, Tensor]]:
        """Return what `encode` of each encoder does, on the device."""
        within = [one._encoder for one in encoders]
        # View 0 goes through the network in the batch in which a set of one view has it, and has the same bytes.
        views = [encode_layers(within, pixels[:, view]) for view in range(self.views)]
        stacks = [zip(*of_layer, strict=True) for of_layer in zip(*views, strict=True)]
        return [(torch.stack(local, 1), torch.stack(global_, 1)) for local, global_ in stacks]


def _dihedral(_encoder: Any, _image: Image.Image, whole: Tensor, _key: str, view: int) -> Tensor:
    """Return element `view` of the square's group: turned by so many quarters, from 4 on of the mirrored picture."""
    return torch.rot90(whole.flip(2) if view >= 4 else whole, view % 4, (1, 2))


def _crop_flip(encoder: Any, image: Image.Image, _whole: Tensor, key: str, view: int) -> Tensor:
    """Return a random window of a picture, mirrored half the time, through the encoder's own preprocessing."""
    rng = random.Random(f"{key}/{view}")  # Python promises the same numbers of it for ever
    pixels: Tensor = encoder.prepare(image.crop(window(image.size, rng)))
    return pixels.flip(2) if rng.random() < 0.5 else pixels


def window(size: tuple[int, int], rng: random.Random) -> tuple[int, int, int, int]:
    """Draw a window (left, top, right, bottom) of a picture of this (width, height), pixels.

    It has 36 to 100% of the picture: a caption speaks of all of it. Of a long or tiny one it is the middle.
    """
    width, height = size
    w, h, fits = window_size(width, height, rng, _AREA[0])
    left, top = (rng.randint(0, most) if fits else most // 2 for most in (width - w, height - h))
    return left, top, left + w, top + h


def window_size(
    width: int, height: int, rng: "random.Random | np.random.Generator", least: float
) -> tuple[int, int, bool]:
    """Draw width and height of a window, as torchvision's RandomResizedCrop does, of a share of at least `least`.

    Also returned: whether one fitted; of a long or tiny picture it is as much as the ratios of 3/4 to 4/3 allow.
    """
    for _ in range(_TRIES):
        area = width * height * rng.uniform(least, 1)
        ratio = math.exp(rng.uniform(math.log(_RATIO[0]), math.log(_RATIO[1])))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return w, h, True
    return min(width, max(1, round(height * _RATIO[1]))), min(height, max(1, round(width / _RATIO[0]))), False


# By name what makes a view other than 0, and what else of it belongs to the identity.
AUGMENTATIONS: dict[str, tuple[Callable[[Any, Image.Image, Tensor, str, int], Tensor], dict[str, Any]]] = {
    "crop-flip": (_crop_flip, {"area": list(_AREA), "ratio": list(_RATIO), "flip": 0.5}),
    "dihedral": (_dihedral, {}),
}


class FramesEncoder(Wrapper):
    """Encode videos as the global features of evenly spaced frames (VSE∞, section 5.1.2), of at most `frames`."""

    kind = "frames"

    def __init__(self, encoder: Any, frames: int) -> None:
        entry = {"frames": {"most": frames, "chosen": "middles of equal parts"}}
        super().__init__(encoder, {"encoder": f"{encoder.identity['encoder']}-frames", **entry})
        self.name = f"{encoder.name}-frames"
        self.rows, self.grid, self.channels = frames, None, encoder.global_channels

    def decode(self, picture: str | Path | PictureFile) -> tuple[Tensor, tuple[int, int]]:
        """Read evenly spaced frames of a video, a folder of images in natural order: ``10.jpg`` after ``9.jpg``.

        The video is cut into as many equal parts as frames are wanted, and the frame in the middle of each is taken.
        Return pixels [n,3,S,S] with n of 1 to `rows`, as the encoder within decodes them, and the first frame's own
        (width, height). SampleError if a frame that is taken cannot be read, or there is none.
        """
        if isinstance(picture, PictureFile):
            raise SampleError(picture.name, "a folder of frames is expected here (it is a file)")
        names = frame_names(Path(picture))
        count = min(len(names), self.rows)
        frames = []
        for name in (names[(2 * part + 1) * len(names) // (2 * count)] for part in range(count)):
            try:
                frames.append(self._encoder.decode(Path(picture, name)))
            except SampleError as error:
                raise SampleError(str(picture), f"its frame {name} cannot be used: {error.reason}") from error
        return torch.stack([pixels for pixels, _ in frames]), frames[0][1]

    def encode(self, decoded: Sequence[Tensor]) -> list[Regions]:
        """Encode decoded videos, some frames at a time; return the features of each one's frames, float32 [n,C]."""
        frames = [frame for video in decoded for frame in video]
        batches = (torch.stack(frames[first : first + _AT_ONCE]) for first in range(0, len(frames), _AT_ONCE))
        features = [encode_layers([self._encoder], batch)[0][1].cpu() for batch in batches]
        bounds = np.cumsum([len(video) for video in decoded])[:-1]
        return [Regions(local) for local in np.split(torch.cat(features).numpy(), bounds)]
