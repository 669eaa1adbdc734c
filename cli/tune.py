"""``xret tune``: the values of a recipe that suit a data set."""

import json
from pathlib import Path
from typing import Any

import click

from .parsing import NEW_FOLDER, Sectioned, refuse_verbose_of_many, verbose_option


@click.command(
    cls=Sectioned,
    sections={
        "What is tuned": "recipe trials space settings seed ties views",
        "Where and how it runs": "out jobs device scheduler verbose",
        "What is written": "plot as_json",
    },
)
@click.argument("store")
@click.option(
    "--recipe",
    required=True,
    multiple=True,
    metavar="NAME|FILE",
    help="A name that `xret recipes` lists, or a YAML file; several are tuned with as many trials each.",
)
@click.option(
    "--trials",
    default=50,
    show_default=True,
    type=click.IntRange(1),
    help="Trials of each recipe, all together: the same command completes them, and a larger number adds.",
)
@click.option(
    "--space",
    multiple=True,
    metavar="KEY=LOW:HIGH[:log]",
    help="Vary a key beside those of the bundled space, or in another range; or KEY=A,B,C. As often as needed.",
)
@click.option(
    "--set", "settings", multiple=True, metavar="KEY=VALUE", help="Fix a value in all trials; as often as needed."
)
@click.option(
    "--seed",
    default=0,
    show_default=True,
    type=click.IntRange(0, 2**63 - 1),
    help="Decides every run, and the values that are drawn.",
)
@click.option(
    "--ties",
    default="pessimistic",
    show_default=True,
    type=click.Choice(["pessimistic", "optimistic", "mean"]),
    help="On the test split: where an own item stands among equal scores, last, first, or on average.",
)
@click.option("--views", is_flag=True, help="On the test split: take the mean over all cached views of an image.")
@click.option(
    "--out", required=True, type=NEW_FOLDER, help="The folder; the same command goes on where it was stopped."
)
@click.option(
    "--jobs",
    default=1,
    show_default=True,
    type=click.IntRange(1),
    help="Trials at once, which share one copy of the features; on a CPU as far as there are cores for all threads.",
)
@click.option("--device", default="auto", show_default=True, help="auto, cpu or cuda.")
@click.option("--scheduler", metavar="ADDRESS", help="A Dask cluster that trains the trials, such as tcp://host:8786.")
@click.option("--plot", is_flag=True, help="Draw which keys decide, as importance.png in --out.")
@verbose_option
@click.option("--json", "as_json", is_flag=True, help="Print every trial as JSON.")
def tune(store: str, recipe: tuple[str, ...], out: Path, as_json: bool, **options: Any) -> None:
    """Find the values of a recipe that suit a data set.

    Validation RSUM decides, and the best run is kept. Trials that fall behind are stopped early. The test split is
    looked at when all are over, with the best run: --out/best, and --out/best.yaml is its recipe.

    \b
    xret tune rsicd.zarr --recipe setdiv --trials 50 --out tuned
    xret tune rsicd.zarr --recipe setdiv --out wider \\
        --space model.dim=256,512,1024 --space augment.image=0:0.4
    xret tune rsicd.zarr --recipe linear --recipe mlp --recipe setdiv \\
        --trials 20 --out alike
    xret train-head rsicd.zarr --recipe tuned/best.yaml --seed 1 --out other-seed
    """
    if options["scheduler"] is not None and options["jobs"] > 1:
        raise click.UsageError("--jobs is for this machine; with --scheduler the cluster has as many as its workers")
    refuse_verbose_of_many(options)
    from .. import tune

    tuning = tune(store, recipe=recipe, out=out, **options)
    click.echo(json.dumps(tuning.to_dicts()) if as_json else str(tuning))
    if as_json:  # has no place for them
        for sentence in tuning.failed:
            click.echo(f"failed: {sentence}", err=True)
    if tuning.failed:
        raise click.exceptions.Exit(1)
