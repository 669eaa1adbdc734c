"""A user's own image encoder, as `xret extract --visual own_encoder:Quarters` takes it."""

import numpy as np
import torch

from xret.pipeline.data.images import open_image
from xret.pipeline.store.regions import Regions


class Quarters:
    """The mean colours of a picture's upper and lower thirds, left to right."""

    name, kind, space = "quarters", "grid", None
    rows, grid, channels, global_channels = 6, (2, 3), 3, 3
    extras = ()

    def __init__(self, weights, image_size, device):
        self.side = image_size // 6 * 6
        self.identity = {"encoder": "?", "weights": weights, "preprocessing": {"stretch": self.side}, "layer": None}
        self.versions, self.cells = {}, 6  # not what xret's own encoders mean by it

    def decode(self, path):
        image = open_image(path)
        return torch.from_numpy(np.array(image.resize((self.side, self.side)))).permute(2, 0, 1), image.size

    def encode(self, pixels):
        count, _, height, width = pixels.shape
        means = pixels.numpy().reshape(count, 3, 2, height // 2, 3, width // 3).mean((3, 5)) / 255
        local = means.reshape(count, 3, 6).transpose(0, 2, 1).astype(np.float32)
        return local, local.mean(1)


class Unfinished:
    """What lacks most of an encoder."""

    name, kind = "unfinished", "grid"

    def __init__(self, weights, image_size, device):
        if weights == "broken":
            raise ZeroDivisionError("it is broken")


class Askew(Quarters):
    """A grid that does not hold its rows."""

    grid = (2, 2)


class Fewer(Quarters):
    """Gives one row in place of six, which numpy would repeat."""

    def encode(self, pixels):
        local, global_ = super().encode(pixels)
        return local[:, :1], global_


class Narrow(Quarters):
    """Gives a number as the global feature, which numpy would repeat."""

    def encode(self, pixels):
        local, global_ = super().encode(pixels)
        return local, global_[:, :1]


class Boxes(Quarters):
    """Gives all regions of a picture one box."""

    kind, grid, extras = "roi", None, ("boxes",)

    def encode(self, pictures):
        local, _ = super().encode(torch.stack(pictures))
        return [Regions(rows, boxes=np.zeros(4, np.float32)) for rows in local]


class Oblong(Quarters):
    """A grid that can prepare pictures, and sees no squares."""

    name = "oblong"

    def prepare(self, image):
        return torch.zeros(3, 2, 3)
