"""The life of the server: it binds, loads, says where it is, and ends when it is told to."""

import asyncio
import errno
import os
import signal
import socket
import sys
import warnings
from collections.abc import Callable
from typing import Any

from PIL import Image
from tornado.httpserver import HTTPServer
from tornado.iostream import IOStream

from ....pipeline.errors import XretError
from ..retriever import Retriever
from .handler import BODY_SECONDS
from .service import Service
from .site import Site

CONNECTIONS = 256
BACKLOG = 128
IDLE_SECONDS = 30.0  # for headers to arrive, and between requests
HEADERS_READ = 128 << 10  # above it a connection is closed without a word; `handler.HEADER_BYTES` gets its sentence
GRACE_SECONDS = 10.0  # for requests that are at work when the server is told to end
FULL = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\nRetry-After: 1\r\n\r\n"


class Server(HTTPServer):
    """An HTTP server that takes a bounded number of connections, each for a bounded time."""

    def initialize(self, site: Site) -> None:  # type: ignore[override]
        """Set the bounds; a body is counted, and refused with a sentence, by the handlers."""
        super().initialize(
            site.application(),
            max_header_size=HEADERS_READ,
            idle_connection_timeout=IDLE_SECONDS,
            body_timeout=BODY_SECONDS + 5,
            max_body_size=1 << 62,
        )
        self._open = 0

    def handle_stream(self, stream: IOStream, address: Any) -> None:
        """Serve a connection, if there is room for one more."""
        if self._open >= CONNECTIONS:
            stream.write(FULL)
            stream.close()
            return
        self._open += 1
        super().handle_stream(stream, address)

    def on_close(self, server_conn: object) -> None:
        """Count one connection less."""
        self._open -= 1
        super().on_close(server_conn)


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
    # The limit of pixels refuses with a sentence; Pillow's own warning would only be printed.
    warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
    with listen(host, port) as listening:
        asyncio.run(_serve(Site(Service(retriever), host), listening, say))


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at a host's address and a port; XretError if that cannot be."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except (socket.gaierror, UnicodeError) as error:
        raise XretError(f"'{host}' is no host of this machine; give --host an address such as 127.0.0.1") from error
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise XretError(f"port {port} of {host} is taken; choose another --port, or 0 for any") from error
        if error.errno == errno.EACCES:
            raise XretError(f"port {port} may not be opened by this user; choose a --port from 1024") from error
        reason = os.strerror(error.errno or 0).lower()
        raise XretError(f"{host} cannot be listened at ({reason}); give --host an address of this machine") from error
    listening.setblocking(False)
    return listening


async def _serve(site: Site, listening: socket.socket, say: Callable[[str], None]) -> None:
    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, told.set)
    loading = asyncio.ensure_future(site.searchers.run(site.service.warm))
    ending = asyncio.ensure_future(told.wait())
    await asyncio.wait((loading, ending), return_when=asyncio.FIRST_COMPLETED)
    if loading.done():
        loading.result()
        for reason in [*site.service.missing.values(), site.service.pictureless]:
            if reason:
                print(f"not everything works: {reason}", file=sys.stderr, flush=True)
        server = Server(site)
        server.add_socket(listening)
        host, port = listening.getsockname()[:2]
        say(f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/")
        await ending
        await stop(server, site)
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.remove_signal_handler(number)


async def stop(server: Server, site: Site) -> None:
    """Take no more connections, wait for the answers that are being made, and close."""
    server.stop()
    site.stopping = True
    until = asyncio.get_running_loop().time() + GRACE_SECONDS
    while site.active and asyncio.get_running_loop().time() < until:
        await asyncio.sleep(0.02)
    site.searchers.stop()
    site.painters.stop()
    await server.close_all_connections()
