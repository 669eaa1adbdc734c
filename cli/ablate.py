"""``xret ablate``: many heads from one store, and their table."""

import json
from pathlib import Path
from typing import Any

import click

from ..pipeline.files import write_text
from ..pipeline.wording import counted
from .parsing import NEW_FILE, NEW_FOLDER, Sectioned, one_recipe, refuse_verbose_of_many, verbose_option


def list_grids(context: click.Context, _: click.Parameter, value: str | None) -> str | None:
    """Print the ready-made grids where ``--grid list`` asks for them."""
    if value == "list":
        from ..heads.ablation.plan import grid_names, read_grid

        grids = {name: read_grid(name) for name in grid_names()}
        width = max(map(len, grids))
        for name, grid in grids.items():
            click.echo(f"{name:{width}}  {counted(len(grid['cells']), 'cell'):>9}  {grid['source']}")
        context.exit()
    return value


@click.command(
    cls=Sectioned,
    sections={
        "What is trained": "recipe vary grid baselines settings seeds split views",
        "Where and how it runs": "out jobs device scheduler verbose",
        "What is written": "csv_file latex_file plot_file as_json",
    },
)
@click.argument("store")
@click.option(
    "--recipe",
    multiple=True,
    callback=one_recipe,
    metavar="NAME|FILE",
    help="A name that `xret recipes` lists, or a YAML file.",
)
@click.option(
    "--vary",
    multiple=True,
    metavar="KEY=V1,V2",
    help="A key of the recipe and its values; with several --vary every combination. KEY1,KEY2=V1,V2: the same value "
    "for both keys.",
)
@click.option(
    "--grid",
    metavar="NAME",
    is_eager=True,
    callback=list_grids,
    help="A published ablation; `--grid list` names them. With --recipe: on that recipe in the place of its own.",
)
@click.option(
    "--baseline",
    "baselines",
    multiple=True,
    metavar="NAME|FILE",
    help="A recipe that stands in the table as it is, but for --set: linear, mlp, as rows to beat; as often as needed. "
    "Where data.image or data.text is varied, it has a row for each.",
)
@click.option("--seeds", default=1, show_default=True, type=click.IntRange(1), help="Runs of each cell: seeds 0, 1, …")
@click.option(
    "--set", "settings", multiple=True, metavar="KEY=VALUE", help="Change a value in all cells; as often as needed."
)
@click.option(
    "--out",
    required=True,
    type=NEW_FOLDER,
    help="The folder of all runs; the same command goes on where it was stopped.",
)
@click.option("--device", default="auto", show_default=True, help="auto, cpu or cuda.")
@click.option("--split", help="What is evaluated; by default test, or what the grid's paper took.")
@click.option("--views", is_flag=True, help="Evaluate by the mean over all views that are cached of an image.")
@click.option(
    "--jobs",
    default=1,
    show_default=True,
    type=click.IntRange(1),
    help="Cells at once, which share one copy of the features; on a CPU as far as there are cores for all threads.",
)
@click.option("--scheduler", metavar="ADDRESS", help="A Dask cluster that trains the cells, such as tcp://host:8786.")
@click.option("--csv", "csv_file", type=NEW_FILE, help="Write the table as CSV.")
@click.option("--latex", "latex_file", type=NEW_FILE, help="Write the table as LaTeX, for booktabs.")
@click.option("--plot", "plot_file", type=NEW_FILE, help="Draw RSUM over one numeric --vary: .png, .svg or .pdf.")
@verbose_option
@click.option("--json", "as_json", is_flag=True, help="Print every cell and seed as JSON.")
def ablate(
    store: str,
    recipe: str | None,
    vary: tuple[str, ...],
    grid: str | None,
    baselines: tuple[str, ...],
    settings: tuple[str, ...],
    out: Path,
    csv_file: Path | None,
    latex_file: Path | None,
    plot_file: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Train a recipe in many variants, and print their table.

    Every cell, a variant with a seed, is a run below --out. What is finished stays: more values or seeds cost only
    themselves. A cell that fails is reported at the end, with exit code 1, and tried again by the same command.

    \b
    xret ablate f30k.zarr --recipe setdiv --vary similarity.alpha=4,8,16 \\
        --seeds 3 --out alpha --plot alpha.png
    xret ablate f30k.zarr --recipe setdiv --vary aggregator.image.slots=2,4 \\
        --baseline linear --baseline mlp --seeds 3 --out slots
    xret ablate f30k.zarr --grid setdiv-table4 --out table4 --latex table4.tex
    xret ablate --grid list
    """
    if (grid is None) == (not vary) or (grid is None and recipe is None):
        raise click.UsageError("give --recipe with one --vary or more, or --grid")
    if options["scheduler"] is not None and options["jobs"] > 1:
        raise click.UsageError("--jobs is for this machine; with --scheduler the cluster has as many as its workers")
    refuse_verbose_of_many(options)
    from ..heads.ablation.ablation import ablate as run
    from ..heads.ablation.plan import make_plan
    from ..heads.ablation.table import as_csv, as_latex, plot, require_plot

    plan = make_plan(recipe, vary, grid, settings, baselines)
    if plot_file is not None:  # refuse before any work begins what cannot be drawn at its end
        try:
            require_plot(plot_file, [variant.values for variant in plan.variants if not variant.baseline])
        except ValueError as error:
            raise click.UsageError(f"--plot: {error}") from error
    ablation = run(store, plan, out, **options)
    click.echo(json.dumps(ablation.to_dicts()) if as_json else str(ablation))
    if csv_file is not None:
        write_text(csv_file, as_csv(ablation.lines))
    if latex_file is not None:
        write_text(latex_file, as_latex(ablation.lines))
    if plot_file is not None:
        plot(ablation.lines, plot_file)
    if ablation.failed:
        raise click.exceptions.Exit(1)
