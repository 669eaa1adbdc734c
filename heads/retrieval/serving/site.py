"""The paths of the server: the page, what it begins with, searches, and the gallery's pictures by row."""

import asyncio
import hashlib
import re
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qs

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Lifespan

from ....pipeline.errors import QueryError, XretError
from ....pipeline.wording import printable
from .guard import BUSY, MALFORMED, Guard, as_json, fail, leave, own_names, refuse
from .service import SIZES, Service

QUERY_LENGTH = 1000  # characters
MOST_RESULTS = 100
UPLOAD_BYTES = 16 << 20  # of one picture
HELD_BYTES = 256 << 20  # of all pictures that arrive or wait
BODY_SECONDS = 30.0  # for a picture to arrive
QUEUE = 64  # calls that run or wait

PAGE = Path(__file__).parent / "page"
FILES = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}

Result = TypeVar("Result")


class Workers:
    """A few threads that compute beside the event loop, and a bounded queue of calls for them."""

    def __init__(self, threads: int) -> None:
        self.pool, self.calls = ThreadPoolExecutor(threads), 0

    async def run(self, function: Callable[..., Result], *arguments: object) -> Result:
        """Call a function in a thread; 503 if too many calls wait. A call that is cancelled leaves the queue."""
        if self.calls >= QUEUE:
            raise HTTPException(503, BUSY)
        self.calls += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self.pool, function, *arguments)
        finally:
            self.calls -= 1


class Site:
    """What the requests share.

    Args:
        service: answers.
        host: where the server listens.

    Attributes:
        searchers: the one thread that uses the model.
        painters: make the gallery's pictures small.
        held: bytes of all pictures that arrive or wait.
    """

    def __init__(self, service: Service, host: str) -> None:
        self.service, self.names, self.held = service, own_names(host), 0
        self.searchers, self.painters = Workers(1), Workers(2)

    def application(self, lifespan: Lifespan[Any] | None = None) -> Starlette:
        """Return the routes; none of them takes the name of a file."""
        routes = [_page(path, (PAGE / file).read_bytes(), kind) for path, (file, kind) in FILES.items()]
        routes.append(Route("/api/about", self.about))
        routes.append(Route("/api/search", self.search, methods=["GET", "POST"]))
        routes.append(Route("/api/images/{row}", self.picture))
        app = Starlette(
            routes=routes,
            middleware=[Middleware(Guard, names=self.names)],
            exception_handlers={HTTPException: refuse, ClientDisconnect: leave, Exception: fail},
            lifespan=lifespan,
        )
        app.router.redirect_slashes = False
        return app

    async def about(self, _request: Request) -> Response:
        """Send what the page begins with: facts of run and gallery, and the limits."""
        limits = {"query_length": QUERY_LENGTH, "upload_bytes": UPLOAD_BYTES, "results": MOST_RESULTS}
        return as_json({**asdict(self.service.about), "limits": limits})

    async def picture(self, request: Request) -> Response:
        """Send an image of the gallery, by its row, as a JPEG; ``size`` is small or large."""
        size, row = _parameters(request).get("size", "small"), request.path_params["row"]
        if size not in SIZES:
            raise HTTPException(400, f"size is {' or '.join(SIZES)}.")
        if not re.fullmatch("[0-9]{1,9}", row):
            raise HTTPException(404)
        try:
            content = await self.painters.run(self.service.picture, int(row), size)
        except (IndexError, XretError) as error:
            raise HTTPException(404, "There is no such picture.") from error
        return _cached(request, content, "image/jpeg")

    async def search(self, request: Request) -> Response:
        """Answer ``GET /api/search?q=TEXT&k=10&elements=1``, or POST with an image file as the body."""
        given = _parameters(request)
        k = _whole_number(given, "k", 10, 1, MOST_RESULTS)
        elements = bool(_whole_number(given, "elements", 0, 0, 1))
        if elements and not self.service.about.elements:
            raise HTTPException(400, "This run's embeddings are not sets: they have no elements to ask one by one.")
        if request.method != "POST":
            return await self._answer(request, "text", _text(given), k, elements)
        async with self._body(request) as body:
            return await self._answer(request, "image", body, k, elements)

    async def _answer(self, request: Request, kind: str, query: str | bytearray, k: int, elements: bool) -> Response:
        if kind in self.service.missing:
            raise HTTPException(422, f"This run cannot search by {kind} here; the server's own messages say why.")
        try:
            call = self.searchers.run(self.service.answer, query, k, elements)
            return as_json(self.service.to_dict(await _unless_gone(request, call)))
        except QueryError as error:
            sentence = str(error)
            raise HTTPException(400, f"{sentence[:1].upper()}{sentence[1:]}.") from error
        except XretError as error:
            print(printable(f"a search failed: {error}"), file=sys.stderr, flush=True)
            raise HTTPException(500, "The search failed; the server's own messages say why.") from error

    @asynccontextmanager
    async def _body(self, request: Request) -> AsyncIterator[bytearray]:
        """Give the picture that a request sends, and count it as held until the end of the block."""
        kind = request.headers.get("content-type", "")
        if not kind.startswith("image/") and kind != "application/octet-stream":
            raise HTTPException(415, "The body must be the picture itself, with a Content-Type such as image/jpeg.")
        if int(request.headers.get("content-length", 0)) > UPLOAD_BYTES:
            raise _too_large()
        body = bytearray()
        try:
            await self._receive(request, body)
            yield body
        finally:
            self.held -= len(body)
            body.clear()  # a call that was cancelled stays in its thread's queue, and an error in its frames

    async def _receive(self, request: Request, body: bytearray) -> None:
        """Fill a body. One that is too large is read to its end, so that its sender hears why, but not kept."""
        refusal = None
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for chunk in request.stream():
                    if len(body) + len(chunk) > UPLOAD_BYTES:
                        refusal = _too_large()
                    elif self.held + len(chunk) > HELD_BYTES:
                        refusal = HTTPException(503, BUSY)
                    if refusal:
                        self.held -= len(body)
                        body.clear()
                    else:
                        self.held += len(chunk)
                        body += chunk
        except TimeoutError as error:
            sentence = f"The body did not arrive within {BODY_SECONDS:g} seconds."
            raise HTTPException(408, sentence, {"Connection": "close"}) from error
        if refusal or not body:
            raise refusal or HTTPException(400, "The body is empty; it must be the picture itself.")


def _page(path: str, content: bytes, kind: str) -> Route:
    async def page(request: Request) -> Response:
        return _cached(request, content, kind)

    return Route(path, page)


def _cached(request: Request, content: bytes, kind: str) -> Response:
    """Answer with content that a browser keeps, and asks for only whether it has changed."""
    headers = {"Cache-Control": "no-cache", "ETag": f'"{hashlib.sha256(content).hexdigest()[:32]}"'}
    if request.headers.get("if-none-match") == headers["ETag"]:
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers, media_type=kind)


def _parameters(request: Request) -> dict[str, str]:
    """Return the parameters of the address; of one that is given twice the last value."""
    try:
        found = parse_qs(request.scope["query_string"].decode("ascii"), keep_blank_values=True, errors="strict")
    except ValueError as error:
        raise HTTPException(400, MALFORMED) from error
    return {name: values[-1] for name, values in found.items()}


def _whole_number(given: dict[str, str], name: str, default: int, least: int, most: int) -> int:
    value = given.get(name, str(default))
    if not (re.fullmatch("[0-9]{1,9}", value) and least <= int(value) <= most):
        raise HTTPException(400, f"{name} must be a whole number from {least} to {most}.")
    return int(value)


def _text(given: dict[str, str]) -> str:
    text = given.get("q", "").strip()
    if not text:
        raise HTTPException(400, "q is missing; ask for example /api/search?q=two+red+boats.")
    if len(text) > QUERY_LENGTH:
        raise HTTPException(400, f"q is longer than {QUERY_LENGTH} characters.")
    return text


def _too_large() -> HTTPException:
    return HTTPException(413, f"The picture has more than {UPLOAD_BYTES >> 20} MiB; send a smaller one.")


async def _unless_gone(request: Request, call: Coroutine[Any, Any, Result]) -> Result:
    """Await a call, and cancel it when the client goes away; ClientDisconnect then."""
    work, leaving = asyncio.ensure_future(call), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((work, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientDisconnect
        return work.result()
    finally:
        work.cancel()
        leaving.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
