"""What RSICD's data are worth to a head: with captions at wrong pictures, fewer pictures, or random splits.

The same recipe is trained with every seed on all training pictures as they are, with a share of the training captions
dealt out anew among themselves, and with a half and a quarter of the pictures. Validation and test stay as they are.
For the last row all pictures are dealt out at random among the three splits, which stay as large: there test captions
are as those of training. A variant is a generation of one store (``xret extract --update``), so that nothing runs
through a backbone twice. What is done is not done again. STORE is made where it is missing:

    python tests/benchmarks/rsicd_data.py DIR STORE --out OUT --visual-weights mobilenet_v2.safetensors \
        --text-weights MINILM --recipe mlp
"""

import json
import random
import statistics
from pathlib import Path
from typing import Any

import click

NOISE = 0.2  # share of the training captions
VARIANTS = {
    "as they are": (1.0, 0.0, False),
    "noisy": (1.0, NOISE, False),
    "half": (0.5, 0.0, False),
    "quarter": (0.25, 0.0, False),
    "random splits": (1.0, 0.0, True),
}


def variant(captions: Path, kept: float, noise: float, dealt: bool) -> dict[str, Any]:
    """Return Karpathy's JSON with a share of the training pictures, a share of their captions dealt out anew, or all
    pictures dealt out at random among the splits."""
    data: dict[str, Any] = json.loads(captions.read_text())
    dice = random.Random(0)
    if dealt:
        splits = [image["split"] for image in data["images"]]
        for image, split in zip(data["images"], dice.sample(splits, len(splits)), strict=True):
            image["split"] = split
    train = [image for image in data["images"] if image["split"] == "train"]
    left_out = {image["imgid"] for image in dice.sample(train, round((1 - kept) * len(train)))}
    data["images"] = [image for image in data["images"] if image["imgid"] not in left_out]
    places = [(image, at) for image in train if kept == 1 for at in range(len(image["sentences"]))]
    moved = dice.sample(places, round(noise * len(places)))
    texts = [image["sentences"][at]["raw"] for image, at in moved]
    for (image, at), text in zip(moved, dice.sample(texts, len(texts)), strict=True):
        image["sentences"][at] = {"raw": text, "sentid": image["sentences"][at]["sentid"]}
    return data


@click.command()
@click.argument("data", type=click.Path(path_type=Path, exists=True))
@click.argument("store")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder of all runs.")
@click.option("--visual-weights", required=True)
@click.option("--text-weights", required=True)
@click.option("--pool", help="As of `xret extract`, where STORE has pooled cells.")
@click.option("--recipe", default="mlp", show_default=True, help="Name, or a file such as tune's best.yaml.")
@click.option("--set", "settings", multiple=True, help="KEY=VALUE of the recipe.")
@click.option("--seeds", default=3, show_default=True)
def main(
    data: Path,
    store: str,
    out: Path,
    visual_weights: str,
    text_weights: str,
    pool: str | None,
    recipe: str,
    settings: tuple[str, ...],
    seeds: int,
) -> None:
    """Print a row a variant: test mR in percent, ties by their mean."""
    import xret

    how: dict[str, Any] = {"visual": "mobilenet_v2", "visual_weights": visual_weights}
    how |= {"text": "bert", "text_weights": text_weights, "update": True}
    how |= {"pool": tuple(map(int, pool.split("x")))} if pool else {}
    click.echo("| data | training pictures | mR, ties `mean` | of validation |")
    click.echo("|---|---|---|---|")
    for name, (kept, noise, dealt) in VARIANTS.items():
        folder = out / name.replace(" ", "-")
        manifest = _manifest(data, folder, variant(data / "rsicd" / "dataset_rsicd.json", kept, noise, dealt))
        found, validation = [], []
        for seed in range(seeds):
            run = folder / f"seed-{seed}"
            if not (run / "run.json").exists():
                xret.extract(manifest, store, **how)
            summary = xret.train(store, recipe=recipe, out=run, seed=seed, resume=True, settings=[*settings])
            found.append(xret.evaluate(run, ties="mean").results[0].rsum / 6)
            validation.append(summary.best_rsum / 6)
        click.echo(f"| {name} | {round(7734 * kept)} | {_spread(found)} | {_spread(validation)} |")


def _manifest(data: Path, folder: Path, captions: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "captions.json").write_text(json.dumps(captions))
    path = folder / "rsicd.yaml"
    path.write_text(f"name: rsicd\nimages: {(data / 'rsicd' / 'images').resolve()}\ncaptions: captions.json\n")
    return path


def _spread(values: list[float]) -> str:
    return f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}"


if __name__ == "__main__":
    main()
