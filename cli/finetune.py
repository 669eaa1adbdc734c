"""``xret finetune``: a trained head with its backbones put back, trained end to end."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from .parsing import (
    NEW_FOLDER,
    RUN,
    comma_list,
    data_root_option,
    device_option,
    settings_option,
    show,
    store_option,
    weights_options,
)
from .train_head import format_summary, say_if_new


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
