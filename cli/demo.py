"""``xret demo``: the whole loop on generated pictures."""

import json
import time
from pathlib import Path
from typing import Any

import click

from .parsing import NEW_FOLDER

# What 800 pictures on two cores ask for; the recipes' own values are the papers', for COCO on a GPU. Captions here fit
# several pictures, so that the hardest negative is often no negative: all negatives count in every epoch.
SETTINGS: dict[str, list[str]] = {
    "vsepp": [
        "model.dim=256",
        "loss.triplet.warmup_epochs=16",
        "optimizer.lr=2e-3",
        "schedule.epochs=16",
        "schedule.step=12",
    ],
    "setdiv": [
        "model.dim=256",
        "data.batch_size=50",
        "aggregator.image.head_dim=256",
        "aggregator.text.head_dim=256",
        "loss.triplet.margin=0.2",
        "loss.triplet.warmup_epochs=8",
        "optimizer.lr=2e-3",
        "optimizer.aggregator_lr=1",
        "schedule.epochs=8",
    ],
}


@click.command()
@click.option(
    "--out",
    type=NEW_FOLDER,
    default=Path("xret-demo"),
    show_default=True,
    help="A new folder, or one in which a demo was stopped: it goes on.",
)
@click.option(
    "--seed", default=0, show_default=True, type=click.IntRange(0, 2**63 - 1), help="Of the pictures and the training."
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def demo(out: Path, seed: int, as_json: bool) -> None:
    """Generate pictures with captions, extract features, train two heads, evaluate both. Downloads nothing.

    Stopped and started again with the same options, it goes on where it was.

    \b
    xret demo --out xret-demo
    """
    _refuse_others(out, seed)
    result = run_demo(out, seed)
    if as_json:
        click.echo(json.dumps(result))
        return
    click.echo(
        f"{'':8}{'image to text':>24}{'text to image':>24}\n{'':8}" + 2 * "     R@1     R@5    R@10" + "    RSUM"
    )
    for recipe, evaluated in result["recipes"].items():
        table = evaluated["results"][0]
        recalls = [table[way][f"R@{k}"] for way in ("image_to_text", "text_to_image") for k in (1, 5, 10)]
        click.echo(f"{recipe:8}" + "".join(f"{value:8.1f}" for value in recalls) + f"{table['rsum']:8.1f}")
    click.echo(
        f"{table['images']} test pictures, {table['captions']} captions, ties {table['ties']}; chance R@1 is 1.0"
    )
    click.echo(f"{result['seconds']:.0f} s; what the heads found: {out / 'contact-sheet.png'}")


def _refuse_others(out: Path, seed: int) -> None:
    """Refuse a folder that holds something other than a demo of this seed, whether that was finished or stopped."""
    from ..pipeline.data.scenes.generate import are_of_seed
    from ..pipeline.files import partials, require_writable

    require_writable(out, "--out")
    scenes = out / "scenes"
    if not out.exists() or are_of_seed(scenes, seed):
        return
    if not out.is_dir() or {entry.name for entry in out.iterdir()} - {left.name for left in partials(scenes)}:
        raise click.ClickException(f"{out} holds no demo of seed {seed}; choose another --out, or remove it")


def run_demo(out: Path, seed: int) -> dict[str, Any]:
    """Run the loop below the folder `out`; of what is done there already, only the evaluation is repeated.

    Returns:
        ``{"seed", "seconds", "recipes": {name: what `evaluate` returns}}``
    """
    from ..heads.evaluation.evaluation import evaluate
    from ..heads.recipes.recipe import load_recipe
    from ..heads.training.training import train
    from ..pipeline.data.manifest import load_manifest
    from ..pipeline.data.scenes.generate import generate_scenes
    from ..pipeline.extraction import extraction

    began = time.monotonic()
    manifest = load_manifest(generate_scenes(out / "scenes", seed=seed))
    store = str(out / "scenes.zarr")
    options = extraction.Options(visual="resnet18", visual_weights="random:0", text="words")
    extraction.extract(manifest, store, options)
    recipes = {}
    for name, settings in SETTINGS.items():
        train(store, load_recipe(name, settings), out / name, seed=seed, resume=True)
        recipes[name] = evaluate(out / name).to_dict()
    _draw(out, manifest.images)
    return {"seed": seed, "seconds": round(time.monotonic() - began, 1), "recipes": recipes}


def _draw(out: Path, images: Path) -> None:
    from ..heads.evaluation.scoring import score
    from ..heads.report.contact_sheet import contact_sheet

    scores = score(out / "setdiv", split="test")
    sheet = contact_sheet(
        scores.similarity.cpu().numpy(),
        scores.caption_image.cpu().numpy(),
        [images / name for name in scores.file_names],
        scores.texts,
        title="setdiv on the test pictures of the demo",
    )
    sheet.save(out / "contact-sheet.png")
