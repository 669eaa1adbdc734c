"""``xret eval``: the table of a run."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..pipeline.wording import printable
from .parsing import Sectioned, require_there, view_options

if TYPE_CHECKING:
    from ..heads.report.diagnostics import Diagnosis


@click.command(
    "eval",
    cls=Sectioned,
    sections={
        "What is measured": "image text split protocol annotations ties views",
        "Diagnostics": "diagnostics data_root visual_weights text_weights",
        "Where and how it runs": "store device as_json",
    },
)
@click.argument("runs", nargs=-1, required=True, metavar="RUN|STORE [RUN ...]")
@view_options
@click.option(
    "--image", default="auto", metavar="NAME", help="Of a STORE with several: how the image set's name begins."
)
@click.option(
    "--text", default="auto", metavar="NAME", help="Of a STORE with several: how the caption set's name begins."
)
@click.option(
    "--protocol",
    default="auto",
    show_default=True,
    type=click.Choice(["auto", "full", "1k-folds", "eccv", "cxc", "pmrp", "rpc2"]),
    help="auto: what the data set's manifest says; 1k-folds: the mean of five folds of 1,000 images; on COCO's test "
    "split also eccv and cxc: ECCV Caption and Crisscrossed Captions (pip install 'xret[eccv]'), rpc2: R-Precision on "
    "the latter, and pmrp: R-Precision of plausible matches (needs --annotations).",
)
@click.option("--annotations", metavar="FILE", help="COCO's instances_val2014.json, for --protocol pmrp.")
@click.option(
    "--views",
    is_flag=True,
    help="Compare each image in all views that are cached of it, and take the mean; without it, the image as it is.",
)
@click.option(
    "--diagnostics",
    is_flag=True,
    help="Look into one run: circular variance, what each element does, uncertainty, pooling coefficients, cost, and, "
    "with --data-root, crops.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def eval_(
    runs: tuple[str, ...],
    protocol: str,
    annotations: str | None,
    views: bool,
    image: str,
    text: str,
    diagnostics: bool,
    as_json: bool,
    data_root: Path | None,
    visual_weights: str | None,
    text_weights: str | None,
    **options: Any,
) -> None:
    """Evaluate retrieval: captions by images, and images by captions.

    A RUN ranks with its best epoch, and several runs as an ensemble. A STORE ranks by the cosine of the frozen
    encoders' global features, where they lie in one space as those of CLIP do: what a head on them has to beat.

    \b
    xret eval run
    xret eval flickr30k-clip.zarr
    xret eval grid-run region-run --ties mean --json
    xret eval coco-run --protocol pmrp \\
        --annotations annotations/instances_val2014.json
    xret eval xret-demo/setdiv --diagnostics --data-root xret-demo/scenes
    """
    if diagnostics and len(runs) > 1:
        raise click.UsageError(f"--diagnostics looks into one run, and here are {len(runs)}; name one of them")
    crops: dict[str, Any] = {"data_root": data_root, "visual_weights": visual_weights, "text_weights": text_weights}
    if not diagnostics and (given := [name for name, value in crops.items() if value is not None]):
        raise click.UsageError(f"--{given[0].replace('_', '-')} is for --diagnostics; add that, or leave it out")
    require_there(runs, "run or store")
    from .. import evaluate
    from ..heads.evaluation.subjects import is_store

    if diagnostics and is_store(runs[0]):
        raise click.UsageError(f"--diagnostics looks into a run, and {runs[0]} is a store; leave it out")
    evaluation = evaluate(
        runs, image=image, text=text, protocol=protocol, annotations=annotations, views=views, **options
    )
    diagnosis = None
    if diagnostics:
        from ..heads.report.diagnostics import diagnose

        diagnosis = diagnose(runs[0], **options, **crops)
    if as_json:
        found = evaluation.to_dict() | ({} if diagnosis is None else {"diagnostics": diagnosis.to_dict()})
        click.echo(json.dumps(found))
        return
    click.echo("\n".join(map(printable, str(evaluation).splitlines())))
    if diagnosis is not None:
        click.echo(f"\n{format_diagnostics(diagnosis)}")


def format_diagnostics(found: "Diagnosis") -> str:
    """Return a diagnosis for a terminal: the tables of the report, the samples at both ends, and what is missing."""
    from ..heads.report.sections.diagnoses import diagnosis

    page = diagnosis(found, None)
    tables = [*page.tables.values(), *page.heat_maps.values(), *(plot.table for plot in page.plots.values())]
    parts = ["\n".join(printable(f"{name}: {value}") for name, value in page.facts), *map(str, tables)]
    for title, items in page.uncertain.items():
        parts.append(
            "\n".join([title, *(printable(f"{item.note:>9}  {f'{item.name}  {item.text}'.strip()}") for item in items)])
        )
    parts.append("\n".join(printable(f"not shown: {what}: {why}") for what, why in page.reasons.items()))
    return "\n\n".join(parts)
