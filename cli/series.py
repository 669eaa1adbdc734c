"""``xret ablate`` and ``xret tune``: many trainings from one store."""

from pathlib import Path
from typing import Any

import click

from ..pipeline.wording import counted
from .parsing import (
    NEW_FILE,
    NEW_FOLDER,
    RECIPE,
    STORE,
    device_option,
    key_choices,
    key_values,
    recipe_option,
    seed_option,
    settings_option,
    show,
    workers,
)


def list_grids(context: click.Context, _: click.Parameter, value: str | None) -> str | None:
    """Print the ready-made grids where ``--grid list`` asks for them."""
    if value == "list":
        from ..heads.ablation.plan import grid_names, read_grid

        grids = {name: read_grid(name) for name in grid_names()}
        width, sources = max(map(len, grids)), {name: grid["source"] for name, grid in grids.items()}
        sizes = {name: counted(len(grid["cells"]), "cell") for name, grid in grids.items()}
        show(sources, [f"{name:{width}}  {sizes[name]:>9}  {source}" for name, source in sources.items()])
        context.exit()
    return value


@click.command()
@click.argument("store", type=STORE)
@recipe_option(required=False)
@click.option(
    "--vary",
    multiple=True,
    callback=key_choices,
    metavar="KEY=V1,V2",
    help="A key of the recipe and its values. Several --vary: every combination. KEY1,KEY2=V1,V2: the same "
    "value for both keys.",
)
@click.option(
    "--grid",
    metavar="NAME",
    is_eager=True,
    callback=list_grids,
    help="A published ablation; `--grid list` names them. --recipe replaces its recipe.",
)
@click.option(
    "--baseline",
    "baselines",
    multiple=True,
    type=RECIPE,
    metavar="NAME|FILE",
    help="A recipe to compare with, such as linear or mlp; only --set changes it. It has a row for each varied "
    "data.image and data.text. Repeatable.",
)
@click.option("--seeds", default=1, type=click.IntRange(1), help="Runs of each cell: seeds 0, 1, …")
@settings_option("in all cells")
@click.option(
    "--out", required=True, type=NEW_FOLDER, help="The folder of all runs; run the same command again to resume."
)
@device_option
@click.option("--split", help="The split to evaluate; by default test, or that of the grid's paper.")
@click.option("--views", is_flag=True, help="Evaluate by the mean over all cached views of an image.")
@click.option("--hubness", is_flag=True, help="Also print the table with hubness corrected, see `xret eval`.")
@click.option(
    "--jobs",
    type=str,
    default=1,
    callback=workers,
    metavar="N|tcp://…",
    help="Cells to train at once on this machine, or the address of a Dask cluster.",
)
@click.option(
    "--save",
    "files",
    multiple=True,
    type=NEW_FILE,
    help="Write the table to FILE.csv or FILE.tex (booktabs), or plot RSUM over one numeric --vary to FILE.png, .svg "
    "or .pdf. Repeatable.",
)
def ablate(store: str, **options: Any) -> None:
    """Train a recipe in many variants, and print their table.

    Each cell, a variant with a seed, is a run below --out. Finished cells are kept: further values or seeds train only
    what is new. A failed cell is reported at the end, with exit code 1; the same command tries it again.

    \b
    xret ablate f30k.zarr --recipe setdiv --vary similarity.alpha=4,8,16 \\
        --seeds 3 --out alpha --save alpha.png
    xret ablate f30k.zarr --recipe setdiv --vary aggregator.image.slots=2,4 \\
        --baseline linear --baseline mlp --seeds 3 --out slots
    xret ablate f30k.zarr --grid setdiv-table4 --out table4 --save table4.tex
    xret ablate --grid list
    """
    from .. import ablate as run

    ablation = run(store, **options)
    show(ablation.to_dicts(), str(ablation))
    if ablation.failed:
        raise click.exceptions.Exit(1)


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
