"""Small caption files with their manifests, and the sentence that a wrong one is refused with."""

import json
from pathlib import Path

import pytest

from xret.pipeline.data.manifest import load_manifest
from xret.pipeline.data.samples import read_samples
from xret.pipeline.errors import ManifestError


def manifest(folder: Path, text: str | bytes, suffix: str = ".json", more: str = ""):
    """Write a caption file with its manifest into a folder, and load it."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    path = folder / f"captions{suffix}"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    (folder / "birds.yaml").write_text(f"name: birds\nimages: images\ncaptions: {path.name}\n{more}")
    return load_manifest(folder / "birds.yaml")


def karpathy(folder: Path, images, more: str = ""):
    return manifest(folder, json.dumps({"images": images}), more=more)


def image(number: int, split: str = "train", texts=("a bird .",), **more):
    """Return one element of a Karpathy JSON."""
    sentences = [{"raw": text, "imgid": number, "sentid": 10 * number + k} for k, text in enumerate(texts)]
    return {"filename": f"{number}.jpg", "imgid": number, "split": split, "sentences": sentences, **more}


def sentence_of(function, *arguments) -> str:
    """Return what a function refuses its arguments with, having seen that it is one sentence."""
    with pytest.raises(ManifestError) as caught:
        function(*arguments)
    message = str(caught.value)
    assert message.endswith(".") and "\n" not in message and ". " not in message
    return message


def refusal(manifest) -> str:
    """Return the sentence that names the caption file."""
    message = sentence_of(read_samples, manifest)
    assert message.startswith(str(manifest.captions))
    return message
