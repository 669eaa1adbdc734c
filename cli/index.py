"""``xret index``: candidates for the search in a large gallery."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ..pipeline.wording import counted, in_bytes
from .parsing import NEW_FOLDER

if TYPE_CHECKING:
    from ..heads.retrieval.indexing import RunIndex


@click.command("index")
@click.argument("run")
@click.option("--out", required=True, type=NEW_FOLDER, help="The folder to be made, or added to.")
@click.option(
    "--store",
    "stores",
    multiple=True,
    help="Where the feature cache is now, if not where RUN was trained. Of several, each becomes a shard.",
)
@click.option("--split", default="test", show_default=True, help="Whose images and captions.")
@click.option(
    "--kind",
    default="ivf",
    show_default=True,
    type=click.Choice(["ivf", "flat", "hnsw", "pq"]),
    help="How elements are looked up: inverted lists, one after the other, a graph, or inverted lists of elements in "
    "a few bytes (product quantisation).",
)
@click.option(
    "--recall",
    default=0.99,
    show_default=True,
    type=click.FloatRange(0, 1),
    help="Share of the exact top 10 to find; the cheapest effort that reaches it on a sample of queries, with two "
    "standard errors to spare, is chosen.",
)
@click.option(
    "--effort",
    type=(click.IntRange(min=1), click.IntRange(min=1)),
    metavar="PROBES CANDIDATES",
    help="Take this effort instead: lists to look through (ivf, pq) or nodes in sight (hnsw), and elements to fetch, "
    "both for each element of a query.",
)
@click.option("--add", is_flag=True, help="Add the split, or another --store's, to the index at --out.")
@click.option(
    "--seed",
    default=0,
    show_default=True,
    type=click.IntRange(0, 2**31 - 1),
    help="Decides the clustering and the sample of queries.",
)
@click.option("--device", default="auto", show_default=True, help="auto, cpu or cuda; for embedding.")
@click.option("--scheduler", metavar="ADDRESS", help="Let the workers of this Dask cluster build the shards.")
@click.option("--json", "as_json", is_flag=True, help="Print what was built as JSON.")
@click.pass_context
def index(
    ctx: click.Context,
    /,
    run: str,
    stores: tuple[str, ...],
    out: Path,
    split: str,
    device: str,
    effort: tuple[int, int] | None,
    add: bool,
    scheduler: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Index the gallery of a run for searches among very many.

    A search with --index compares the query only with candidates, those that have elements near to the query's, and
    ranks them exactly. The recall of the exact top 10 is measured and printed. Needs FAISS: pip install 'xret[index]'.

    \b
    xret index run --out run.index
    xret index run --out run.index --split val --add
    xret index run --out shards --store a.zarr --store b.zarr \\
        --scheduler tcp://host:8786
    xret search run "a red square beside a blue circle" --index run.index
    """
    from ..heads.retrieval.index.build import IndexOptions
    from ..heads.retrieval.index.candidates import Effort
    from ..heads.retrieval.indexing import add_to_index, index_run, index_shards

    sharded, places = len(stores) > 1 or scheduler is not None, stores or (None,)
    how = IndexOptions(**options, effort=Effort(*effort) if effort else None)
    if add:
        _require_addition(ctx, sharded)
        built = [add_to_index(run, out, places[0], split=split, device=device)]
    elif sharded:
        built = index_shards(run, places, out, split=split, device=device, options=how, scheduler=scheduler)
    else:
        built = [index_run(run, out, places[0], split=split, device=device, options=how)]
    if not as_json:
        click.echo("\n".join(map(format_report, built)))
    elif sharded:
        click.echo(json.dumps({"run": run, "out": str(out), "shards": [as_dict(one) for one in built]}))
    else:
        click.echo(json.dumps(as_dict(built[0])))


def as_dict(built: "RunIndex") -> dict[str, Any]:
    """Return what was built, ready for JSON."""
    return {key: value for key, value in asdict(built).items() if value is not None}


def _require_addition(ctx: click.Context, sharded: bool) -> None:
    """Refuse what `--add` cannot do."""
    if sharded:
        raise click.UsageError("Shards are added to one by one: leave --add, or name one shard with --out.")
    for name in ("kind", "recall", "effort", "seed"):
        if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"--{name} was settled when the index was built; leave it out with --add.")


def format_report(built: "RunIndex") -> str:
    """Return what was built as lines for a terminal."""
    lines = [f"{built.out}: index of {built.run}"]
    for name, found in (("images", built.images), ("captions", built.captions)):
        if found is None:
            continue
        lines.append(
            f"{name:9}{found.samples:,} with {counted(found.elements, 'element')}, {found.kind}, "
            f"{counted(found.lists, 'list')}, {in_bytes(found.bytes)}; recall of the exact top 10 "
            f"{found.recall:.3f} with {counted(found.effort.probes, 'probe')} and"
            f" {counted(found.effort.candidates, 'candidate')} an element"
        )
        if found.recall < found.wanted_recall:
            lines.append(f"{'':9}below the {found.wanted_recall} that was wanted: try another --kind, or accept it")
    return "\n".join(lines)
