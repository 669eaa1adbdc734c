"""Is it worth to put the backbones back? MobileNetV2 and MiniLM on RSICD, tuned on 1,000 images.

A head is trained from the cache; then on one side its backbones are put back and tuned end to end, on the other the
same head is trained on from the cache for the same time, by the clock, validation included. Learning rates are
constant, so that training on is training for longer. Test images are as many as `--test-images`; both sides keep their
best epoch by validation.

    python tests/benchmarks/finetune_rsicd.py DIR --visual-weights mobilenet_v2.safetensors \
        --text-weights MiniLM --out OUT

DIR holds `dataset_rsicd.json` and `images`. What is in OUT already is not made again.
"""

import json
import random
import time
from pathlib import Path
from typing import Any

import click

COMMON = (
    "model.dim=256",
    "data.unit=image",
    "data.batch_size=64",
    "data.captions=1",
    "schedule.name=step",
    "schedule.step=1000000",  # the rate stays
    "optimizer.lr=0.0005",
    "augment.image=0",
    "augment.text=0",
    "loss.triplet.negatives=all",
    "loss.triplet.reduction=mean",
    "loss.same_text=excluded",
)


def subset(data: Path, out: Path, counts: dict[str, int]) -> Path:
    """Write a manifest of so many images of each split, drawn with a fixed seed; return its path."""
    images = json.loads((data / "dataset_rsicd.json").read_text())["images"]
    chosen: list[dict[str, Any]] = []
    for split, count in counts.items():
        there = [image for image in images if image["split"] == split]
        chosen += random.Random(0).sample(there, min(count, len(there)))
    (out / "captions.json").write_text(json.dumps({"dataset": "rsicd", "images": chosen}))
    manifest = out / "rsicd.yaml"
    manifest.write_text(f"name: rsicd-part\nimages: {(data / 'images').resolve()}\ncaptions: captions.json\n")
    return manifest


@click.command()
@click.argument("data", type=click.Path(path_type=Path, exists=True))
@click.option("--visual-weights", required=True)
@click.option("--text-weights", required=True)
@click.option("--out", type=click.Path(path_type=Path), required=True)
@click.option("--recipe", default="vse-infty", show_default=True)
@click.option("--images", default=1000, show_default=True, help="To train on.")
@click.option("--test-images", default=500, show_default=True, help="To validate on, and as many to test on.")
@click.option("--head-epochs", default=15, show_default=True)
@click.option("--epochs", default=5, show_default=True, help="Of fine-tuning.")
@click.option("--most-epochs", default=300, show_default=True, help="Of training on from the cache.")
@click.option("--device", default="auto", show_default=True)
def main(
    data: Path,
    visual_weights: str,
    text_weights: str,
    out: Path,
    recipe: str,
    images: int,
    test_images: int,
    head_epochs: int,
    epochs: int,
    most_epochs: int,
    device: str,
) -> None:
    """Train, tune and train on, then print the table."""
    from xret.heads.evaluation.evaluation import evaluate
    from xret.heads.recipes.recipe import load_recipe
    from xret.heads.runs.encoders import words_of_run
    from xret.heads.runs.run import Run
    from xret.heads.training.finetuning.finetuning import finetune
    from xret.heads.training.train import train
    from xret.pipeline.data.manifest import load_manifest
    from xret.pipeline.extraction.extraction import Options, extract

    out.mkdir(parents=True, exist_ok=True)
    store, seconds = str(out / "rsicd.zarr"), {}
    manifest = load_manifest(subset(data, out, {"train": images, "val": test_images, "test": test_images}))
    options: dict[str, Any] = {"visual": "mobilenet_v2", "visual_weights": visual_weights, "text": "bert"}
    began = time.perf_counter()
    made = extract(manifest, store, Options(**options, text_weights=text_weights, device=device))
    sets = [f"data.{side}={found.name}" for side, found in zip(("image", "text"), made.sets, strict=True)]
    click.echo(f"extraction: {time.perf_counter() - began:.0f} s", err=True)

    def head(name: str, count: int) -> Path:
        chosen = load_recipe(recipe, [*COMMON, *sets, f"schedule.epochs={count}"])
        train(store, chosen, out / name, device=device, resume=True)
        return out / name

    def lasted(run: Path, first: int) -> float:
        return sum(line["seconds"] for line in Run(run).metrics()[first:])

    short = head("head", head_epochs)
    tuned = out / "tuned"
    finetune(
        short,
        tuned,
        settings=[f"schedule.epochs={head_epochs + epochs}", "finetune.crop_and_flip=true", "finetune.mask_words=0.2"],
        reattach=("image", "text"),
        data_root=manifest.images,
        visual_weights=visual_weights,
        text_weights=text_weights,
        device=device,
        resume=True,
    )
    seconds["tuned"] = lasted(tuned, head_epochs)
    an_epoch = lasted(short, 0) / head_epochs
    more = min(most_epochs, max(1, round(seconds["tuned"] / an_epoch)))
    longer = head("longer", head_epochs + more)
    seconds["longer"] = lasted(longer, head_epochs)
    extract(manifest, store, Options(**words_of_run(tuned), device=device))

    click.echo(f"RSICD, {images} training images, {test_images} test images, {recipe}, on {device}")
    click.echo("| run | epochs | seconds beyond the head | best epoch | RSUM | R@1 i→t / t→i |")
    click.echo("|---|---|---|---|---|---|")
    totals = {}
    for run in (short, longer, tuned):
        result = evaluate([run], device=device, ties="mean").results[0]
        totals[run.name] = result.rsum
        ways = " / ".join(f"{getattr(result, way)['R@1']:.2f}" for way in ("image_to_text", "text_to_image"))
        found = Run(run)
        click.echo(
            f"| {run.name} | {len(found.metrics())} | {seconds.get(run.name, 0):.0f} | {found.info.best_epoch} |"
            f" {result.rsum:.2f} | {ways} |"
        )
    click.echo(f"tuned / longer: {totals['tuned'] / totals['longer']:.3f} of the RSUM, ties counted on average")


if __name__ == "__main__":
    main()
