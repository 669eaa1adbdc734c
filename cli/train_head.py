"""``xret train-head``: stage two."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..pipeline.wording import counted
from .parsing import NEW_FOLDER, Sectioned, one_recipe, settings_option, verbose_option

if TYPE_CHECKING:
    from ..heads.training.trainer import TrainSummary


@click.command(
    "train-head",
    cls=Sectioned,
    sections={
        "What is trained": "recipe settings also init_from seed",
        "Where and how it runs": "out resume device verbose as_json",
    },
)
@click.argument("store")
@click.option(
    "--recipe",
    required=True,
    multiple=True,
    callback=one_recipe,
    metavar="NAME|FILE",
    help="A name that `xret recipes` lists, or a YAML file.",
)
@settings_option("of the recipe")
@click.option(
    "--also",
    multiple=True,
    metavar="STORE2",
    help="Learn the training split of this store as well, extracted with the same options; as often as needed.",
)
@click.option("--init-from", metavar="RUN", help="Begin with the best weights of this run, all of which must fit.")
@click.option("--out", required=True, type=NEW_FOLDER, help="The run folder; must not exist, unless --resume.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu or cuda.")
@click.option(
    "--seed", default=0, show_default=True, type=click.IntRange(0, 2**63 - 1), help="Same seed, same numbers."
)
@click.option(
    "--resume", is_flag=True, help="Go on with the same options where it stopped, or with more epochs, or begin."
)
@verbose_option
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def train_head(store: str, out: Path, resume: bool, as_json: bool, **options: Any) -> None:
    """Train a head on cached features.

    The best epoch by validation RSUM is kept.

    \b
    xret train-head rsicd.zarr --recipe setdiv --out run
    xret train-head rsicd.zarr --recipe setdiv --out run --resume
    xret train-head rsicd.zarr --recipe setdiv --out run2 \\
        --set schedule.epochs=20 --set loss.triplet.margin=0.2
    xret train-head coco.zarr --also f30k.zarr --recipe vse-infty --out run3
    """
    from .. import train

    say_if_new(out, resume)
    summary = train(store, out=out, resume=resume, **options)
    click.echo(json.dumps(asdict(summary)) if as_json else format_summary(summary))


def say_if_new(out: Path, resume: bool) -> None:
    """Say where --resume has nothing to go on from: a script may mean it so, or --out is mistyped."""
    if resume and not out.exists():
        click.echo(f"--resume: there is nothing to resume in {out}, a new run is begun", err=True)


def format_summary(summary: "TrainSummary") -> str:
    """Return what came of a training as a line for a terminal."""
    trained = f"{counted(summary.trained, 'epoch')} in {summary.seconds:.1f} s"
    untrained = summary.untrained_rsum
    return (
        f"{summary.run}: {trained if summary.trained else 'it was complete already'}; "
        f"best of {summary.epochs}: epoch {summary.best_epoch}, validation RSUM {summary.best_rsum:.1f}"
        + ("" if untrained is None else f"; the frozen encoders alone: {untrained:.1f}")
    )
