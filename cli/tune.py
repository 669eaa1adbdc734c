"""``xret tune``: the values of a recipe that suit a data set."""

from pathlib import Path
from typing import Any

import click

from .parsing import NEW_FOLDER, device_option, key_values, recipe_option, settings_option, show


@click.command()
@click.argument("store")
@recipe_option(required=True)
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
@click.option("--hubness", is_flag=True, help="Evaluate the best run also with hubness corrected, see `xret eval`.")
@click.option("--out", required=True, type=NEW_FOLDER, help="The folder; the same command resumes, and joins in.")
@device_option
def tune(store: str, recipe: str, out: Path, **options: Any) -> None:
    """Find the values of a recipe that suit a data set.

    Validation RSUM decides, and the best run is kept. Trials that fall behind are stopped early. The test split is
    looked at when all are over, with the best run: --out/best, and --out/best.yaml is its recipe. The same command run
    several times at once, also on machines that share the folder, shares the work.

    \b
    xret tune rsicd.zarr --recipe setdiv --trials 50 --out tuned
    xret tune rsicd.zarr --recipe setdiv --out wider \\
        --space model.dim=256,512,1024 --space augment.image=0:0.4
    xret train-head rsicd.zarr --recipe tuned/best.yaml --seed 1 --out other-seed
    """
    from .. import tune

    tuning = tune(store, recipe=recipe, out=out, **options)
    show(tuning.to_dict(), str(tuning))
