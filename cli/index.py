"""``xret index``: candidates for the search in a large gallery."""

from pathlib import Path
from typing import Any

import click

from ..pipeline.wording import counted, in_bytes
from .parsing import NEW_FOLDER, RUN_OR_ID, embedding_options, show


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
