"""``xret average``: several runs as one."""

from typing import Any

import click

from .parsing import NEW_FOLDER, RUN, device_option, show, store_option, trust_option


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

    It is a run for eval, search, serve, index, export and report, and has copies of the weights. Where all of the RUNs
    compare by cosine, it embeds a sample as one vector: theirs side by side.

    \b
    xret average mlp-0 mlp-1 mlp-2 --out average
    xret eval average
    """
    from dataclasses import asdict

    from ..heads.evaluation.averaging import average as make

    made = make([str(run) for run in runs], **options)
    show(asdict(made), str(made))
