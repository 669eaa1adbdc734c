"""``xret tune``: the values of a recipe that suit a data set."""

import json
from pathlib import Path
from typing import Any

import click

from .parsing import NEW_FOLDER, Sectioned, key_values, one_recipe, settings_option, verbose_option


@click.command(
    cls=Sectioned,
    sections={
        "What is tuned": "recipe trials space settings seed",
        "Where and how it runs": "out jobs device verbose",
        "What is written": "as_json",
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
@click.option(
    "--trials", default=50, show_default=True, type=click.IntRange(1), help="All together; a larger number adds."
)
@click.option(
    "--space",
    multiple=True,
    callback=key_values,
    metavar="KEY=LOW:HIGH[:log]",
    help="Vary a key beside those of the bundled space, or in another range; or KEY=A,B,C. Repeatable.",
)
@settings_option("in all trials")
@click.option(
    "--seed",
    default=0,
    show_default=True,
    type=click.IntRange(0, 2**63 - 1),
    help="Decides every run, and the values that are drawn.",
)
@click.option("--out", required=True, type=NEW_FOLDER, help="The folder; the same command resumes, and joins in.")
@click.option("--jobs", default=1, show_default=True, type=click.IntRange(1), help="Trials at once on this machine.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu or cuda.")
@verbose_option
@click.option("--json", "as_json", is_flag=True, help="Print every trial as JSON.")
def tune(store: str, recipe: str, out: Path, as_json: bool, **options: Any) -> None:
    """Find the values of a recipe that suit a data set.

    Validation RSUM decides, and the best run is kept. Trials that fall behind are stopped early. The test split is
    looked at when all are over, with the best run: --out/best, and --out/best.yaml is its recipe. On several machines
    that share the folder, run the same command on each.

    \b
    xret tune rsicd.zarr --recipe setdiv --trials 50 --out tuned
    xret tune rsicd.zarr --recipe setdiv --out wider \\
        --space model.dim=256,512,1024 --space augment.image=0:0.4
    xret train-head rsicd.zarr --recipe tuned/best.yaml --seed 1 --out other-seed
    """
    from .. import tune

    tuning = tune(store, recipe=recipe, out=out, **options)
    click.echo(json.dumps(tuning.to_dict()) if as_json else str(tuning))
