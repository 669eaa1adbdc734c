"""``xret report``: one page that shows what a run does."""

import time
from pathlib import Path
from typing import Any

import click


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN [RUN ...]")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("report.html"),
    show_default=True,
    help="The HTML file; an earlier report there is replaced, anything else is not.",
)
@click.option("--store", help="Another feature cache, with features of the same encoders; by default each run's own.")
@click.option("--split", default="test", show_default=True)
@click.option(
    "--data-root",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Where the pictures are: the folder of the images, or what the paths of a bundled manifest start from. "
    "Without it the page shows ids and captions.",
)
@click.option("--visual-weights", help="The image encoder's, where they came from a file: to embed crops of regions.")
@click.option("--text-weights", help="The text encoder's, if it is not bert-base-uncased: for captions of crops.")
@click.option(
    "--ties",
    default="pessimistic",
    show_default=True,
    type=click.Choice(["pessimistic", "optimistic", "mean"]),
    help="Where an own item stands among equal scores: last, first, or on average.",
)
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0, 2**32 - 1), help="Picks what is shown.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu or cuda.")
def report(
    runs: tuple[str, ...],
    out: Path,
    store: str | None,
    split: str,
    data_root: Path | None,
    visual_weights: str | None,
    text_weights: str | None,
    ties: Any,
    seed: int,
    device: str,
) -> None:
    """Write one self-contained HTML page about RUN, or about several side by side. It needs no network.

    Tables, training curves, diagnostics, a map of the embedding space, attention, what each element finds, and
    galleries of queries. Needs pip install 'xret[report]'.

    \b
    xret report run --data-root DIR
    xret report setdiv-run maxmatch-run --out compared.html --data-root DIR
    """
    from ..heads.report import write_report

    began = time.monotonic()
    size = write_report(
        runs,
        out,
        store=store,
        split=split,
        ties=ties,
        device=device,
        data_root=data_root,
        visual_weights=visual_weights,
        text_weights=text_weights,
        seed=seed,
    )
    click.echo(f"{out}: {size / 1e6:.1f} MB, {time.monotonic() - began:.0f} s")
