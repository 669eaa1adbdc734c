"""``xret export``: the embeddings of a run for the code of others."""

from pathlib import Path
from typing import Any

import click

from ..pipeline.wording import counted, in_bytes
from .parsing import NEW_FOLDER, RUN_OR_ID, embedding_options, show


@click.command()
@click.argument("run", type=RUN_OR_ID)
@click.option(
    "--out",
    required=True,
    type=NEW_FOLDER,
    metavar="FILE.parquet|FILE.safetensors|FOLDER",
    help="A new file or folder; a folder gets .npy files and a data set card.",
)
@embedding_options
def export(run: str, out: Path, dims: int | None, dtype: str, **options: Any) -> None:
    """Write the embeddings of a run to files.

    They are those of all images and captions of RUN's store, or of a split's, with ids, file names and texts. Vectors
    have unit length where RUN compares by cosine, so that a dot product ranks as RUN does.

    \b
    xret export run --out all.parquet
    xret export run --split test --out test.safetensors
    xret export run --out small.npy --dims 64 --dtype int8
    xret export run --out embeddings  # a folder of .npy and .jsonl
    """
    from ..heads.retrieval.export import export_embeddings
    from ..heads.retrieval.retriever import Retriever

    summary = export_embeddings(Retriever(run, **options), out, dims=dims, dtype=dtype)
    shapes = ", ".join(f"{name} {'x'.join(map(str, shape))}" for name, shape in summary["shapes"].items())
    small = summary.get("mean_recall")
    recall = (
        "" if small is None else f"; mean recall of {small['split']} {small['before']:.2f}, now {small['after']:.2f}"
    )
    show(
        summary,
        f"{out}: {counted(summary['images'], 'image')} and {counted(summary['captions'], 'caption')} as"
        f" {summary['kind']}s ({shapes}), {in_bytes(summary['bytes'])}{recall}",
    )
