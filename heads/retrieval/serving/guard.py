"""What every request must keep to. A refusal is a status and one sentence, ``{"error": sentence}``."""

import ipaddress
import json
import re
import socket
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

HEADER_BYTES = 16 << 10  # of an address, and of all headers
BUSY = "The server has too much to do; ask again in a moment."
MALFORMED = "The request is malformed."
SENTENCES = {
    "Not Found": "There is nothing here; the page is at /, the endpoint at /api/search.",
    "Method Not Allowed": "This method does nothing here.",
}


class Guard:
    """Refuses requests by their heads, before a body is read.

    Args:
        app: gets all others.
        names: `own_names` of the server.
    """

    def __init__(self, app: ASGIApp, names: frozenset[str]) -> None:
        self.app, self.names = app, names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        app = self.app
        if scope["type"] == "http":
            request = Request(scope)
            try:
                check_head(request, self.names)
            except HTTPException as refusal:
                app = await refuse(request, refusal)
        await app(scope, receive, send)


def check_head(request: Request, names: frozenset[str]) -> None:
    """Raise HTTPException for a request that is meant for another server, is another site's, or is too long."""
    headers = request.headers
    name = re.sub(r":[0-9]*$", "", headers.get("host", "localhost"))
    if not is_own(name, names):
        raise HTTPException(421, f"This server is not {name[:80]!r}; ask for it by its address, or as localhost.")
    if headers.get("sec-fetch-site") == "cross-site" and headers.get("sec-fetch-mode") != "navigate":
        raise HTTPException(403, "Pages of other sites may not ask this server.")
    if len(request.scope["raw_path"]) + len(request.scope["query_string"]) > HEADER_BYTES:
        raise HTTPException(414, f"The address is longer than {HEADER_BYTES} bytes.")
    if sum(len(key) + len(value) for key, value in headers.raw) > HEADER_BYTES:
        raise HTTPException(431, f"The headers are longer than {HEADER_BYTES} bytes.")
    two_lengths = "content-length" in headers and "transfer-encoding" in headers
    if two_lengths or request.scope["http_version"] not in ("1.0", "1.1"):
        raise HTTPException(400, MALFORMED, {"Connection": "close"})


def own_names(host: str) -> frozenset[str]:
    """Return the names that a server which listens at `host` may be called by, besides any address."""
    return frozenset({"localhost", host.lower(), socket.gethostname().lower()})


def is_own(name: str, names: frozenset[str]) -> bool:
    """Return whether a Host header may name this server.

    A foreign page can let its own name point here (DNS rebinding), and would then count as a page of this server. It
    cannot do so with an address, so any address is good.
    """
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return name.lower() in names
    return True


async def refuse(request: Request, error: Exception) -> Response:
    """Answer with a refusal's sentence."""
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    if error.status_code == 503:
        headers["Retry-After"] = "1"
    if "expect" in request.headers:
        headers["Connection"] = "close"  # the body will not come
    return as_json({"error": SENTENCES.get(error.detail, error.detail)}, error.status_code, headers)


async def fail(_request: Request, _error: Exception) -> Response:
    """Answer after an error of our own, which the server then logs."""
    return as_json({"error": "Something broke; the server's own messages say what."}, 500)


async def leave(_request: Request, _error: Exception) -> Response:
    """Return an answer that nobody waits for."""
    return Response()


def as_json(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Answer with JSON that nobody keeps."""
    headers = {"Cache-Control": "no-store", **(headers or {})}
    return Response(json.dumps(value), status, headers, "application/json")
