"""A real S3 server on loopback, as slow as a distant one, which refuses or cuts connections when it is told to."""

import os
import socket
import threading
import time
from contextlib import contextmanager

import boto3
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

PIECE = 1 << 18  # bytes that are sent at once
REFUSALS = {
    "AccessDenied": "403 Forbidden",
    "ExpiredToken": "400 Bad Request",
    "NotImplemented": "501 Not Implemented",
    "SlowDown": "503 Slow Down",
}


class S3Server:
    """moto's S3; every request waits `latency` seconds, and all together move so many `bytes_per_second`.

    Attributes:
        requests: method and path of all that came.
    """

    def __init__(self, latency=0.0, bytes_per_second=None):
        self.latency, self.bytes_per_second = latency, bytes_per_second
        self._moto, self._answers, self.requests = DomainDispatcherApplication(create_backend_app), self._answer, []
        self._free, self._lock = 0.0, threading.Lock()  # when the line is free
        self._server = make_server("127.0.0.1", 0, self._serve, threaded=True, request_handler=_Silent)
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def new_bucket(self, setenv):
        """Let everybody take this server for Amazon's; return the URL of a bucket. `setenv` sets a variable."""
        name = new_bucket(self.address, setenv, f"bucket-{len(self.requests)}")
        return f"s3://{name}"

    def stop(self):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @contextmanager
    def refusing(self, code="AccessDenied", when=lambda environ: True):
        """Answer with this error code, `when` a request is such."""

        def refuse(environ, start):
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start(REFUSALS[code], [("Content-Type", "application/xml")])
            return [f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>no</Message></Error>'.encode()]

        with self._with(refuse, when):
            yield

    @contextmanager
    def cutting(self, when):
        """Close the connection in the middle of what is sent, or else of the answer, `when` a request is such."""

        def cut(environ, start):
            length = int(environ.get("CONTENT_LENGTH") or 0)
            body = b"" if length else b"".join(self._answer(environ, start))
            environ["wsgi.input"].read(length // 2)
            yield body[: len(body) // 2]
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            raise ConnectionAbortedError

        with self._with(cut, when):
            yield

    @contextmanager
    def _with(self, answer, when):
        self._answers = lambda environ, start: (answer if when(environ) else self._answer)(environ, start)
        try:
            yield
        finally:
            self._answers = self._answer

    def _serve(self, environ, start):
        return self._answers(environ, start)

    def _answer(self, environ, start):
        self.requests.append((environ["REQUEST_METHOD"], environ["PATH_INFO"]))
        time.sleep(self.latency)
        self._move(int(environ.get("CONTENT_LENGTH") or 0))
        return self._slowly(self._moto(environ, start))

    def _slowly(self, body):
        for part in body:
            for first in range(0, len(part), PIECE):
                piece = part[first : first + PIECE]
                self._move(len(piece))
                yield piece

    def _move(self, count):
        """Wait until the line, which is one for all, has moved so many bytes."""
        if self.bytes_per_second:
            with self._lock:
                self._free = max(self._free, time.monotonic()) + count / self.bytes_per_second
                until = self._free
            time.sleep(max(0.0, until - time.monotonic()))


def new_bucket(address, setenv=os.environ.__setitem__, name="bucket"):
    """Let everybody take the server at an address for Amazon's, and make a bucket there."""
    setenv("AWS_ENDPOINT_URL", address)
    setenv("AWS_EC2_METADATA_DISABLED", "true")
    setenv("AWS_DEFAULT_REGION", "us-east-1")
    for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        setenv(key, "x")
    boto3.client("s3").create_bucket(Bucket=name)
    return name


class _Silent(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"  # a connection serves many requests

    def log(self, *_):
        pass
