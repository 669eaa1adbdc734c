"""Runs of a moment on real pictures and real encoders: files, store and head fit together."""

import json
from pathlib import Path

import numpy as np
from PIL import Image
from small_bert import save_bert

from xret.heads.recipes.recipe import load_recipe
from xret.heads.training.train import train
from xret.pipeline.data.manifest import load_manifest
from xret.pipeline.extraction.extraction import extract
from xret.pipeline.extraction.options import build_options

COLOURS = {"red": (220, 30, 30), "green": (30, 180, 60), "blue": (40, 60, 220), "grey": (128, 128, 128)}
HEAD = ["model.dim=16", "adapter.words.word_dim=8", "data.unit=image", "data.batch_size=12", "schedule.epochs=1"]
NETWORK = "mobilenet_v3_small"


def make_pictures(folder, *, frames=0, train=12, val=4, test=6):
    """Make pictures of two colours, or videos of `frames` such pictures, with captions; return the manifest's path."""
    (folder / "images").mkdir(parents=True)
    rng, images = np.random.default_rng(0), []
    for split, count in (("train", train), ("val", val), ("test", test)):
        for _ in range(count):
            number = len(images)
            left, right = (str(name) for name in rng.choice(list(COLOURS), 2))
            name = f"{number}" if frames else f"{number}.png"
            targets = [folder / "images" / name / f"{k}.png" for k in range(frames)] or [folder / "images" / name]
            for target in targets:
                target.parent.mkdir(exist_ok=True)
                pixels = np.empty((40, 48, 3))
                pixels[:, :24], pixels[:, 24:] = COLOURS[left], COLOURS[right]
                pixels += rng.integers(-25, 26, pixels.shape)
                Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(target)
            texts = [f"a {left} side and a {right} side", f"{right} beside {left}"][: 1 + number % 2]
            said = [{"raw": text, "sentid": 10 * number + k} for k, text in enumerate(texts)]
            images.append({"filename": name, "imgid": number, "split": split, "sentences": said})
    (folder / "captions.json").write_text(json.dumps({"dataset": "pictures", "images": images}))
    manifest = folder / "pictures.yaml"
    manifest.write_text("name: pictures\nimages: images\ncaptions: captions.json\n")
    return manifest


def make_store(manifest, url, **options):
    """Extract the pictures, float16, with a network of random weights and words, unless `options` say otherwise."""
    small = {"visual": NETWORK, "visual_weights": "random:0", "image_size": 64, "text": "words", "batch_size": 4}
    extract(load_manifest(manifest), str(url), build_options(**{**small, **options}))
    return str(url)


def make_run(store, out, recipe="vsepp", *settings):
    """Train a head of 16 dimensions for an epoch; return the run's folder."""
    train(store, load_recipe(recipe, [*HEAD, *settings]), out, device="cpu")
    return Path(out)


class Made:
    """A `folder` with ``pictures``, a small ``bert``, the stores ``words.zarr`` and ``tokens.zarr``, and runs."""

    def __init__(self, folder):
        self.folder, self.pictures = folder, folder / "pictures"
        self.manifest = make_pictures(self.pictures)
        self.images = self.pictures / "images"

    def store(self, text="words"):
        """Return the URL of the store of words, or of a BERT's tokens."""
        out = self.folder / f"{text}.zarr"
        if not out.exists():
            options = {"text": "bert", "text_weights": str(save_bert(self.folder / "bert"))} if text == "tokens" else {}
            make_store(self.manifest, out, **options)
        return str(out)

    def run(self, recipe="vsepp", text="words"):
        """Return the run of a recipe on a store."""
        out = self.folder / f"{recipe}-{text}"
        return out if out.exists() else make_run(self.store(text), out, recipe)
