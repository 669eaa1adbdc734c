"""``xret report``: one page that shows what a run does."""

import time
from pathlib import Path
from typing import Any

import click

from ..pipeline.wording import in_bytes
from .parsing import RUN, data_root_option, device_option, other_store_option, show, split_option, trust_option


@click.command()
@click.argument("runs", nargs=-1, required=True, type=RUN, metavar="RUN [RUN ...]")
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
    """Write an HTML page about one run, or several side by side.

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
