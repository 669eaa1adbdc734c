"""A page in the browser and its API over a run: a text or a picture in, pictures or captions out (Gradio)."""

import logging
import socket
from collections.abc import Callable
from contextlib import suppress
from html import escape
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

Asked = str | PictureFile | None  # a text, or a picture that was sent
Shown = list[tuple[Image.Image, str]]  # pictures with captions


def make_page(retriever: Retriever) -> Any:
    """Return the page, a `gradio.Blocks`, with the endpoints ``/search_text`` and ``/search_picture``.

    Model and gallery, or the index in its place, are loaded here, so that no query waits for them.
    """
    run, searched, what = retriever.run, retriever.searched, "pictures"
    row_of = {id_: row for row, id_ in enumerate(searched.names("images")[0])}
    image_of: dict[str, int] = {}  # the row of each caption's image
    if isinstance(searched, Gallery):
        what = f"images and {len(searched.texts):,} captions of {searched.dataset}{searched.part}"
        image_of = dict(zip(searched.caption_ids, searched.caption_image.tolist(), strict=True))
    if retriever.index_of("images") is None:
        searched.of("images")
    try:
        searched.picture(0)
    except XretError as error:
        log.warning("no pictures will be shown: %s", error)

    def find(query: Asked, k: int) -> list[Hit]:
        if query is None:
            return []
        try:
            asked = query[:QUERY_LENGTH] if isinstance(query, str) else query
            return retriever.search(asked, min(int(k), MOST_RESULTS))
        except XretError as error:
            raise gradio.Error(str(error), print_exception=False) from error

    def pictures_of(hits: list[Hit]) -> Shown:
        shown = []
        for hit in hits:
            row = row_of[hit.id] if hit.caption is None else image_of[hit.id]
            with suppress(XretError):
                picture = thumbnail(searched.picture(row), SIDE, upright=True)
                shown.append((picture, f"{hit.score:.3f}  {hit.caption or hit.file_name}"))
        return shown

    def answer(query: Asked, k: int) -> tuple[Shown, list[dict[str, Any]]]:
        hits = find(query, k)
        return pictures_of(hits), [hit.to_dict() for hit in hits]

    def search_text(text: str, k: int = 10) -> Any:
        """Find the images that fit a text."""
        return answer(text, k)

    def search_picture(picture: Any, k: int = 10) -> Any:
        """Find the captions that fit a picture, each shown with its image, or in a folder the pictures like it."""
        return answer(picture, k)

    def show(query: Asked, k: int) -> tuple[Any, str, list[dict[str, Any]]]:
        hits = find(query, k)
        captions = [hit for hit in hits if hit.caption is not None]
        unknown = retriever.unknown_words([query]) if isinstance(query, str) else []
        pictures = gradio.Gallery([] if captions else pictures_of(hits), visible=not captions)
        return pictures, _as_html(unknown, captions), [hit.to_dict() for hit in hits]

    name = run.path.resolve().name
    score = retriever.model.compare.score
    with gradio.Blocks(title=f"xret: {name}", analytics_enabled=False, delete_cache=(600, 3600)) as page:
        gradio.Markdown(f"# {name}\n{run.recipe.name} on {len(row_of):,} {what}. A score is {score}.")
        with gradio.Row():
            with gradio.Column():
                text = gradio.Textbox(label="Describe an image, and press Enter", max_length=QUERY_LENGTH)
                count = gradio.Slider(1, MOST_RESULTS, 10, step=1, label="Results")
            picture = gradio.Image(
                type="filepath", sources=["upload", "clipboard"], label="Or drop a picture", height=260
            )
        told = gradio.HTML()
        found = gradio.Gallery(label="Answers", columns=5, object_fit="contain", format="jpeg", interactive=False)
        with gradio.Accordion("As JSON", open=False):
            hits = gradio.JSON(show_label=False)
        for event, query, search in ((text.submit, text, search_text), (picture.input, picture, search_picture)):
            event(show, [query, count], [found, told, hits], api_visibility="private")
            gradio.on([], search, [query, count], [found, hits], api_name=search.__name__)
    _take_sent_files_alone(page, picture)
    return page.queue(max_size=QUEUE, default_concurrency_limit=1)


def _as_html(unknown: list[str], captions: list[Hit]) -> str:
    """Return what the page says of words that the run does not know, and captions as a list."""
    note = f"<p>⚠ not in the vocabulary: {escape(', '.join(some_of(unknown, 10)))}</p>" if unknown else ""
    items = "".join(f"<li>{escape(hit.caption or '')} <small>{hit.score:.3f}</small></li>" for hit in captions)
    style = "list-style: decimal; line-height: 1.8; overflow-wrap: anywhere"
    return f'{note}<ol style="{style}">{items}</ol>' if items else note


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
    # Gradio's own `launch` asks its server by way of the network, which a proxy or a busy machine keeps from answering.
    app = gradio.mount_gradio_app(FastAPI(openapi_url=None), page, "/", footer_links=["api"], **limits)
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
