"""``xret report``: one page that shows what a run does."""

import time
from pathlib import Path
from typing import Any

import click

from ..pipeline.wording import in_bytes
from .parsing import Sectioned, require_there, view_options


@click.command(
    cls=Sectioned,
    sections={
        "The page": "out split ties seed",
        "Pictures and crops": "data_root visual_weights text_weights",
        "Where and how it runs": "store device",
    },
)
@click.argument("runs", nargs=-1, required=True, metavar="RUN [RUN ...]")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("report.html"),
    show_default=True,
    help="The HTML file; an earlier report there is replaced, anything else is not.",
)
@view_options
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0, 2**32 - 1), help="Picks what is shown.")
def report(runs: tuple[str, ...], out: Path, **options: Any) -> None:
    """Write an HTML page about one run, or several side by side.

    The page is one file, and needs no network: tables, training curves, diagnostics, a map of the embedding space,
    attention, what each element finds, and galleries of queries; without --data-root, ids and captions stand for
    pictures. Needs pip install 'xret[report]'.

    \b
    xret report run --data-root DIR
    xret report setdiv-run maxmatch-run --out compared.html --data-root DIR
    """
    require_there(runs)
    from ..heads.report import write_report

    began = time.monotonic()
    size = write_report(runs, out, **options)
    click.echo(f"{out}: {in_bytes(size)}, {time.monotonic() - began:.0f} s")
