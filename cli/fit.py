"""``xret fit``: from pictures and captions to a model, in one command."""

from pathlib import Path
from shlex import quote
from typing import Any

import click

from .extract import DATA_ROOT, ON_ERROR
from .parsing import NEW_FOLDER, device_option, seed_option, show, trust_option, typed


@click.command()
@click.argument("data", metavar="PICTURES|MANIFEST|STORE")
@click.argument("captions", required=False, type=click.Path(path_type=Path))
@click.option("--out", required=True, type=NEW_FOLDER, help="A new folder, or one in which a fit was stopped.")
@click.option(
    "--encoder",
    metavar="hf:ID|hf:DIR|open_clip:ARCH/TAG",
    help="The model of pictures and texts that is frozen.",
    show_default="hf:openai/clip-vit-base-patch32",
)
@click.option(
    "--minutes", type=click.FloatRange(min=0), help="Train no longer than until then; encoding is always finished."
)
@click.option(
    "--features",
    default="auto",
    metavar="IMAGE,TEXT",
    help="Of a STORE with several sets: how the names of one of pictures and one of captions begin.",
)
@DATA_ROOT
@ON_ERROR
@trust_option
@device_option
@seed_option
def fit(data: str, captions: Path | None, out: Path, **options: Any) -> None:
    """Fit a retrieval model to pictures and captions.

    PICTURES is a folder, with CAPTIONS, a CSV, TSV or JSON of file names and captions. A MANIFEST or a STORE stands
    alone. The pictures are encoded once; candidates are fitted, the frozen encoder among them; validation chooses, and
    the test split judges. OUT is a run and has a page, report.html. Run the same command again to resume.

    \b
    xret fit photos captions.csv --out holiday
    xret fit photos captions.csv --out holiday \\
        --encoder hf:google/siglip-base-patch16-224
    xret fit rsicd.zarr --out rsicd --minutes 10
    """
    from ..heads.fit.fit import fit as make

    fitted = make(data, captions, out=out, **options)
    run, root = quote(fitted.run), "" if fitted.pictures is None else f" --data-root {quote(fitted.pictures)}"
    lines = [
        *str(fitted).splitlines(),
        f"{fitted.report} shows what it finds; go on with",
        f'  {typed()} search {run} "WHAT TO LOOK FOR"',
        f"  {typed()} serve {run}{root}  # needs pip install 'xret[serve]'",
        f"  {typed()} export {run} --out {quote(fitted.run + '-embeddings')}",
    ]
    show(fitted.to_dict(), lines)
