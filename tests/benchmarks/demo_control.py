"""The demo over several seeds, and its control: the same with the captions of the training pictures shuffled.

A head that learns nothing but the texts' statistics cannot beat chance when every training caption belongs to a
random picture; test captions stay right. Prints recall@1 of both directions with mean and spread over seeds.

    python tests/benchmarks/demo_control.py --seeds 3
"""

import json
import random
import tempfile
from pathlib import Path

import click
import numpy as np

from xret.cli.demo import SETTINGS
from xret.heads.evaluation.evaluation import evaluate
from xret.heads.recipes.recipe import load_recipe
from xret.heads.training.train import train
from xret.pipeline.data.manifest import load_manifest
from xret.pipeline.data.scenes.generate import generate_scenes
from xret.pipeline.extraction.extraction import Options, extract


def shuffle_captions(manifest: Path, seed: int) -> Path:
    """Write a manifest of the same pictures whose train and val captions are dealt out anew."""
    data = json.loads((manifest.parent / "dataset_scenes.json").read_text())
    for split in ("train", "val"):
        images = [image for image in data["images"] if image["split"] == split]
        owned = [image["sentences"] for image in images]
        random.Random(seed).shuffle(owned)
        for image, sentences in zip(images, owned, strict=True):
            image["sentences"] = [{**sentence, "imgid": image["imgid"]} for sentence in sentences]
    (manifest.parent / "shuffled.json").write_text(json.dumps(data))
    path = manifest.with_name("shuffled.yaml")
    path.write_text("name: shuffled\nimages: images\ncaptions: shuffled.json\n")
    return path


@click.command()
@click.option("--seeds", default=3, show_default=True, type=click.IntRange(2))
def main(seeds: int) -> None:
    """Print one JSON line a recipe and kind of captions."""
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as folder:
            manifest = generate_scenes(Path(folder) / "scenes", seed=seed)
            for captions, path in (("right", manifest), ("shuffled", shuffle_captions(manifest, seed))):
                store = f"{folder}/{captions}.zarr"
                options = Options(visual="resnet18", visual_weights="random:0", text="words")
                extract(load_manifest(path), store, options)
                for recipe, settings in SETTINGS.items():
                    run = Path(folder) / f"{recipe}-{captions}"
                    train(store, load_recipe(recipe, settings), run, seed=seed)
                    table = evaluate([run]).results[0]
                    recalls = table.image_to_text["R@1"], table.text_to_image["R@1"]
                    found.setdefault((recipe, captions), []).append(recalls)
                    click.echo(f"seed {seed} {recipe} {captions}: {recalls}", err=True)
    for (recipe, captions), recalls in sorted(found.items()):
        mean, spread = np.mean(recalls, 0).round(1).tolist(), np.std(recalls, 0, ddof=1).round(1).tolist()
        click.echo(
            json.dumps(
                {
                    "recipe": recipe,
                    "captions": captions,
                    "seeds": seeds,
                    "image_to_text R@1": mean[0],
                    "text_to_image R@1": mean[1],
                    "spread": spread,
                    "chance": 1.0,
                }
            )
        )


if __name__ == "__main__":
    main()
