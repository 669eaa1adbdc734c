"""``xret eval``: the table of a run."""

import json
from pathlib import Path
from typing import Any

import click

from .diagnostics import format_diagnostics
from .parsing import Sectioned, view_options


@click.command(
    "eval",
    cls=Sectioned,
    sections={
        "What is measured": "split protocol annotations ties",
        "Diagnostics": "diagnostics data_root visual_weights text_weights",
        "Where and how it runs": "store device as_json",
    },
)
@click.argument("runs", nargs=-1, required=True, metavar="RUN [RUN ...]")
@view_options
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
    "--diagnostics",
    is_flag=True,
    help="Look into one run: circular variance, what each element does, uncertainty, pooling coefficients, cost, and, "
    "with --data-root, crops.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def eval_(
    runs: tuple[str, ...],
    store: str | None,
    split: str,
    protocol: str,
    annotations: str | None,
    ties: Any,
    diagnostics: bool,
    data_root: Path | None,
    visual_weights: str | None,
    text_weights: str | None,
    device: str,
    as_json: bool,
) -> None:
    """Rank captions by images and images by captions with the best epoch of RUN; several runs make an ensemble.

    \b
    xret eval run
    xret eval grid-run region-run --ties mean --json
    xret eval coco-run --protocol pmrp --annotations annotations/instances_val2014.json
    xret eval xret-demo/setdiv --diagnostics --data-root xret-demo/scenes
    """
    if diagnostics and len(runs) > 1:
        raise click.UsageError(f"--diagnostics looks into one run, and here are {len(runs)}; name one of them")
    crops = {"--data-root": data_root, "--visual-weights": visual_weights, "--text-weights": text_weights}
    if not diagnostics and (given := [option for option, value in crops.items() if value is not None]):
        raise click.UsageError(f"{given[0]} is for --diagnostics; add that, or leave it out")
    from .. import evaluate

    evaluation = evaluate(
        runs, store=store, split=split, protocol=protocol, ties=ties, device=device, annotations=annotations
    )
    diagnosis = None
    if diagnostics:
        from ..heads.report.diagnostics import diagnose

        diagnosis = diagnose(
            runs[0],
            store=store,
            split=split,
            ties=ties,
            device=device,
            data_root=data_root,
            visual_weights=visual_weights,
            text_weights=text_weights,
        )
    if as_json:
        found = evaluation.to_dict() | ({} if diagnosis is None else {"diagnostics": diagnosis})
        click.echo(json.dumps(found))
        return
    click.echo(str(evaluation))
    if diagnosis is not None:
        click.echo(format_diagnostics(diagnosis))
