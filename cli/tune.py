"""``xret tune``: the values of a recipe that suit a data set."""

from pathlib import Path
from typing import Any

import click

from .parsing import NEW_FOLDER, STORE, device_option, key_values, recipe_option, seed_option, settings_option, show


@click.command()
@click.argument("store", type=STORE)
@recipe_option(required=True)
@click.option(
    "--trials",
    default=50,
    type=click.IntRange(1),
    help="Number of trials in all; a larger number adds to those that are there.",
)
@click.option(
    "--space",
    multiple=True,
    callback=key_values,
    metavar="KEY=LOW:HIGH[:log]",
    help="Add a key to the bundled space or replace its range; or KEY=A,B,C. Repeatable.",
)
@settings_option("in all trials")
@seed_option
@click.option("--hubness", is_flag=True, help="Also evaluate the best run with hubness corrected, see `xret eval`.")
@click.option(
    "--out", required=True, type=NEW_FOLDER, help="The folder; the same command resumes there, or shares the work."
)
@device_option
def tune(store: str, recipe: str, out: Path, **options: Any) -> None:
    """Find the values of a recipe that suit a data set.

    Validation RSUM decides. Trials that fall behind are stopped early. The best run is --out/best, and --out/best.yaml
    its recipe; it alone is evaluated on the test split, after all trials. The same command run several times at once
    shares the work, also on several machines that share the folder.

    \b
    xret tune rsicd.zarr --recipe setdiv --trials 50 --out tuned
    xret tune rsicd.zarr --recipe setdiv --out wider \\
        --space model.dim=256,512,1024 --space augment.image=0:0.4
    xret train-head rsicd.zarr --recipe tuned/best.yaml --seed 1 --out other-seed
    """
    from .. import tune

    tuning = tune(store, recipe=recipe, out=out, **options)
    show(tuning.to_dict(), str(tuning))
