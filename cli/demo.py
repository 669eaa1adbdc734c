"""``xret demo``: the whole loop on generated pictures."""

import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .parsing import NEW_FOLDER, show

if TYPE_CHECKING:
    from ..heads.evaluation.evaluation import Evaluation

# What 800 pictures on two cores ask for; the recipes' own values are the papers', for COCO on a GPU. Captions here fit
# several pictures, so that the hardest negative is often no negative: all negatives count in every epoch.
SETTINGS: dict[str, dict[str, float]] = {
    "vsepp": {
        "model.dim": 256,
        "loss.triplet.warmup_epochs": 16,
        "optimizer.lr": 2e-3,
        "schedule.epochs": 16,
        "schedule.step": 12,
    },
    "setdiv": {
        "model.dim": 256,
        "data.batch_size": 50,
        "aggregator.image.head_dim": 256,
        "aggregator.text.head_dim": 256,
        "loss.triplet.margin": 0.2,
        "loss.triplet.warmup_epochs": 8,
        "optimizer.lr": 2e-3,
        "optimizer.aggregator_lr": 1,
        "schedule.epochs": 8,
    },
}


@click.command()
@click.option(
    "--out",
    type=NEW_FOLDER,
    default=Path("xret-demo"),
    show_default=True,
    help="A new folder, or one in which a demo was stopped: it goes on.",
)
def demo(out: Path) -> None:
    """Run the whole loop on generated pictures.

    Generates pictures with captions, extracts features, trains two heads and evaluates both. Downloads nothing.
    Stopped and started again with the same options, it goes on where it was.

    \b
    xret demo --out xret-demo
    """
    _refuse_others(out)
    began = time.monotonic()
    found = run_demo(out)
    seconds = time.monotonic() - began
    lines = [
        f"{'':8}{'image to text':>24}{'text to image':>24}",
        f"{'':8}" + 2 * "     R@1     R@5    R@10" + "    RSUM",
    ]
    for name, evaluation in found.items():
        (table,) = evaluation.results
        values = [way[f"R@{k}"] for way in (table.image_to_text, table.text_to_image) for k in (1, 5, 10)]
        lines.append(f"{name:8}" + "".join(f"{value:8.1f}" for value in (*values, table.rsum)))
    lines.append(f"{table.images} test pictures, {table.captions} captions, ties {table.ties}; chance R@1 is 1.0")
    lines += [f"{seconds:.0f} s; go on with", *(f"  {command}" for command in next_commands(out))]
    recipes = {name: evaluation.to_dict() for name, evaluation in found.items()}
    show({"seconds": round(seconds, 1), "recipes": recipes}, lines)


def next_commands(out: Path) -> list[str]:
    """Return what to type after a demo in `out`."""
    run, scenes = shlex.quote(str(out / "setdiv")), shlex.quote(str(out / "scenes"))
    return [
        f'xret search {run} "a red square"',
        f"xret eval {run} --diagnostics --data-root {scenes}",
        f"xret serve {run} --data-root {scenes}  # needs pip install 'xret[serve]'",
    ]


def _refuse_others(out: Path) -> None:
    """Refuse a folder that holds something other than a demo, whether that was finished or stopped."""
    from ..pipeline.data.scenes.generate import are_of_seed
    from ..pipeline.files import partials, require_writable

    require_writable(out, "--out")
    scenes = out / "scenes"
    if not out.exists() or are_of_seed(scenes, 0):
        return
    if not out.is_dir() or {entry.name for entry in out.iterdir()} - {left.name for left in partials(scenes)}:
        raise click.ClickException(f"{out} holds no demo; choose another --out, or remove it")


def run_demo(out: Path) -> "dict[str, Evaluation]":
    """Run the loop below the folder `out`, and return the evaluation of each recipe.

    Of what is done there already, only the evaluation is repeated.
    """
    from .. import evaluate, extract, train
    from ..pipeline.data.scenes.generate import generate_scenes

    store = out / "scenes.zarr"
    manifest = generate_scenes(out / "scenes", seed=0)
    extract(manifest, store, visual="resnet18", visual_weights="random:0", text="words")
    found = {}
    for name, settings in SETTINGS.items():
        train(store, recipe=name, out=out / name, settings=settings, resume=True)
        found[name] = evaluate(out / name)
    return found
