"""A small data set that is written anew as often as it changes, and what two stores of it have in common."""

import json
import zlib
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import small_encoder
from PIL import Image
from small_extraction import SMALL, files

from xret.pipeline.cache.feature_cache import FeatureCache
from xret.pipeline.data.manifest import load_manifest
from xret.pipeline.encoders import registry
from xret.pipeline.extraction.options import Options

_OF_A_SET = ("kind", "identity", "fingerprint", "dtype", "shard_images", "failed", "arrays", "vocabulary", "counts")


@dataclass(frozen=True)
class Picture:
    """A picture: its name, a number that decides its pixels, its split and its captions."""

    name: str
    content: int
    split: str
    captions: tuple[str, ...]


def pictures(train=12, val=4, test=4):
    """Return a data set to begin with."""
    splits = ["train"] * train + ["val"] * val + ["test"] * test
    return [
        Picture(f"{number}.png", number, split, tuple(f"thing {number} of {k} more" for k in range(1 + number % 2)))
        for number, split in enumerate(splits)
    ]


def write(folder, data):
    """Write a data set, whatever was there before; return its manifest."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    for one in data:
        pixels = np.random.default_rng(one.content).integers(0, 256, (9, 8, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "images" / one.name)
    entries = [
        {"filename": one.name, "split": one.split, "sentences": [{"raw": text} for text in one.captions]}
        for one in data
    ]
    (folder / "captions.json").write_text(json.dumps({"images": entries}))
    (folder / "data.yaml").write_text("name: data\nimages: images\ncaptions: captions.json\n")
    return load_manifest(folder / "data.yaml")


def content(url, generation=None):
    """Return the bytes of all arrays of a generation's samples and sets, and what their attributes say of features."""
    cache = FeatureCache.open(str(url), generation=generation)
    there = {name: data for name, data in files(cache.store.root).items() if not name.startswith("generations/")}
    arrays = {name: data for name, data in there.items() if "/c/" in name or name.count("/") == 3}
    attributes = {
        path: {key: cache.set_at(path).attributes.get(key) for key in _OF_A_SET} for path in cache.set_paths()
    }
    return arrays, attributes, cache.splits, cache.manifest_sha256


class SmallTexts:
    """States of a caption's words, each of which follows from the word alone."""

    name, kind, channels, global_channels, vocabulary, space = "texts", "tokens", 8, 8, None, None
    identity: ClassVar[dict[str, Any]] = {"encoder": "texts"}
    versions: ClassVar[dict[str, str]] = {}
    encoded: ClassVar[list[int]] = []  # how many captions each call had

    def tokenize(self, texts):
        return [[zlib.crc32(word.encode()) % 1000 for word in text.split()] or [0] for text in texts]

    def count_truncated(self, texts):
        return 0

    def encode(self, ids):
        self.encoded.append(len(ids))
        states = [np.sin(np.outer(caption, range(1, 9))).astype(np.float32) for caption in ids]
        return np.concatenate(states), np.stack([one.max(0) for one in states])


class CountingEncoder(small_encoder.SmallEncoder):
    """The small encoder of images, which says how many it encoded."""

    pause = 0
    encoded: ClassVar[list[int]] = []

    def encode(self, pixels):
        self.encoded.append(len(pixels))
        return super().encode(pixels)


def use(monkeypatch):
    """Let both encoders be those of here; return the lists of how many they encode."""
    encoder = CountingEncoder()
    monkeypatch.setattr(registry, "_visual", lambda *_: encoder)
    monkeypatch.setattr(Options, "load_text", lambda *_: SmallTexts())
    CountingEncoder.encoded.clear()
    SmallTexts.encoded.clear()
    return CountingEncoder.encoded, SmallTexts.encoded


OPTIONS = replace(SMALL, text="bert", text_weights="small", shard_images=4, workers=1)
