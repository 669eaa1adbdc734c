"""``xret train-head``: stage two."""

from dataclasses import asdict
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import click

from ..pipeline.wording import counted
from .parsing import (
    NEW_FOLDER,
    RUN,
    STORE,
    device_option,
    recipe_option,
    seed_option,
    settings_option,
    show,
    trust_option,
    typed,
)

if TYPE_CHECKING:
    from ..heads.training.trainer import TrainSummary


@click.command("train-head")
@click.argument("stores", nargs=-1, required=True, type=STORE, metavar="STORE [STORE ...]")
@recipe_option(required=True)
@settings_option("of the recipe")
@click.option(
    "--init-from", type=RUN, metavar="RUN", help="Begin with the best weights of this run; all of them must fit."
)
@click.option(
    "--distil", type=RUN, metavar="RUN", help="Learn the scores of this run on the same store, too; best an average."
)
@click.option("--out", required=True, type=NEW_FOLDER, help="The run folder; must not exist, unless --resume.")
@trust_option
@device_option
@seed_option
@click.option("--resume", is_flag=True, help="Resume with the same options or with more epochs, or begin.")
def train_head(stores: tuple[str, ...], out: Path, resume: bool, **options: Any) -> None:
    """Train a head on cached features.

    The best epoch by validation RSUM is kept. With several stores, extracted with the same options, it learns all
    training splits together and validates on the first store.

    \b
    xret train-head rsicd.zarr --recipe setdiv --out run
    xret train-head rsicd.zarr --recipe setdiv --out run --resume
    xret train-head rsicd.zarr --recipe setdiv --out run2 \\
        --set schedule.epochs=20 --set loss.triplet.margin=0.2
    xret train-head rsicd.zarr --recipe mlp --distil average --out distilled
    xret train-head coco.zarr f30k.zarr --recipe vse-infty --out run3
    """
    from .. import train

    say_if_new(out, resume)
    summary = train(stores, out=out, resume=resume, **options)
    show(asdict(summary), [format_summary(summary), f"go on with `{typed()} eval {quote(summary.run)}`"])


def say_if_new(out: Path, resume: bool) -> None:
    """Say where --resume has nothing to go on from: a script may mean it so, or --out is mistyped."""
    if resume and not out.exists():
        click.echo(f"--resume: there is nothing to resume in {out}, a new run is begun", err=True)


def format_summary(summary: "TrainSummary") -> str:
    """Return what came of a training as a line for a terminal."""
    untrained = summary.untrained_rsum
    alone = "" if untrained is None else f"; the frozen encoders alone: {untrained:.1f}"
    reached = f"validation RSUM {summary.best_rsum:.1f}{alone}"
    if not summary.epochs:
        return f"{summary.run}: in closed form, {reached}"
    trained = f"{counted(summary.trained, 'epoch')} in {summary.seconds:.1f} s"
    best = f"epoch {summary.best_epoch}" if summary.best_epoch else "before the first step"
    done = trained if summary.trained else "it was complete already"
    return f"{summary.run}: {done}; best of {summary.epochs}: {best}, {reached}"
