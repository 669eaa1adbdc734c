"""What every request must keep to; each refusal is a status and one sentence, ``{"error": sentence}``."""

import asyncio
import ipaddress
import json
import socket
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from tornado.httputil import HTTPServerRequest
from tornado.web import HTTPError, RequestHandler, stream_request_body

if TYPE_CHECKING:
    from .site import Site

HEADER_BYTES = 16 << 10  # of an address, and of all headers
BODY_SECONDS = 30.0  # for a body to arrive
LINGER_SECONDS = 3.0  # for the rest of a body that was refused
SEND_SECONDS = 30.0  # for a client to take its answer
HEADERS = {
    "Server": "xret",
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:;"
    " connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
SENTENCES = {
    HTTPStatus.BAD_REQUEST: "The request is malformed.",
    HTTPStatus.NOT_FOUND: "There is nothing here; the page is at /, the endpoint at /api/search.",
    HTTPStatus.METHOD_NOT_ALLOWED: "This method does nothing here.",
    HTTPStatus.INTERNAL_SERVER_ERROR: "Something broke; where the server was started is said what.",
}


class Refusal(HTTPError):
    """A status, and the sentence that goes with it."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(status)
        self.sentence = sentence


@stream_request_body
class Handler(RequestHandler):
    """Refuses what it can before a body is read, and bounds how long body and answer may take."""

    def initialize(self, site: "Site") -> None:
        """Join the requests that are at work."""
        self.site, self.body = site, bytearray()
        self._timers: list[asyncio.TimerHandle] = []
        site.active.add(self)

    def set_default_headers(self) -> None:
        """Set what every answer says."""
        for name, value in HEADERS.items():
            self.set_header(name, value)

    async def prepare(self) -> None:
        """Refuse by the headers; `check` says what else."""
        headers = self.request.headers
        sends = headers.get("Content-Length", "0") != "0" or "Transfer-Encoding" in headers
        try:
            _check_request(self.request, self.site.names)
            self.check()
        except HTTPError as refusal:
            if not sends or "Expect" in headers:
                raise
            await self._answer_early(refusal)
        else:
            if sends:
                self._later(BODY_SECONDS, self._refuse_late_body)

    def check(self) -> None:
        """Raise a `Refusal` for what the headers tell."""

    def data_received(self, chunk: bytes) -> None:
        """Let a body pass that nobody asked for."""

    def finish(self, chunk: Any = None) -> "asyncio.Future[None]":
        """End the answer; a client that does not take it is left."""
        if self.site.stopping and not self._headers_written:
            self.set_header("Connection", "close")
        sent = super().finish(chunk)
        self._later(SEND_SECONDS, self._close)
        sent.add_done_callback(lambda _: self._leave())
        return sent

    def on_connection_close(self) -> None:
        """Forget a client that went away."""
        super().on_connection_close()
        self._leave()

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        """Answer with the sentence."""
        if status_code == HTTPStatus.SERVICE_UNAVAILABLE:
            self.set_header("Retry-After", "1")
        self.finish({"error": _sentence(status_code, kwargs.get("exc_info", (None, None))[1])})

    def log_exception(self, typ: Any, value: BaseException | None, tb: Any) -> None:
        """Log what is the server's fault, and nothing that a client did."""
        if not isinstance(value, HTTPError):
            super().log_exception(typ, value, tb)

    async def _answer_early(self, refusal: HTTPError) -> None:
        """Answer, then read on for a moment: a client that still sends would find a broken connection, no answer."""
        answer = json.dumps({"error": _sentence(refusal.status_code, refusal)}).encode()
        self.set_status(refusal.status_code)
        self.set_header("Content-Type", "application/json; charset=UTF-8")
        self.set_header("Content-Length", len(answer))
        self.set_header("Connection", "close")
        self.write(answer)
        self._later(LINGER_SECONDS, self._close)
        setattr(self, str(self.request.method).lower(), lambda *_: None)  # when the body is over nothing is left to do
        await self.flush()

    def _refuse_late_body(self) -> None:
        refusal = Refusal(HTTPStatus.REQUEST_TIMEOUT, f"The body did not arrive within {BODY_SECONDS:g} seconds.")
        if not self.request._body_future.done() and not self._finished:
            self.send_error(refusal.status_code, exc_info=(Refusal, refusal, None))

    def _later(self, seconds: float, action: Any) -> None:
        self._timers.append(asyncio.get_running_loop().call_later(seconds, action))

    def _close(self) -> None:
        self.request.connection.stream.close()  # type: ignore[union-attr]
        self._leave()

    def _leave(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self._timers, self.body = [], bytearray()
        self.site.active.discard(self)


def own_names(host: str) -> frozenset[str]:
    """Return the names that a server which listens at `host` may be called by, besides any address."""
    return frozenset({"localhost", host.lower(), socket.gethostname().lower()})


def is_own(name: str, names: frozenset[str]) -> bool:
    """Return whether a Host header may name this server.

    A foreign page can let its own name point here (DNS rebinding), and would then count as a page of this server. It
    cannot do so with an address, so that any address is good.
    """
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return name.lower() in names
    return True


def _check_request(request: HTTPServerRequest, names: frozenset[str]) -> None:
    if not is_own(request.host_name, names):
        raise Refusal(
            421, f"This server is not {request.host_name[:80]!r}; ask for it by its address, or as localhost."
        )
    if request.headers.get("Sec-Fetch-Site") == "cross-site" and request.headers.get("Sec-Fetch-Mode") != "navigate":
        raise Refusal(403, "Pages of other sites may not ask this server.")
    if len(request.uri or "") > HEADER_BYTES:
        raise Refusal(414, f"The address is longer than {HEADER_BYTES} bytes.")
    if sum(len(name) + len(value) for name, value in request.headers.get_all()) > HEADER_BYTES:
        raise Refusal(431, f"The headers are longer than {HEADER_BYTES} bytes.")


def _sentence(status: int, error: Any) -> str:
    if isinstance(error, Refusal):
        return error.sentence
    return SENTENCES.get(HTTPStatus(status), f"{HTTPStatus(status).phrase}.")
