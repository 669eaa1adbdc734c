"""A page in the browser and its API over a run: a text or a picture in, pictures or captions out (Gradio)."""

import logging
import socket
from collections.abc import Callable
from contextlib import suppress
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

import gradio
import uvicorn
from fastapi import FastAPI
from PIL import Image

from ...pipeline.data.images import PictureFile, thumbnail
from ...pipeline.errors import XretError
from ...pipeline.wording import some_of
from .gallery import Gallery, Hit
from .retriever import Retriever

MOST_RESULTS, QUERY_LENGTH, SIDE = 100, 1000, 600  # SIDE: of a picture on the page, pixels at most
UPLOAD, QUEUE = "16mb", 64  # of a picture that is sent, and searches that may wait
PORTS = range(7860, 7960)  # of which the first free one is taken
log = logging.getLogger("xret")

STYLE = """
header { display: flex; align-items: center; gap: 0.7rem; flex-wrap: wrap; }
header svg { width: 2.2rem; height: 2.2rem; } header h1 { font-size: 1.6rem; margin: 0; } header p { margin: 0; }
ol { list-style: decimal; padding-left: 2rem; line-height: 1.8; overflow-wrap: anywhere; }
.notice { border-left: 4px solid #b45309; background: var(--block-background-fill); padding: 0.5rem 0.8rem; }
.grid-wrap .caption-label { position: static; max-width: none; border: 0; padding: 0.3rem; text-align: left; opacity: 1;
  white-space: normal; overflow: visible; font-size: 0.85rem; line-height: 1.3; background: none; box-shadow: none; }
.grid-wrap .thumbnail-lg { aspect-ratio: auto; height: auto; align-self: start; display: block; }
.grid-wrap .thumbnail-lg img { aspect-ratio: 1; width: 100%; height: auto; }
.grid-wrap { max-height: none; }
@media (max-width: 640px) { .grid-wrap .grid-container { grid-template-columns: repeat(2, minmax(0, 1fr)); } }
"""
HELP = """<details><summary>? What the numbers mean</summary><p>A percentage is how likely an answer fits, if one of all
that are searched does; it was fitted on validation pairs. Any other number is the score, {score}. The run is
{run}.</p></details>"""

Asked = str | PictureFile | None  # a text, or a picture that was sent
Shown = list[tuple[Image.Image, str]]  # pictures with captions


def make_page(retriever: Retriever) -> Any:
    """Return the page, a `gradio.Blocks`, with the endpoints ``/search_text`` and ``/search_picture``.

    Model and gallery, or the index in its place, are loaded here, so that no query waits for them.
    """
    searched = retriever.searched
    row_of = {id_: row for row, id_ in enumerate(searched.names("images")[0])}
    what, image_of, texts = f"{len(row_of):,} pictures", dict[str, int](), dict[int, str]()
    if isinstance(searched, Gallery):
        what += f" and {len(searched.texts):,} captions of {searched.dataset}{searched.part}"
        image_of = dict(zip(searched.caption_ids, searched.caption_image.tolist(), strict=True))
        texts = dict(zip(searched.caption_image.tolist()[::-1], searched.texts[::-1], strict=True))  # the first of each
    if retriever.index_of("images") is None:
        searched.of("images")
    try:
        searched.picture(0)
    except XretError as error:
        log.warning("no pictures will be shown: %s", error)

    def find(query: Asked, k: int, like: str = "", unlike: str = "") -> list[Hit]:
        if query is None:
            return []
        try:
            asked, *more = (one[:QUERY_LENGTH] if isinstance(one, str) else one for one in (query, like, unlike))
            of_each = ([one] if one else [] for one in more)
            return retriever.search(asked, min(int(k), MOST_RESULTS), like=next(of_each), unlike=next(of_each))
        except XretError as error:
            raise gradio.Error(str(error), print_exception=False) from error

    def pictures_of(hits: list[Hit]) -> Shown:
        shown = []
        for hit in hits:
            row = row_of[hit.id] if hit.caption is None else image_of[hit.id]
            with suppress(XretError):
                picture = thumbnail(searched.picture(row), SIDE, upright=True)
                shown.append((picture, f"{_how_well(hit)}  {hit.caption or texts.get(row) or hit.file_name}"))
        return shown

    def answer(hits: list[Hit]) -> tuple[Shown, list[dict[str, Any]]]:
        return pictures_of(hits), [hit.to_dict() for hit in hits]

    def search_text(text: str, k: int = 10, like: str = "", unlike: str = "") -> Any:
        """Find the images that fit a text, are also like another one, and unlike a third."""
        return answer(find(text, k, like, unlike))

    def search_picture(picture: Any, k: int = 10) -> Any:
        """Find the captions that fit a picture, each shown with its image, or in a folder the pictures like it."""
        return answer(find(picture, k))

    def show(query: Asked, k: int, *others: str) -> tuple[Any, str, list[dict[str, Any]]]:
        hits = find(query, k, *others)
        captions = [hit for hit in hits if hit.caption is not None]
        unknown = retriever.unknown_words([query]) if isinstance(query, str) else []
        pictures = gradio.Gallery([] if captions else pictures_of(hits), visible=bool(hits) and not captions)
        return pictures, _as_html(unknown, captions), [hit.to_dict() for hit in hits]

    name = Path(retriever.name).resolve().name
    mark = files("xret.heads").joinpath("mark.svg").read_text(encoding="utf-8")
    with gradio.Blocks(title=f"xret: {name}", analytics_enabled=False, delete_cache=(600, 3600)) as page:
        gradio.HTML(f"<header>{mark}<h1>xret</h1><p>Search {escape(what)}.</p></header>")
        with gradio.Row(equal_height=True):
            with gradio.Column(scale=3):
                text = gradio.Textbox(label="Describe a picture, and press Enter", max_length=QUERY_LENGTH)
                with gradio.Row():
                    samples = [gradio.Button(one, size="sm", min_width=200) for one in _examples(list(texts.values()))]
            picture = gradio.Image(type="filepath", sources=["upload"], label="Or drop a picture", height=190)
        told = gradio.HTML()
        found = gradio.Gallery(
            label="Answers", show_label=False, columns=5, format="jpeg", interactive=False, visible=False
        )
        gradio.HTML(HELP.format(run=escape(f"{name} ({retriever.title})"), score=escape(retriever.model.compare.score)))
        with gradio.Accordion("Options, and the answers as JSON", open=False):
            count = gradio.Slider(1, MOST_RESULTS, 10, step=1, label="Results")
            with gradio.Row():
                others = [gradio.Textbox("", label=one, max_length=QUERY_LENGTH) for one in ("Also like", "But not")]
            hits = gradio.JSON(show_label=False)
        shown = [found, told, hits]
        asked = [text, count, *others]
        gradio.on([text.submit, *(one.submit for one in others)], show, asked, shown, api_visibility="private")
        picture.input(show, [picture, count], shown, api_visibility="private")
        for search, given in ((search_text, asked), (search_picture, [picture, count])):
            gradio.on([], search, given, [found, hits], api_name=search.__name__)
        for sample in samples:
            chosen = sample.click(lambda words: words, sample, text, api_visibility="private", show_progress="hidden")
            chosen.then(show, asked, shown, api_visibility="private")
    _take_sent_files_alone(page, picture)
    return page.queue(max_size=QUEUE, default_concurrency_limit=1)


def _how_well(hit: Hit) -> str:
    return f"{hit.score:.3f}" if hit.probability is None else f"{hit.probability:.0%}"


def _examples(texts: list[str], count: int = 3) -> list[str]:
    """Return some short captions that lie far from each other in the gallery."""
    short = [text for text in dict.fromkeys(texts) if 3 <= len(text.split()) <= 9]
    return [short[row] for row in sorted({len(short) * k // count for k in range(count)})] if short else []


def _as_html(unknown: list[str], captions: list[Hit]) -> str:
    """Return what the page says of words that the run does not know, and captions as a list."""
    words = escape(", ".join(some_of(unknown, 10)))
    note = f'<p class="notice">Not in the vocabulary, and left out: {words}</p>' if unknown else ""
    items = "".join(f"<li>{escape(hit.caption or '')} <small>{_how_well(hit)}</small></li>" for hit in captions)
    return f"{note}<ol>{items}</ol>" if items else note


def _take_sent_files_alone(page: Any, picture: Any) -> None:
    """Let a component of pictures give the content of files that were sent, which `open_image` reads as any other.

    Gradio would fetch addresses that a client names, in a text too, open other files of the machine, and decode all.
    """
    sent = Path(picture.GRADIO_CACHE).resolve()

    def require_sent(path: str | Path | None) -> Path:
        found = Path(path or "").resolve()
        if not (found.is_relative_to(sent) and found.is_file()):
            raise gradio.Error("send the picture itself and not its address", print_exception=False)
        return found

    def guarded(move: Any) -> Any:
        async def moved(path: str | Path | None) -> Any:
            return await move(require_sent(path))

        return moved

    def opened(given: Any) -> PictureFile | None:
        if given is None:
            return None
        path = require_sent(given.path)
        return PictureFile(path.read_bytes(), path.name)

    for block in page.blocks.values():
        block.async_move_resource_to_block_cache = guarded(block.async_move_resource_to_block_cache)
    picture.preprocess = opened


def serve(retriever: Retriever, host: str, port: int | None, say: Callable[[str], object]) -> None:
    """Serve the page until the process is interrupted; `say` gets its address as soon as that can be asked.

    A `port` of None is the first free one from 7860 on. XretError where the address cannot be listened at.
    """
    page = make_page(retriever)
    limits = {"max_file_size": UPLOAD, "enable_monitoring": False, "ssr_mode": False}
    theme = gradio.themes.Default(primary_hue="blue", font=("system-ui", "sans-serif"), font_mono=("monospace",))
    # Gradio's own `launch` asks its server by way of the network, which a proxy or a busy machine keeps from answering.
    app = gradio.mount_gradio_app(
        FastAPI(openapi_url=None), page, "/", footer_links=["api"], theme=theme, css=STYLE, **limits
    )
    page.has_launched = page.is_running = True
    with _listen(host, port) as listening:
        name, number = listening.getsockname()[:2]
        shown = "localhost" if name in ("0.0.0.0", "::") else f"[{name}]" if ":" in name else host
        say(f"http://{shown}:{number}/")
        config = uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1)
        uvicorn.Server(config).run(sockets=[listening])


def _listen(host: str, port: int | None) -> socket.socket:
    with suppress(OSError, UnicodeError):  # UnicodeError: of what is no name
        family, *_, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
        for number in PORTS if port is None else [port]:
            with suppress(OSError):
                return socket.create_server((address[0], number), family=family)
    raise XretError(
        f"the server cannot listen at {host}, port {port or f'{PORTS[0]} to {PORTS[-1]}'}; give --host an address of"
        " this machine such as 127.0.0.1, and --port a number from 1024 that is free"
    )
