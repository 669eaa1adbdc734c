"""Frame features: a video is a folder of frames, and each frame the mean of its grid features."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...data.images import PictureFile, frame_names
from ...data.regions import Regions
from ...errors import SampleError

_AT_ONCE = 64  # frames that go through the network together


class FramesEncoder:
    """Encode videos as the pooled features of evenly spaced frames (VSE∞, section 5.1.2).

    Args:
        grid: the encoder of a grid; a frame's feature is the global one.
        frames: the most frames that are taken of a video, N; a shorter one has fewer rows.
    """

    kind = "frames"
    extras: tuple[str, ...] = ()
    grid: tuple[int, int] | None = None

    def __init__(self, grid: Any, frames: int) -> None:
        self._encoder = grid
        self.name = f"{grid.name}-frames"
        self.rows = frames
        self.channels = self.global_channels = grid.global_channels
        self.space = grid.space
        self.identity: dict[str, Any] = {
            **grid.identity,
            "encoder": f"{grid.identity['encoder']}-frames",
            "frames": {"most": frames, "chosen": "middles of equal parts"},
        }
        self.versions = grid.versions

    def decode(self, picture: str | Path | PictureFile) -> tuple[Tensor, tuple[int, int]]:
        """Read evenly spaced frames of a video, a folder of images in natural order: ``10.jpg`` after ``9.jpg``.

        The video is cut into as many equal parts as frames are wanted, and the frame in the middle of each is taken.

        Returns:
            Pixels [n,3,S,S] on the CPU with n of 1 to `rows`, as the grid encoder decodes them, and the first frame's
            own (width, height).

        Raises:
            SampleError: there is no such folder, it has no frame, or a frame that is taken cannot be read.
        """
        if isinstance(picture, PictureFile):
            raise SampleError(picture.name, "a folder of frames is expected here (it is a file)")
        names = frame_names(Path(picture))
        count = min(len(names), self.rows)
        taken = [names[(2 * part + 1) * len(names) // (2 * count)] for part in range(count)]
        pixels, sizes = [], []
        for name in taken:
            try:
                frame, size = self._encoder.decode(Path(picture, name))
            except SampleError as error:
                raise SampleError(str(picture), f"its frame {name} cannot be used: {error.reason}") from error
            pixels.append(frame)
            sizes.append(size)
        return torch.stack(pixels), sizes[0]

    def encode(self, decoded: Sequence[Tensor]) -> list[Regions]:
        """Encode decoded videos, some frames at a time; return the features of each one's frames, float32 [n,C]."""
        frames = [frame for video in decoded for frame in video]
        batches = (torch.stack(frames[first : first + _AT_ONCE]) for first in range(0, len(frames), _AT_ONCE))
        features = [self._encoder.encode(batch)[1] for batch in batches]
        bounds = np.cumsum([len(video) for video in decoded])[:-1]
        return [Regions(local) for local in np.split(np.concatenate(features), bounds)]
