"""The paths of the server: the page, what it begins with, searches, and the gallery's pictures by row."""

import asyncio
import sys
from pathlib import Path
from typing import Any

from tornado.web import Application, HTTPError

from ....pipeline.errors import QueryError, XretError
from .handler import Handler, Refusal, own_names
from .pictures import SIDES, Shelf
from .service import Service
from .workers import Busy, Workers

QUERY_LENGTH = 1000  # characters
MOST_RESULTS = 100
UPLOAD_BYTES = 16 << 20  # of one picture
HELD_BYTES = 256 << 20  # of all pictures that arrive or wait
QUEUE = 64  # searches that run or wait
BUSY = "The server has more to do than it can; ask again in a moment."

PAGE = Path(__file__).parent / "page"
FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}


class Site:
    """What the requests share.

    Attributes:
        active: requests whose answer is not yet sent.
        stopping: connections are closed behind the answers that are being made.
    """

    def __init__(self, service: Service, host: str) -> None:
        self.service, self.names = service, own_names(host)
        self.searchers, self.painters = Workers(1, QUEUE), Workers(2, QUEUE)
        self.shelf = Shelf()
        self.active: set[Handler] = set()
        self.stopping = False

    def application(self) -> Application:
        """Return the routes; none of them takes the name of a file."""
        share = {"site": self}
        pages = [
            (path, Page, {**share, "content": (PAGE / file).read_bytes(), "kind": kind})
            for path, (file, kind) in FILES.items()
        ]
        return Application(
            [
                *pages,
                ("/api/about", About, share),
                ("/api/search", Search, share),
                ("/api/images/([0-9]{1,9})", Picture, share),
            ],
            default_handler_class=Nothing,
            default_handler_args=share,
            log_function=lambda _: None,  # what people search for is not written down
        )


class Nothing(Handler):
    """Any other path."""

    def check(self) -> None:
        """Refuse."""
        raise HTTPError(404)


class Page(Handler):
    """A file of the page."""

    def initialize(self, site: Site, content: bytes, kind: str) -> None:  # type: ignore[override]
        """Take the file."""
        super().initialize(site)
        self.content, self.kind = content, kind

    def get(self) -> None:
        """Send it."""
        self.set_header("Content-Type", self.kind)
        self.finish(self.content)

    head = get


class About(Handler):
    """What the page begins with: facts of run and gallery, and the limits."""

    def get(self) -> None:
        """Send them."""
        limits = {"query_length": QUERY_LENGTH, "upload_bytes": UPLOAD_BYTES, "results": MOST_RESULTS}
        self.finish({**self.site.service.about(), "limits": limits})


class Picture(Handler):
    """An image of the gallery, by its row; ``size`` is small or large."""

    async def get(self, row: str) -> None:
        """Send it as a JPEG."""
        size = self.get_query_argument("size", "small")
        if size not in SIDES:
            raise Refusal(400, f"size is {' or '.join(SIDES)}.")
        key = (int(row), size)
        picture = self.site.shelf.get(key) or await self._paint(key)
        self.set_header("Content-Type", "image/jpeg")
        self.finish(picture)

    async def _paint(self, key: tuple[int, str]) -> bytes:
        try:
            picture = await self.site.painters.run(self.site.service.picture, *key)
        except (IndexError, XretError) as error:
            raise Refusal(404, "There is no such picture.") from error
        except Busy as error:
            raise Refusal(503, BUSY) from error
        self.site.shelf.put(key, picture)
        return picture


class Search(Handler):
    """``GET /api/search?q=TEXT&k=10&elements=1``, or POST with an image file as the body."""

    _job: "asyncio.Task[dict[str, Any]] | None" = None
    _refusal: Refusal | None = None

    def check(self) -> None:
        """Refuse wrong parameters, and a body that is no picture or too long."""
        self.set_header("Cache-Control", "no-store")
        self.k = self._whole_number("k", 10, 1, MOST_RESULTS)
        self.elements = bool(self._whole_number("elements", 0, 0, 1))
        if self.elements and not self.site.service.elements:
            raise Refusal(400, "This run's embeddings are no sets: there are no elements to ask one by one.")
        if self.request.method == "POST":
            kind = self.request.headers.get("Content-Type", "")
            if not kind.startswith("image/") and kind != "application/octet-stream":
                raise Refusal(415, "The body must be the picture itself, with a Content-Type such as image/jpeg.")
            length = self.request.headers.get("Content-Length", "0")
            if length.isascii() and length.isdigit() and int(length[:20]) > UPLOAD_BYTES:
                raise _too_large()

    def data_received(self, chunk: bytes) -> None:
        """Collect a picture; of one that is refused nothing is kept."""
        if self.request.method != "POST" or self._headers_written or self._refusal:
            return
        if len(self.body) + len(chunk) > UPLOAD_BYTES:
            self._refusal = _too_large()
        elif sum(len(handler.body) for handler in self.site.active) + len(chunk) > HELD_BYTES:
            self._refusal = Refusal(503, BUSY)
        else:
            self.body += chunk
            return
        self.body.clear()

    async def get(self) -> None:
        """Search images for a text."""
        text = self.get_query_argument("q", "").strip()
        if not text:
            raise Refusal(400, "There is no q to search for; ask for example /api/search?q=two+red+boats.")
        if len(text) > QUERY_LENGTH:
            raise Refusal(400, f"q is longer than {QUERY_LENGTH} characters.")
        await self._answer("text", text)

    async def post(self) -> None:
        """Search captions for a picture."""
        if self._refusal:
            raise self._refusal
        if not self.body:
            raise Refusal(400, "The body is empty; it must be the picture itself.")
        await self._answer("image", self.body)

    def on_connection_close(self) -> None:
        """Take a search that nobody waits for from the queue."""
        super().on_connection_close()
        if self._job:
            self._job.cancel()

    async def _answer(self, side: str, query: str | bytearray) -> None:
        service = self.site.service
        if side in service.missing:
            raise Refusal(422, f"This run cannot search by {side} here; where the server was started is said why.")
        self._job = asyncio.ensure_future(self.site.searchers.run(service.answer, query, self.k, self.elements))
        try:
            self.finish(await self._job)
        except (Busy, asyncio.CancelledError) as error:
            raise Refusal(503, BUSY) from error
        except QueryError as error:
            sentence = str(error)
            raise Refusal(400, f"{sentence[:1].upper()}{sentence[1:]}.") from error
        except XretError as error:
            print(f"a search failed: {error}", file=sys.stderr, flush=True)
            raise Refusal(500, "The search failed; where the server was started is said why.") from error

    def _whole_number(self, name: str, default: int, least: int, most: int) -> int:
        value = self.get_query_argument(name, str(default))
        if not (value.isascii() and value.isdigit() and len(value) < 10 and least <= int(value) <= most):
            raise Refusal(400, f"{name} must be a whole number from {least} to {most}.")
        return int(value)


def _too_large() -> Refusal:
    return Refusal(413, f"The picture has more than {UPLOAD_BYTES >> 20} MiB; send a smaller one.")
