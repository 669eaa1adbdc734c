"""``xret search``: what a run finds for a sentence or a picture."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..pipeline.wording import counted, printable
from .parsing import (
    FOLDER,
    RUN_OR_ID,
    device_option,
    hubness_option,
    part_option,
    show,
    store_option,
    together,
    weights_options,
)

if TYPE_CHECKING:
    from ..heads.retrieval.gallery import Hit


# Of commands that put a run to work.
run_options = together(
    click.option("--images", type=FOLDER, metavar="FOLDER", help="Search the pictures in this folder and below."),
    store_option,
    part_option,
    click.option("--index", type=FOLDER, metavar="DIR", help="An index of RUN, made by `xret index`."),
    weights_options,
    hubness_option,
    device_option,
)


@click.command()
@click.argument("run", type=RUN_OR_ID)
@click.argument("words", nargs=-1, required=True, metavar="QUERY")
@click.option("-k", "k", default=10, type=click.IntRange(min=1), help="Number of results.")
@click.option("--like", multiple=True, metavar="QUERY", help="Also like this sentence or picture; repeatable.")
@click.option("--not", "unlike", multiple=True, metavar="QUERY", help="Unlike this sentence or picture; repeatable.")
@click.option(
    "--at-least",
    type=click.FloatRange(0, 1),
    metavar="P",
    help="Only answers with this probability to fit, or a higher one.",
)
@run_options
def search(
    run: str,
    words: tuple[str, ...],
    k: int,
    like: tuple[str, ...],
    unlike: tuple[str, ...],
    at_least: float | None,
    **options: Any,
) -> None:
    """Find images for a sentence, or captions for a picture.

    QUERY is a sentence or a picture file; for a run on videos, a folder of frames, such as ./clip. All splits of RUN's
    store are searched. The query goes through the encoder that made the features; if its weights have moved, say where
    they are. A fine-tuned run has its own.

    A probability says how likely an answer fits, among all that are searched, if one of them does; it is fitted on the
    val split of RUN's store, and kept in RUN.

    --images searches a folder of any pictures, without a manifest. Each is embedded once, and again when its file
    changes.

    \b
    xret search run "a red square beside a blue circle"
    xret search run photo.jpg -k 5 --json
    xret search run --images holiday "a red boat"
    xret search run "a dog" --not snow --like photo.jpg
    xret search run "a dog in the snow" --at-least 0.5
    """
    from ..heads.retrieval.gallery import uncertainty
    from ..heads.retrieval.retriever import Retriever, names_picture

    if len(words) > 1:
        raise click.UsageError(f'A QUERY of several words needs quotes: "{" ".join(words)}".')
    retriever = Retriever(run, **options)

    def asked(query: str) -> str | Path:
        # A folder of frames, or a picture without a known suffix; Path.exists raises for a long sentence.
        there = "/" in query and os.path.exists(query)  # noqa: PTH110
        return Path(query) if there or names_picture(query) else query

    encoded = retriever.encode_query(asked(words[0]))
    others = {"like": [asked(one) for one in like], "unlike": [asked(one) for one in unlike]}
    hits = retriever.search(encoded, k, **others, at_least=at_least)
    count = counted(len(retriever.searched.names(encoded.answers)[0]), encoded.answers.removesuffix("s"))
    where = options["images"] or f"{retriever.cache.url}{retriever.gallery.part}"
    nothing = f"nothing here fits with a probability of {at_least} or more"
    lines = [f"{run} on {where}: {count}", *(format_hits(hits) if hits else [nothing])]
    if (spread := uncertainty(encoded.embedding)) is not None:
        lines.append(f"the query's uncertainty (log-determinant) {float(spread):.2f}")
    show([hit.to_dict() for hit in hits], lines)


def format_hits(hits: "list[Hit]") -> list[str]:
    """Return hits as lines for a terminal."""
    ids = [printable(hit.id) for hit in hits]
    width = max(len("id"), *map(len, ids))
    certain = all(hit.uncertainty is None for hit in hits)
    last = "caption" if hits[0].file_name is None else "file"
    known = hits[0].probability is not None
    heads = f"{'  probability' if known else ''}{'' if certain else '  uncertainty'}"
    lines = [f"{'rank':>4}{'score':>11}{heads}  {'id':{width}}  {last}"]
    for key, hit in zip(ids, hits, strict=True):
        fits = "" if hit.probability is None else f"{hit.probability:13.2f}"
        spread = "" if hit.uncertainty is None else f"{hit.uncertainty:13.2f}"
        what = printable(" ".join((hit.caption or hit.file_name or "").split()))
        lines.append(f"{hit.rank:4}{hit.score:11.4f}{fits}{spread}  {key:{width}}  {what}")
    return lines
