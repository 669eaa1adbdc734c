"""``xret eval`` and ``xret report``: the tables of a run, and the page that shows what it does."""

import time
from pathlib import Path
from typing import Any

import click

from ..pipeline.wording import in_bytes
from .parsing import (
    FOLDER,
    RUN_OR_STORE,
    data_root_option,
    device_option,
    other_store_option,
    show,
    split_option,
    trust_option,
)


@click.command("eval")
@click.argument("runs", nargs=-1, type=RUN_OR_STORE, metavar="RUN|STORE [RUN ...]")
@click.option(
    "--embeddings",
    nargs=3,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="IMAGES.npy CAPTIONS.npy INDEX",
    help="Evaluate embeddings by their cosine, in the place of a RUN. INDEX is CSV or JSON lines with file_name and "
    "caption, a line a row of CAPTIONS.",
)
@other_store_option
@split_option
@click.option(
    "--protocol",
    default="auto",
    metavar="NAME",
    help="auto: as the manifest says; full; 1k-folds: the mean of five folds of 1,000 images. On COCO's test "
    "split also eccv, cxc and rpc2: ECCV Caption, Crisscrossed Captions and its R-Precision (pip install "
    "'xret[eccv]'); and pmrp:FILE: R-Precision of plausible matches, from COCO's instances_val2014.json. "
    "module:Class: your own.",
)
@click.option(
    "--ties",
    default="pessimistic",
    type=click.Choice(["pessimistic", "optimistic", "mean"]),
    help="Rank of the right item among equal scores: last, first, or on average.",
)
@click.option(
    "--views", is_flag=True, help="Take the mean over all cached views of an image, instead of the first alone."
)
@click.option(
    "--hubness",
    is_flag=True,
    help="Also print a table with hubness corrected: items that answer too many training queries are held back "
    "(QB-Norm); the scale is chosen on val.",
)
@click.option(
    "--calibration",
    is_flag=True,
    help="Also print, for one run, whether the probabilities that `xret search` shows hold on this split.",
)
@click.option(
    "--compare",
    is_flag=True,
    help="Compare two runs query by query, all images against all captions: differences with 95% intervals, "
    "and the queries that change most.",
)
@click.option(
    "--direction",
    type=click.Choice(["both", "image", "caption"]),
    show_default="as trained",
    help="With sets compared by chamfer or smooth-chamfer: whose elements look for their nearest. caption: where a "
    "caption names a part of its picture.",
)
@click.option(
    "--features",
    default="auto",
    metavar="IMAGE,TEXT",
    help="With a STORE that has several image or caption sets in one space: the beginnings of two names.",
)
@click.option(
    "--diagnostics",
    is_flag=True,
    help="Also print, for one run, circular variance, the work of each element, uncertainty, pooling "
    "coefficients, cost and, with --data-root or --visual-genome, results on crops.",
)
@click.option("--data-root", type=FOLDER, help="For crops: the folder of the data set's manifest and images.")
@click.option(
    "--visual-genome",
    type=FOLDER,
    help="For crops: the folder of Visual Genome's region_descriptions.json, image_data.json and pictures "
    "(VG_100K and VG_100K_2); they need no store.",
)
@trust_option
@device_option
def eval_(
    runs: tuple[str, ...],
    embeddings: tuple[Path, Path, Path] | None,
    compare: bool,
    diagnostics: bool,
    data_root: Path | None,
    visual_genome: Path | None,
    **options: Any,
) -> None:
    """Evaluate retrieval in both directions.

    Finds captions for images, and images for captions. A RUN ranks with its best epoch; several runs are an ensemble. A
    STORE ranks by the cosine of its global features, if they lie in one space as those of CLIP do: the result that a
    head has to beat.

    \b
    xret eval run
    xret eval flickr30k-clip.zarr
    xret eval grid-run region-run --ties mean --json
    xret eval run --hubness
    xret eval run other --compare
    xret eval coco-run --protocol pmrp:annotations/instances_val2014.json
    xret eval xret-demo/setdiv-k4 --diagnostics --data-root xret-demo/scenes
    xret eval coco-run --diagnostics --visual-genome DIR
    xret eval --embeddings images.npy captions.npy index.csv
    """
    from .. import evaluate
    from ..heads.evaluation.scoring import is_store

    if bool(runs) == (embeddings is not None):
        raise click.UsageError("name a RUN or STORE, or give --embeddings, and not both")
    if diagnostics and (len(runs) != 1 or is_store(runs[0])):
        raise click.UsageError("--diagnostics takes one run, and no store")
    if diagnostics and (options["direction"] or options["views"]):
        raise click.UsageError("--diagnostics looks into a run as it was trained; leave --direction and --views out")
    for name, given in (("--data-root", data_root), ("--visual-genome", visual_genome)):
        if given is not None and not diagnostics:
            raise click.UsageError(f"{name} is for the crops of --diagnostics; add that, or leave it out")
    if compare:
        evaluation: Any = _compared(runs, **options)
    elif embeddings is not None:
        from ..heads.evaluation.given import evaluate_embeddings

        evaluation = evaluate_embeddings(*embeddings, **options)
    else:
        evaluation = evaluate(runs, **options)
    value, text = evaluation.to_dict(), str(evaluation)
    if diagnostics:
        from ..heads.diagnostics import diagnose

        same = {key: options[key] for key in ("store", "split", "ties", "device", "trust")}
        diagnosis = diagnose(runs[0], **same, data_root=data_root, visual_genome=visual_genome)
        value, text = value | {"diagnostics": diagnosis.to_dict()}, f"{text}\n\n{diagnosis}"
    show(value, text)


def _compared(
    runs: tuple[str, ...], *, protocol: str, hubness: bool, calibration: bool, direction: str | None, **options: Any
) -> Any:
    from ..heads.evaluation.comparison import compare_runs

    if len(runs) != 2 or hubness or calibration or direction or protocol not in ("auto", "full"):
        raise click.UsageError(
            "--compare takes two runs, without --diagnostics, --hubness, --calibration, --direction or another"
            " --protocol"
        )
    return compare_runs(*runs, **options)


@click.command()
@click.argument("runs", nargs=-1, required=True, type=RUN_OR_STORE, metavar="RUN|STORE [RUN ...]")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("report.html"),
    help="The HTML file; only an earlier report is replaced.",
)
@data_root_option
@split_option
@other_store_option
@trust_option
@device_option
def report(runs: tuple[str, ...], out: Path, **options: Any) -> None:
    """Write an HTML page about a run, or several side by side.

    The page is one file and needs no network. It has bars and tables with the frozen encoders and chance, attention,
    galleries of queries, what each element finds, where runs disagree, training curves and the settings. Without
    --data-root, ids and captions replace pictures.

    \b
    xret report run --data-root DIR
    xret report setdiv-run maxmatch-run --out compared.html --data-root DIR
    """
    from ..heads.report import write_report

    began = time.monotonic()
    size = write_report(runs, out, **options)
    seconds = time.monotonic() - began
    show({"out": str(out), "bytes": size, "seconds": seconds}, f"{out}: {in_bytes(size)}, {seconds:.0f} s")
