"""``xret demo``: the whole loop on generated pictures."""

import logging
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .parsing import NEW_FOLDER, show, typed

if TYPE_CHECKING:
    from ..heads.evaluation.result import Evaluation

log = logging.getLogger("xret")
# The same of all rows. The recipes' own values are the papers', for COCO on a GPU. The hardest negative alone makes a
# single slot collapse, and what vse-infty leaves out of four rows costs it more in ten epochs than it gains: neither
# would be a fair comparison.
_COMMON: dict[str, Any] = {
    "model.dim": 128,
    "data.unit": "image",
    "data.batch_size": 50,
    "adapter.roi.layers": "linear",
    "adapter.roi.standardize": True,
    "adapter.words.ends": False,
    "loss.triplet.margin": 0.2,
    "loss.triplet.negatives": "all",
    "loss.triplet.reduction": "mean",
    "loss.triplet.warmup_epochs": 0,
    "optimizer.lr": 4e-3,
    "schedule.name": "cosine",
    "schedule.epochs": 10,
    "augment.image": 0,
    "augment.text": 0,
}
_SETS: dict[str, Any] = {
    **_COMMON,
    "aggregator.image.head_dim": 128,
    "aggregator.text.head_dim": 128,
    "aggregator.image.positions": "none",
    "optimizer.aggregator_lr": 1,
}
STORY = (
    "Each picture has four objects, and each caption names one of them: a single vector has to mean all four at once,"
    " of four vectors each can mean one."
)
BY_CAPTION = "k4, caption"  # setdiv-k4, compared in the direction of the captions alone
QUERY = "a big blue heart at the top"  # that one picture answers, of the test split
# The recipe and settings of each row of the table, by the name of its run.
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "vsepp": ("vsepp", _COMMON),
    "vse-infty": ("vse-infty", _COMMON),
    "setdiv-k1": ("setdiv", {**_SETS, "aggregator.image.slots": 1, "aggregator.text.slots": 1}),
    "setdiv-k4": ("setdiv", _SETS),
}


@click.command()
@click.option(
    "--out",
    type=NEW_FOLDER,
    default=Path("xret-demo"),
    help="A new folder, or one in which a demo was stopped, to resume it.",
)
def demo(out: Path) -> None:
    """Run all stages on generated pictures.

    Draws pictures of four objects with four captions, each of one object. The encoder `plain-ground` finds each object
    as a perfect detector would, and stores its thumbnail, colours and place. Trains heads that give an image one vector
    or four, evaluates them and writes a page: it shows what sets are for. Downloads nothing. Run the same command again
    to resume.

    \b
    xret demo --out xret-demo
    """
    _refuse_others(out)
    began = time.monotonic()
    evaluations = run_demo(out)
    seconds = time.monotonic() - began
    lines = [
        f"{'':11}{'image to text':>24}{'text to image':>24}",
        f"{'':11}" + 2 * "     R@1     R@5    R@10" + "    RSUM",
    ]
    for name, evaluation in evaluations.items():
        (table,) = evaluation.results
        values = [way[f"R@{k}"] for way in (table.image_to_text, table.text_to_image) for k in (1, 5, 10)]
        lines.append(f"{name:11}" + "".join(f"{value:8.1f}" for value in (*values, table.rsum)))
    lines.append(f"{table.images} test pictures, {table.captions} captions, ties {table.ties}; chance R@1 is 1.0")
    lines += [f"{BY_CAPTION}: setdiv-k4, where elements of the caption alone look for their nearest: eval --direction"]
    lines += [f"{out / 'report.html'} shows which element of setdiv-k4 finds which object"]
    run, scenes = shlex.quote(str(out / "setdiv-k4")), shlex.quote(str(out / "scenes"))
    lines += [
        f"{seconds:.0f} s; go on with",
        f'  {typed()} search {run} "{QUERY}"',
        f"  {typed()} eval {run} --diagnostics --data-root {scenes}",
        f"  {typed()} serve {run} --data-root {scenes}  # needs pip install 'xret[serve]'",
    ]
    recipes = {name: evaluation.to_dict() for name, evaluation in evaluations.items()}
    show({"seconds": round(seconds, 1), "report": str(out / "report.html"), "recipes": recipes}, lines)


def _refuse_others(out: Path) -> None:
    from ..demo.generate import are_of_seed
    from ..pipeline.files import partials, require_writable

    require_writable(out, "--out")
    scenes = out / "scenes"
    if not out.exists() or are_of_seed(scenes, 0):
        return
    if not out.is_dir() or {entry.name for entry in out.iterdir()} - {left.name for left in partials(scenes)}:
        raise click.ClickException(f"{out} holds no demo; choose another --out, or remove it")


def run_demo(out: Path) -> "dict[str, Evaluation]":
    """Run the loop below the folder `out`, and return the evaluation of each row.

    Finished stages are not repeated, but for the evaluation and the page.
    """
    from .. import evaluate, extract, train
    from ..demo.generate import generate_scenes
    from ..heads.report import write_report
    from ..heads.report.tables import Opening

    store, evaluations = out / "scenes.zarr", {}
    log.info("[1/4] Drawing pictures of four objects, and what can be said of each")
    manifest = generate_scenes(out / "scenes", seed=0)
    log.info("[2/4] Encoding them once")
    extract(manifest, store, visual="plain-ground", text="words")
    log.info(f"[3/4] Training {', '.join(ROWS)} from the same features")
    for name, (recipe, settings) in ROWS.items():
        done = train(store, recipe=recipe, out=out / name, settings=settings, resume=True, title=name)
        log.info(f"{name}: {done.epochs} epochs in {done.seconds:.0f} s, val RSUM {done.best_rsum:.1f}")
        evaluations[name] = evaluate(out / name)
    log.info("[4/4] Judging, and writing the page")
    evaluations[BY_CAPTION] = evaluate(out / "setdiv-k4", direction="caption")
    both, alone = (evaluations[name].results[0].rsum for name in ("setdiv-k4", BY_CAPTION))
    direction = (
        f"A caption names one object, and the other three elements of its picture have nothing to find in it: where the"
        f" caption's elements alone look for their nearest, setdiv-k4 has an RSUM of {alone:.1f} in place of {both:.1f}"
        " (xret eval --direction caption)."
    )
    opening = Opening("What it shows", None, None, [STORY, direction])
    write_report([out / name for name in ROWS], out / "report.html", data_root=out / "scenes", opening=opening)
    return evaluations
