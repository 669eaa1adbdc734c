"""The life of the server: it binds, loads, says where it is, and ends when it is told to."""

import asyncio
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ....pipeline.errors import XretError
from ....pipeline.wording import printable
from ..retriever import Retriever
from .service import Service
from .site import Site

CONNECTIONS = 256
BACKLOG = 128
IDLE_SECONDS = 30  # that a client may be silent, or not take its answer
HEADERS_READ = 128 << 10  # above it the request is malformed; `guard.HEADER_BYTES` gets its sentence
GRACE_SECONDS = 10  # for requests that are at work when the server is told to end
FULL = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\nRetry-After: 1\r\n\r\n"
HEADERS = {
    "Server": "xret",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:;"
    " connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class Connection(H11Protocol):
    """A connection as uvicorn has it. There is a bounded number of them, and none waits for its client for ever."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Serve a connection, if there is room for one more."""
        super().connection_made(transport)
        if len(self.connections) > CONNECTIONS:
            transport.write(FULL)
            transport.close()
        self._timer = self.loop.call_later(IDLE_SECONDS, self._look_after, None)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._timer.cancel()
        super().connection_lost(exc)

    def _look_after(self, before: object) -> None:
        """Close the connection if its client neither began a request since `before` nor waits for its answer."""
        waits = self.cycle and not self.cycle.response_complete and not self.transport.get_write_buffer_size()
        if self.cycle is before and not waits:
            self.transport.abort()
        else:
            self._timer = self.loop.call_later(IDLE_SECONDS, self._look_after, self.cycle)


def serve(retriever: Retriever, *, host: str, port: int, say: Callable[[str], None]) -> None:
    """Serve the page and the endpoint until SIGINT or SIGTERM; requests at work are answered before the end.

    Args:
        retriever: searches.
        host: the address or name to listen at.
        port: 0 for any that is free.
        say: called with the page's address as soon as it can be asked for.

    Raises:
        XretError: the address cannot be listened at, or the run cannot search.
    """
    with listen(host, port) as listening:
        service = Service(retriever)
        for reason in [*service.missing.values(), service.pictureless]:
            if reason:
                print(printable(f"not everything works: {reason}"), file=sys.stderr, flush=True)
        at, port = listening.getsockname()[:2]
        address = f"http://[{at}]:{port}/" if ":" in at else f"http://{at}:{port}/"
        server = server_of(Site(service, host), lambda: say(address))
        # Once it has ended, uvicorn raises the signal that it was ended by again.
        before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            server.run([listening])
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def server_of(site: Site, ready: Callable[[], None]) -> uvicorn.Server:
    """Return a server of a site, with its bounds; it calls `ready` when it can be told to end."""

    @asynccontextmanager
    async def lifespan(_app: Any) -> AsyncIterator[None]:
        ready()
        yield
        for workers in (site.searchers, site.painters):
            workers.pool.shutdown(wait=False, cancel_futures=True)

    config = uvicorn.Config(
        site.application(lifespan),
        http=Connection,
        ws="none",
        lifespan="on",
        log_config=None,
        log_level="error",  # what clients do wrong, and what they search for, is not written down
        access_log=False,
        proxy_headers=False,
        server_header=False,
        headers=list(HEADERS.items()),
        timeout_keep_alive=IDLE_SECONDS,
        timeout_graceful_shutdown=GRACE_SECONDS,
        h11_max_incomplete_event_size=HEADERS_READ,
    )
    return uvicorn.Server(config)


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at a host's address and a port; XretError if that cannot be."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.create_server(address[:2], family=family, backlog=BACKLOG)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # inherited; without it answers wait 40 ms
        return listening
    except (OSError, UnicodeError) as error:
        said = getattr(error, "strerror", None) or "this is not the name of a host"
        reason = said.lower().partition(" (while attempting")[0]  # create_server repeats the address
        raise XretError(
            f"the server cannot listen at {host}, port {port} ({reason}); give --host an address of this"
            " machine such as 127.0.0.1, and --port a number from 1024 that is free, or 0 for any"
        ) from error
