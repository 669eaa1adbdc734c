"""``xret search`` and ``xret serve``: what a run finds for a sentence or a picture."""

import os
import re
import signal
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..pipeline.errors import XretError
from ..pipeline.wording import counted, printable
from .parsing import (
    FOLDER,
    RUN_OR_ID,
    data_root_option,
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


# For commands that put a run to work.
run_options = together(
    click.option(
        "--images",
        type=FOLDER,
        metavar="FOLDER",
        help="Search the pictures in this folder and below, in place of a store's.",
    ),
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
    others = {"like": [asked(word) for word in like], "unlike": [asked(word) for word in unlike]}
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


def _token(_ctx: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
    if value is not None and not re.fullmatch("[!-~]+", value):
        raise click.BadParameter("it must be letters and digits, such as `openssl rand -hex 16` prints")
    return value


def _root_path(_ctx: click.Context, _parameter: click.Parameter, value: str) -> str:
    if value and not re.fullmatch(r"(/[\w.~-]+)+/?", value):
        raise click.BadParameter(f"'{value}' is no path such as /photos")
    return value.rstrip("/")


@click.command()
@click.argument("run", type=RUN_OR_ID)
@run_options
@data_root_option
@click.option("--host", default="127.0.0.1", help="The address or name to listen at.")
@click.option(
    "--port", type=click.IntRange(1, 65535), show_default="the first free from 7860", help="The port to listen at."
)
@click.option(
    "--token",
    default=lambda: os.environ.get("XRET_TOKEN"),
    show_default="the environment variable XRET_TOKEN",
    callback=_token,
    help="What each request has to bring: 'Authorization: Bearer TOKEN', or TOKEN as the password that a browser asks.",
)
@click.option("--root-path", default="", callback=_root_path, help="The path under which a proxy offers it.")
def serve(run: str, host: str, port: int | None, token: str | None, root_path: str, **options: Any) -> None:
    """Search with a run in a browser, or from programs.

    Opens a page to type a sentence or drop a picture; its footer describes the page's API. POST /search takes JSON,
    POST /search/picture a picture, and GET /health says that it runs. Only this machine can reach it, unless --host
    says otherwise. Ctrl-C or SIGTERM ends it as soon as running requests are answered, and removes the pictures that
    were sent.

    \b
    xret serve run --data-root DIR
    xret serve run --images holiday
    XRET_TOKEN=SECRET xret serve run --host 0.0.0.0 --root-path /photos
    """
    # OpenMP reads this as torch is imported: threads that spin after an operation would keep all others from a core.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from ..heads.retrieval.retriever import Retriever

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="xret-serve-") as scratch, suppress(KeyboardInterrupt):
        os.environ |= {"GRADIO_TEMP_DIR": scratch, "GRADIO_ANALYTICS_ENABLED": "False"}
        try:
            from ..heads.retrieval.serve import serve as start
        except ImportError as error:  # also where a proxy needs a package
            lacks = f"needs {error.name}, which is not installed: pip install 'xret[serve]'"
            raise XretError(f"the server {lacks if error.name else f'cannot start: {error}'}") from error

        def say(address: str) -> None:
            click.echo(f"{run} is served at {address}")

        start(Retriever(run, **options), host, port, say, token=token, root_path=root_path)
