"""Writes generated scenes as any data set comes: JPEG files, a Karpathy JSON (with `regions`) and a manifest."""

import json
from pathlib import Path
from random import Random
from typing import Any

from ..pipeline.data.samples import tokenize
from ..pipeline.errors import ManifestError
from ..pipeline.files import making
from .pictures import draw, random_scene

VERSION = 3  # rises when the same seed no longer gives the same files
SCENES = 2  # rises when the same seed no longer gives the same captions


def generate_scenes(folder: str | Path, seed: int = 0, *, train: int = 800, val: int = 100, test: int = 100) -> Path:
    """Draw a data set of scenes, and return the path of its manifest.

    Each picture depends on the seed and its number alone. The folder, new or empty, appears when all its files are
    written. Scenes of the same arguments that are there already stay as they are. ManifestError: the folder holds
    something else, or cannot be written.
    """
    folder = Path(folder)
    counts = {"train": train, "val": val, "test": test}
    manifest = _manifest(seed, counts)
    path = folder / "scenes.yaml"
    if path.is_file() and path.read_bytes() == manifest.encode():
        return path
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ManifestError(f"{folder} holds something else; remove it, or name a new folder for the scenes")
    with making(folder, ManifestError, "name another folder for the scenes") as part:
        (part / "images").mkdir()
        splits = [split for split, count in counts.items() for _ in range(count)]
        images = [_write_scene(part / "images", seed, number, split) for number, split in enumerate(splits)]
        (part / "dataset_scenes.json").write_text(json.dumps({"dataset": "scenes", "images": images}))
        (part / "scenes.yaml").write_text(manifest)
    return path


def are_of_seed(folder: Path, seed: int) -> bool:
    """Return whether all scenes of this seed lie in `folder`."""
    path = folder / "scenes.yaml"
    return path.is_file() and path.read_bytes().startswith(_heading(seed).encode())


def _heading(seed: int) -> str:
    return f"# Scenes drawn by xret (generator {VERSION}, seed {seed}).\n"


def _manifest(seed: int, counts: dict[str, int]) -> str:
    shares = ", ".join(f"{split}: {count}" for split, count in counts.items())
    return (
        f"{_heading(seed)}"
        "name: scenes\n"
        "images: images\n"
        "captions: dataset_scenes.json\n"
        f"counts: {{{shares}}}\n"
        "protocols: [full]\n"
        "licence: drawn by a program, free for any use\n"
    )


def _write_scene(folder: Path, seed: int, number: int, split: str) -> dict[str, Any]:
    """Draw one picture and return its element of the Karpathy JSON: a caption and a region for each object."""
    random = Random(f"scene {SCENES} {seed} {number}")
    scene = random_scene(random)
    name = f"scene_{number:05}.jpg"
    draw(scene, random).save(folder / name, quality=90)
    sentences = [
        {"raw": text, "tokens": tokenize(text), "imgid": number, "sentid": number * len(scene.things) + position}
        for position, text in enumerate(thing.caption for thing in scene.things)
    ]
    return {
        "filename": name,
        "imgid": number,
        "split": split,
        "sentids": [sentence["sentid"] for sentence in sentences],
        "sentences": sentences,
        "regions": [{"bbox": thing.box, "phrase": thing.phrase, "class": thing.shape} for thing in scene.things],
    }
