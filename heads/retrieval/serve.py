"""A run as a service: a page in the browser with its API (Gradio), and plain JSON for programs (FastAPI)."""

import asyncio
import base64
import logging
import secrets
import socket
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import gradio
import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from PIL import Image
from pydantic import BaseModel, Field
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from ...pipeline.data.images import PictureFile, thumbnail
from ...pipeline.errors import EncoderError, QueryError, SampleError, XretError
from ...pipeline.wording import some_of
from .gallery import Gallery, Hit
from .retriever import Retriever

MOST_RESULTS, QUERY_LENGTH, SIDE = 100, 1000, 600  # SIDE: of a picture on the page, pixels at most
UPLOAD, QUEUE = 16 << 20, 64  # bytes of a picture that is sent, and searches that may wait
FORM = 1 << 16  # bytes that a form may add to a picture
GRACE = 25  # seconds for running requests once the server is to end; Kubernetes kills after 30
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

HEALTH, MOST_OTHERS = "/health", 10
ADVICE = {  # on a request's body and query
    "body": 'send JSON such as {"query": "a red boat", "k": 10}, as application/json',
    "query": "ask as /search/picture?k=10",
}
Text: TypeAlias = Annotated[str, Field(max_length=QUERY_LENGTH)]
Count: TypeAlias = Annotated[int, Field(ge=1, le=MOST_RESULTS)]
Shown = list[tuple[Image.Image, str]]  # pictures with captions


class Answers:
    """What a retriever answers to a page and to programs, one search after another, all in one thread.

    Encoders and gallery, or the index in its place, are loaded here, so that no query waits for them.
    """

    def __init__(self, retriever: Retriever) -> None:
        self.retriever, self.searched, self._thread = retriever, retriever.searched, ThreadPoolExecutor(1, "search")
        self.row_of = {id_: row for row, id_ in enumerate(self.searched.names("images")[0])}
        self.what, self.image_of, self.texts = f"{len(self.row_of):,} pictures", dict[str, int](), dict[int, str]()
        if isinstance(gallery := self.searched, Gallery):
            self.what += f" and {len(gallery.texts):,} captions of {gallery.dataset}{gallery.part}"
            self.image_of = dict(zip(gallery.caption_ids, gallery.caption_image.tolist(), strict=True))
            first = zip(gallery.caption_image.tolist()[::-1], gallery.texts[::-1], strict=True)  # the first of each
            self.texts = dict(first)
        if retriever.index_of("images") is None:
            self.searched.of("images")
        text = next(iter((*retriever.vocabulary[1:2], *self.texts.values())), "a picture")
        for what, try_it in (
            ("new texts can be asked", lambda: self.find(text, 1).result()),
            ("new pictures can be asked", lambda: retriever.image_encoders),
            ("pictures will be shown", lambda: self.searched.picture(0)),
        ):
            try:
                try_it()
            except QueryError:
                pass  # a run on words may know none of these
            except XretError as error:
                log.warning("no %s: %s", what, error)

    def find(self, query: str | PictureFile, k: int, **options: Any) -> "Future[list[Hit]]":
        """Return what `Retriever.search` will give. Encoders are not made for several threads."""
        return self._thread.submit(partial(self.retriever.search, query, k, **options))

    def unknown_words(self, query: str | PictureFile | None) -> list[str]:
        """Return the words of a text that the run does not know."""
        return self.retriever.unknown_words([query]) if isinstance(query, str) else []

    def pictures_of(self, hits: list[Hit]) -> Shown:
        """Return the pictures that hits are or describe, as far as they are there, each with what it is shown with."""
        shown = []
        for hit in hits:
            row = self.row_of[hit.id] if hit.caption is None else self.image_of[hit.id]
            with suppress(XretError):
                picture = thumbnail(self.searched.picture(row), SIDE, upright=True)
                shown.append((picture, f"{_how_well(hit)}  {hit.caption or self.texts.get(row) or hit.file_name}"))
        return shown


def make_page(answers: Answers) -> Any:
    """Return the page, a `gradio.Blocks`, with the endpoints ``/search_text`` and ``/search_picture``."""

    def find(query: str | PictureFile | None, k: int, *others: str) -> list[Hit]:
        if query is None:
            return []
        try:
            asked, *more = (text[:QUERY_LENGTH] if isinstance(text, str) else text for text in (query, *others))
            options = {name: [text] for name, text in zip(("like", "unlike"), more, strict=False) if text}
            return answers.find(asked, min(int(k), MOST_RESULTS), **options).result()
        except XretError as error:
            raise gradio.Error(str(error), print_exception=False) from error

    def answer(hits: list[Hit]) -> tuple[Shown, list[dict[str, Any]]]:
        return answers.pictures_of(hits), [hit.to_dict() for hit in hits]

    def search_text(text: str, k: int = 10, like: str = "", unlike: str = "") -> Any:
        """Find the images that fit a text, are also like another one, and unlike a third."""
        return answer(find(text, k, like, unlike))

    def search_picture(picture: Any, k: int = 10) -> Any:
        """Find the captions that fit a picture, each shown with its image, or in a folder the pictures like it."""
        return answer(find(picture, k))

    def show(query: str | PictureFile | None, k: int, *others: str) -> tuple[Any, str, list[dict[str, Any]]]:
        hits = find(query, k, *others)
        captions = [hit for hit in hits if hit.caption is not None]
        shown = [] if captions else answers.pictures_of(hits)
        pictures = gradio.Gallery(shown, visible=bool(hits) and not captions)
        return pictures, _as_html(answers.unknown_words(query), captions), [hit.to_dict() for hit in hits]

    retriever = answers.retriever
    name = Path(retriever.name).resolve().name
    mark = files("xret.heads").joinpath("mark.svg").read_text(encoding="utf-8")
    with gradio.Blocks(title=f"xret: {name}", analytics_enabled=False, delete_cache=(600, 3600)) as page:
        gradio.HTML(f"<header>{mark}<h1>xret</h1><p>Search {escape(answers.what)}.</p></header>")
        with gradio.Row(equal_height=True):
            with gradio.Column(scale=3):
                text = gradio.Textbox(label="Describe a picture, and press Enter", max_length=QUERY_LENGTH)
                with gradio.Row():
                    samples = [
                        gradio.Button(line, size="sm", min_width=200) for line in _examples(answers.texts.values())
                    ]
            picture = gradio.Image(type="filepath", sources=["upload"], label="Or drop a picture", height=190)
        told = gradio.HTML()
        gallery = gradio.Gallery(
            label="Answers", show_label=False, columns=5, format="jpeg", interactive=False, visible=False
        )
        gradio.HTML(HELP.format(run=escape(f"{name} ({retriever.title})"), score=escape(retriever.model.compare.score)))
        with gradio.Accordion("Options, and the answers as JSON", open=False):
            count = gradio.Slider(1, MOST_RESULTS, 10, step=1, label="Results")
            with gradio.Row():
                others = [gradio.Textbox("", label=what, max_length=QUERY_LENGTH) for what in ("Also like", "But not")]
            hits = gradio.JSON(show_label=False)
        shown = [gallery, told, hits]
        asked = [text, count, *others]
        gradio.on([text.submit, *(box.submit for box in others)], show, asked, shown, api_visibility="private")
        picture.input(show, [picture, count], shown, api_visibility="private")
        for search, given in ((search_text, asked), (search_picture, [picture, count])):
            gradio.on([], search, given, [gallery, hits], api_name=search.__name__)
        for sample in samples:
            chosen = sample.click(lambda words: words, sample, text, api_visibility="private", show_progress="hidden")
            chosen.then(show, asked, shown, api_visibility="private")
    _take_sent_files_alone(page, picture)
    return page.queue(max_size=QUEUE, default_concurrency_limit=1)


def _how_well(hit: Hit) -> str:
    return f"{hit.score:.3f}" if hit.probability is None else f"{hit.probability:.0%}"


def _examples(texts: Iterable[str], count: int = 3) -> list[str]:
    """Return some short captions that lie far from each other in the gallery."""
    short = [text for text in dict.fromkeys(texts) if 3 <= len(text.split()) <= 9]
    return [short[row] for row in sorted({len(short) * k // count for k in range(count)})] if short else []


def _as_html(unknown: list[str], captions: list[Hit]) -> str:
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
        file = Path(path or "").resolve()
        if not (file.is_relative_to(sent) and file.is_file()):
            raise gradio.Error("send the picture itself and not its address", print_exception=False)
        return file

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


class Asked(BaseModel, extra="forbid"):
    """What ``POST /search`` takes; see `Retriever.search`."""

    query: Text
    k: Count = 10
    like: list[Text] = Field([], max_length=MOST_OTHERS)
    unlike: list[Text] = Field([], max_length=MOST_OTHERS)
    at_least: float | None = Field(None, ge=0, le=1)


class Guard:
    """Refuse requests without the token, and bodies that are too large, before anything reads them."""

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self.app, self.token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or let the app do it."""
        refusal = self._refusal(scope["path"], Headers(scope=scope)) if scope["type"] == "http" else None
        await (refusal or self.app)(scope, receive, send)

    def _refusal(self, path: str, headers: Headers) -> JSONResponse | None:
        if self.token and path != HEALTH and not secrets.compare_digest(_token_of(headers), self.token.encode()):
            how = f"{'a wrong' if 'authorization' in headers else 'no'} token; send the header 'Authorization: Bearer"
            asks = {"WWW-Authenticate": 'Basic realm="xret"'}  # a browser asks for a name and a password
            return _refuse(401, f"{how} TOKEN', or the token as the password, with any name", asks)
        if "transfer-encoding" in headers:
            return _refuse(411, "the length of the body is missing; send the header Content-Length")
        if int(headers.get("content-length", 0)) > UPLOAD + FORM:
            return _refuse(413, f"the body has more than {UPLOAD >> 20} MiB; send a smaller picture")
        return None


def _refuse(status: int, sentence: str, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"detail": sentence}, status, headers)


def _token_of(headers: Headers) -> bytes:
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return value.encode()
    try:  # a browser's Basic
        return base64.b64decode(value).partition(b":")[2]
    except ValueError:
        return b""


def make_app(retriever: Retriever, token: str | None = None, root_path: str = "") -> FastAPI:
    """Return the page as an app, beside ``/search`` and ``/search/picture`` for programs, and ``/health``.

    Args:
        retriever: what answers.
        token: what each request but those for ``/health`` has to bring; None: nothing.
        root_path: the path of a proxy's that is the app's root, such as ``/photos``.
    """
    answers, app, places = Answers(retriever), FastAPI(openapi_url=None), asyncio.Semaphore(QUEUE)

    async def find(query: str | PictureFile, **options: Any) -> dict[str, Any]:
        if places.locked():
            raise HTTPException(503, f"{QUEUE} searches wait already; ask again later", {"Retry-After": "1"})
        async with places:
            hits = await asyncio.wrap_future(answers.find(query, **options))
        return {"hits": [hit.to_dict() for hit in hits], "unknown_words": answers.unknown_words(query)}

    @app.get(HEALTH)
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.post("/search")
    async def search(asked: Asked) -> dict[str, Any]:
        return await find(**dict(asked))

    @app.post("/search/picture")
    async def search_picture(request: Request, k: Count = 10) -> dict[str, Any]:
        return await find(PictureFile(await request.body(), "the picture"), k=k)

    @app.exception_handler(XretError)
    async def explain(_request: Request, error: XretError) -> JSONResponse:
        asked_wrongly = isinstance(error, QueryError | SampleError | EncoderError)
        return _refuse(422 if asked_wrongly else 500, str(error))

    @app.exception_handler(RequestValidationError)
    async def name(_request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"][1:] if first["type"] != "json_invalid")
        return _refuse(422, f"{where or 'the body'}: {first['msg']}; {ADVICE[first['loc'][0]]}")

    @app.exception_handler(400)
    async def unreadable(_request: Request, _error: HTTPException) -> JSONResponse:
        return _refuse(400, f"the body: this is no JSON in UTF-8; {ADVICE['body']}")

    page = make_page(answers)
    limits = {"max_file_size": UPLOAD, "enable_monitoring": False, "ssr_mode": False, "root_path": root_path}
    theme = gradio.themes.Default(primary_hue="blue", font=("system-ui", "sans-serif"), font_mono=("monospace",))
    # Gradio's own `launch` asks its server by way of the network, which a proxy or a busy machine keeps from answering.
    gradio.mount_gradio_app(app, page, "/", footer_links=["api"], theme=theme, css=STYLE, **limits)
    page.has_launched = page.is_running = True
    app.add_middleware(Guard, token=token)
    return app


def serve(
    retriever: Retriever,
    host: str,
    port: int | None,
    say: Callable[[str], object],
    *,
    token: str | None = None,
    root_path: str = "",
) -> None:
    """Serve `make_app` until the process is interrupted; `say` gets its address as soon as that can be asked.

    Running requests are answered before it ends. A `port` of None is the first free one from 7860 on. XretError where
    the address cannot be listened at.
    """
    app = make_app(retriever, token, root_path)
    with _listen(host, port) as listening:
        name, number = listening.getsockname()[:2]
        shown = "localhost" if name in ("0.0.0.0", "::") else f"[{name}]" if ":" in name else host
        say(f"http://{shown}:{number}/")
        config = uvicorn.Config(app, log_level="error", ws="none", timeout_graceful_shutdown=GRACE)
        uvicorn.Server(config).run(sockets=[listening])


def _listen(host: str, port: int | None) -> socket.socket:
    with suppress(OSError, UnicodeError):  # UnicodeError: of what is no name
        family, *_, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
        for number in PORTS if port is None else [port]:
            with suppress(OSError):
                listening = socket.create_server((address[0], number), family=family)
                # asyncio does so for some sockets alone; else an answer's body waits 40 ms for the ACK of its head.
                listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return listening
    raise XretError(
        f"the server cannot listen at {host}, port {port or f'{PORTS[0]} to {PORTS[-1]}'}; give --host an address of"
        " this machine such as 127.0.0.1, and --port a number from 1024 that is free"
    )
