"""``xret train-head``, ``xret finetune`` and ``xret average``: stage two."""

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
    comma_list,
    data_root_option,
    device_option,
    recipe_option,
    seed_option,
    settings_option,
    show,
    store_option,
    trust_option,
    typed,
    weights_options,
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


@click.command()
@click.argument("run", type=RUN)
@click.option("--out", required=True, type=NEW_FOLDER, help="The new run folder; must not exist, unless --resume.")
@data_root_option
@click.option(
    "--reattach",
    callback=comma_list,
    metavar="image,text|image|text",
    help="Which backbones to train; by default those that the recipe's finetune block trains. The others stay cached.",
)
@weights_options
@settings_option("of the recipe")
@store_option
@device_option
@click.option("--resume", is_flag=True, help="Resume with the same options, or begin.")
def finetune(run: str, out: Path, resume: bool, **options: Any) -> None:
    """Train a head and its backbones together, end to end.

    Loads the backbones again that made RUN's features, and trains them with the head, from images and captions. Epochs
    and schedule continue after the head's; schedule.epochs is the total. Evaluate the new run after `xret extract …
    --encoder RUN` has made its features.

    \b
    xret finetune run --data-root DIR --reattach image,text --out tuned \\
        --set schedule.epochs=40
    xret extract rsicd --data-root DIR --store rsicd.zarr --encoder tuned
    xret eval tuned
    """
    from .. import finetune as tune

    say_if_new(out, resume)
    summary = tune(run, out=out, resume=resume, **options)
    show(asdict(summary), format_summary(summary))


@click.command("average")
@click.argument("runs", nargs=-1, required=True, type=RUN, metavar="RUN RUN [RUN ...]")
@click.option("--out", required=True, type=NEW_FOLDER, help="The new run.")
@click.option(
    "--weights",
    default="equal",
    type=click.Choice(["equal", "validation"]),
    help="Of the runs' scores: equal, or what is best on val.",
)
@store_option
@device_option
@trust_option
def average(runs: tuple[str, ...], **options: Any) -> None:
    """Make one run of several, whose scores are the mean of theirs.

    It is a run for eval, search, serve, index, export and report, and has copies of the weights. If all of the RUNs
    compare by cosine, it embeds a sample as one vector: theirs side by side.

    \b
    xret average mlp-0 mlp-1 mlp-2 --out average
    xret eval average
    """
    from dataclasses import asdict

    from ..heads.evaluation.averaging import average as make

    averaged = make([str(run) for run in runs], **options)
    show(asdict(averaged), str(averaged))
