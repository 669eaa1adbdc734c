"""``xret export``: the embeddings of a run, or the run itself, for the code of others."""

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
    help="A new file or folder; a folder gets .npy files and a data set card. Hard negatives are a FILE.jsonl.",
)
@click.option(
    "--to",
    type=click.Choice(["embeddings", "onnx", "immich", "sentence-transformers", "hard-negatives"]),
    default="embeddings",
    help="What is written: the embeddings of RUN's store; RUN with its encoders as ONNX graphs, or as a model of"
    " immich or sentence-transformers; or the negatives that RUN ranks highest in a split (train).",
)
@click.option(
    "--since",
    multiple=True,
    metavar="EXPORT",
    type=click.Path(exists=True, path_type=Path),
    help="Write only what this earlier export of RUN has not, for a database that grows; repeatable.",
)
@embedding_options
def export(run: str, out: Path, to: str, since: tuple[Path, ...], dims: int | None, dtype: str, **options: Any) -> None:
    """Write embeddings, a model for others, or hard negatives.

    Embeddings are those of all images and captions of the store, or of a split, with ids, file names and texts. Vectors
    have unit length where RUN compares by cosine, so that a dot product ranks as RUN does.

    \b
    xret export run --out all.parquet
    xret export run --split test --out test.safetensors
    xret export run --store larger.zarr --since all.parquet --out new.parquet
    xret export run --out small.npy --dims 64 --dtype int8
    xret export run --out embeddings  # a folder of .npy and .jsonl
    xret export run --to onnx --out model  # without xret and torch
    xret export run --to hard-negatives --out negatives.jsonl
    """
    from ..heads.retrieval.export import export_embeddings
    from ..heads.retrieval.retriever import Retriever

    typed = dims is not None or since or options["hubness"] or (dtype != "float32" and to != "onnx")
    if to != "embeddings" and typed:
        raise click.UsageError(
            f"--to {to} takes no --dims, --since, --hubness and, but for onnx, --dtype; leave them out"
        )
    if to in ("onnx", "immich", "sentence-transformers") and options["split"]:
        raise click.UsageError(f"--to {to} takes no --split; leave it out")
    if to == "immich":
        from ..heads.retrieval.immich import export_immich

        about = export_immich(Retriever(run, **options | {"device": "cpu"}), out)
        show(about, f"{out}: clip/{about['name']} for immich's model cache, {in_bytes(about['bytes'])}")
        return
    if to == "sentence-transformers":
        from ..heads.retrieval.sentences import export_sentences

        about = export_sentences(Retriever(run, **options | {"device": "cpu"}), out)
        show(about, f"{out}: takes {' and '.join(about['sides'])}")
        return
    if to == "onnx":
        from ..heads.retrieval.onnx import export_onnx

        about = export_onnx(Retriever(run, **options | {"device": "cpu"}), out, dtype=dtype)
        graphs = ", ".join(f"{name}.onnx" for name in about["graphs"])
        least = "".join(f"; least cosine with float32 ({k}): {v:.3f}" for k, v in about.get("least_cosine", {}).items())
        show(about, f"{out}: {graphs} and search.py, {in_bytes(about['bytes'])}; {about['measure']}{least}")
        return
    if to == "hard-negatives":
        from ..heads.retrieval.negatives import export_negatives

        summary = export_negatives(Retriever(run, **options | {"split": options["split"] or "train"}), out)
        show(summary, f"{out}: {counted(summary['lines'], 'line')} of split '{summary['split']}'")
        return
    summary = export_embeddings(Retriever(run, **options), out, dims=dims, dtype=dtype, since=since)
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
