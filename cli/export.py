"""``xret export`` and ``xret index``: a run, or its embeddings, for the code of others and for large galleries."""

from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple

import click
from click.core import ParameterSource

from ..pipeline.wording import counted, in_bytes
from .parsing import NEW_FOLDER, RUN_OR_ID, embedding_options, show

About = dict[str, Any]  # what a form says of what it wrote


def _embeddings(about: About) -> str:
    samples = f"{counted(about['images'], 'image')} and {counted(about['captions'], 'caption')}"
    shapes = ", ".join(f"{name} {'x'.join(map(str, shape))}" for name, shape in about["shapes"].items())
    line = f"{samples} as {about['kind']}s ({shapes}), {in_bytes(about['bytes'])}"
    if small := about.get("mean_recall"):
        line += f"; mean recall of {small['split']} {small['before']:.2f}, now {small['after']:.2f}"
    return line


def _onnx(about: About) -> str:
    graphs = ", ".join(f"{name}.onnx" for name in about["graphs"])
    least = "".join(f"; least cosine with float32 ({k}): {v:.3f}" for k, v in about.get("least_cosine", {}).items())
    return f"{graphs} and search.py, {in_bytes(about['bytes'])}; {about['measure']}{least}"


class Form(NamedTuple):
    """A value of --to: what of heads.retrieval writes it, the line of what that returns, and options of its own."""

    write: str
    line: Callable[[About], str]
    takes: tuple[str, ...] = ()


class _Forms(click.Choice[str]):
    def get_invalid_choice_message(self, value: Any, ctx: click.Context | None) -> str:
        how = "Embeddings have the format that --out ends in: .parquet, .safetensors or .npy."
        return f"{super().get_invalid_choice_message(value, ctx)} {how}"


FORMS = {
    "embeddings": Form("export:export_embeddings", _embeddings, ("dims", "dtype", "since", "hubness", "split")),
    "onnx": Form("onnx:export_onnx", _onnx, ("dtype",)),
    "immich": Form(
        "immich:export_immich",
        lambda about: f"clip/{about['name']} for immich's model cache, {in_bytes(about['bytes'])}",
    ),
    "sentence-transformers": Form("sentences:export_sentences", lambda about: f"takes {' and '.join(about['sides'])}"),
    "hard-negatives": Form(
        "negatives:export_negatives",
        lambda about: f"{counted(about['lines'], 'line')} of split '{about['split']}'",
        ("split",),
    ),
}


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
    type=_Forms([*FORMS]),
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
def export(run: str, out: Path, to: str, **options: Any) -> None:
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
    form, context = FORMS[to], click.get_current_context()
    typed = [name for name in options if context.get_parameter_source(name) is ParameterSource.COMMANDLINE]
    wrong = [f"--{name}" for name in typed if name in FORMS["embeddings"].takes and name not in form.takes]
    if wrong:
        raise click.UsageError(f"--to {to} takes no {' and no '.join(wrong)}; leave that out")
    from ..heads.retrieval.retriever import Retriever

    if to == "hard-negatives":
        options["split"] = options["split"] or "train"
    elif to != "embeddings":
        options["device"] = "cpu"
    given = {name: options.pop(name) for name in ("dims", "dtype", "since")}
    write = resolve_name(f"xret.heads.retrieval.{form.write}")
    about = write(Retriever(run, **options), out, **{name: given[name] for name in given if name in form.takes})
    show(about, f"{out}: {form.line(about)}")


@click.command("index")
@click.argument("run", type=RUN_OR_ID)
@click.option("--out", required=True, type=NEW_FOLDER, help="The new folder.")
@click.option(
    "--factory",
    metavar="WORDS",
    show_default="inverted lists with a byte a dimension; Flat below 10,000 elements",
    help="How FAISS looks up elements, a string for its index_factory: Flat, HNSW32,SQ8, IVF4096,PQ32.",
)
@click.option(
    "--recall",
    default=0.99,
    type=click.FloatRange(0, 1),
    help="Share of the exact top 10 to find; the smallest effort that reaches it on a sample of queries is chosen.",
)
@embedding_options
def index(
    run: str, out: Path, factory: str | None, recall: float, dims: int | None, dtype: str, **options: Any
) -> None:
    """Build a search index over a large gallery.

    It holds all pictures and captions of RUN's store, or those of a split. A search with --index looks up candidates,
    the items with elements near to the query's, and ranks these exactly. The recall of the exact top 10 is measured and
    printed. Needs FAISS: pip install 'xret[index]'.

    \b
    xret index run --out run.index
    xret index run --out small.index --dims 128 --dtype int8
    xret search run "a red square beside a blue circle" --index run.index
    """
    from ..heads.retrieval.indexing import index_run
    from ..heads.retrieval.retriever import Retriever

    built = index_run(Retriever(run, **options), out, factory=factory, recall=recall, dims=dims, dtype=dtype)
    lines = [f"{out}: index of {run}"]
    for name, facts in built.items():
        lines.append(
            f"{name:9}{facts['samples']:,} with {counted(facts['elements'], 'element')}, {facts['factory']}, "
            f"{in_bytes(facts['bytes'])}; recall of the exact top 10 {facts['recall']:.3f}, effort {facts['effort']}"
        )
        if "whole_recall" in facts:
            lines[-1] += f"; of that at full width {facts['whole_recall']:.3f}"
        if facts["recall"] < recall:
            lines.append(f"{'':9}below the {recall} that was wanted: try another --factory, or accept it")
    show({"run": run, "out": str(out), **built}, lines)
