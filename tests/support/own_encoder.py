"""A user's own encoders, as `xret extract --visual own_encoder:Quarters --text own_encoder:Letters` takes them."""

import time

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


class Slow(Quarters):
    """Takes a while for each picture."""

    def encode(self, pixels):
        time.sleep(0.03 * len(pixels))
        return super().encode(pixels)


class Unfinished:
    """What lacks most of an encoder."""

    name, kind = "unfinished", "grid"

    def __init__(self, weights, image_size, device):
        if weights == "broken":
            raise ZeroDivisionError("it is broken")


class Nameless(Quarters):
    """Does not say which layer it is of."""

    def __init__(self, *given):
        super().__init__(*given)
        del self.identity["layer"]


class Paired(Quarters):
    """Has a pair in its identity, which is a list as JSON."""

    def __init__(self, *given):
        super().__init__(*given)
        self.identity["layer"] = (2, 3)


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


class Letters:
    """The letters of a caption, each by its number and its square, and their mean."""

    name, kind, space, vocabulary = "letters", "tokens", None, None
    channels = global_channels = 2

    def __init__(self, weights, device):
        self.identity = {"weights": weights, "preprocessing": {}, "layer": None}
        self.versions = {}

    def tokenize(self, texts):
        return [[ord(letter) for letter in text] for text in texts]

    def count_truncated(self, texts):
        return 0

    def encode(self, ids):
        states = [np.array([(one / 100, (one / 100) ** 2) for one in caption], np.float32) for caption in ids]
        return np.concatenate(states), np.stack([rows.mean(0) for rows in states])


class SlowLetters(Letters):
    """Takes a while for each caption."""

    def encode(self, ids):
        time.sleep(0.003 * len(ids))
        return super().encode(ids)


class Unsure(Letters):
    """Gives one vector for all captions, which numpy would repeat."""

    def encode(self, ids):
        states, pooled = super().encode(ids)
        return states, pooled[:1]


class Wordless(Letters):
    """Has a vocabulary, as only words have."""

    vocabulary = ("a", "b")
