"""A real S3 server on loopback that fails when it is told to, for as long as a test wants."""

import io
import itertools
import threading
from contextlib import contextmanager

import boto3
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

LOST_REQUEST, LOST_ANSWER, LATE = "lost request", "lost answer", "late"
NUMBERS = itertools.count()
ERROR = '<?xml version="1.0"?><Error><Code>{code}</Code><Message>{message}</Message></Error>'


class S3Server:
    """moto's S3 behind a gate.

    Attributes:
        address: where it listens.
        gate: called with the method and path of each request; returns None to let it pass, an HTTP status, code and
            message to answer with instead, or one of the above to cut the connection before it is done, after, or 0.3 s
            before.
        requests: method and path of all that came.
    """

    def __init__(self):
        self._moto = DomainDispatcherApplication(create_backend_app)
        self.gate = lambda method, path: None
        self.requests = []
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True, request_handler=_Silent)
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def use(self, monkeypatch):
        """Let everybody take this server for Amazon's."""
        for key, value in {
            "AWS_ENDPOINT_URL": self.address,
            "AWS_ACCESS_KEY_ID": "x",
            "AWS_SECRET_ACCESS_KEY": "x",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }.items():
            monkeypatch.setenv(key, value)

    def stop(self):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @contextmanager
    def failing(self, gate):
        before, self.gate = self.gate, gate
        try:
            yield
        finally:
            self.gate = before

    def _answer(self, environ, start_response):
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        self.requests.append((method, path))
        refusal = self.gate(method, path)
        if refusal is None:
            return self._moto(environ, start_response)
        if refusal == LOST_ANSWER:
            b"".join(self._moto(environ, start_response))
        if refusal == LATE:
            environ["wsgi.input"] = io.BytesIO(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
            threading.Timer(0.3, lambda: b"".join(self._moto(environ, lambda *_: None))).start()
        if refusal in (LOST_REQUEST, LOST_ANSWER, LATE):
            raise ConnectionResetError
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        status, code, message = refusal
        start_response(f"{status} {code}", [("Content-Type", "application/xml")])
        return [b"" if method == "HEAD" else ERROR.format(code=code, message=message).encode()]


class _Silent(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"  # a connection serves many requests

    def log(self, *_):
        pass

    def connection_dropped(self, *_):
        self.close_connection = True  # as a cut connection is


class Bucket:
    """One bucket of the server, seen by a client that is not ours."""

    def __init__(self, server):
        self.server = server
        self.name = f"bucket-{next(NUMBERS)}"
        self.url = f"s3://{self.name}/deep/s.zarr"
        self._s3 = boto3.client("s3")
        self._s3.create_bucket(Bucket=self.name)

    def names(self):
        """Return the names of the objects below the store."""
        pages = self._s3.get_paginator("list_objects_v2").paginate(Bucket=self.name, Prefix="deep/s.zarr/")
        names = [entry["Key"] for page in pages for entry in page.get("Contents", [])]
        return sorted(name.removeprefix("deep/s.zarr/") for name in names)

    def files(self):
        """Return the content of every object below the store."""
        return {name: self.read(f"deep/s.zarr/{name}") for name in self.names()}

    def read(self, key):
        return self._s3.get_object(Bucket=self.name, Key=key)["Body"].read()

    def fill(self, content):
        for name, data in content.items():
            self.put(name, data)

    def put(self, name, data):
        self._s3.put_object(Bucket=self.name, Key=f"deep/s.zarr/{name}", Body=data)

    def delete(self, name):
        self._s3.delete_object(Bucket=self.name, Key=f"deep/s.zarr/{name}")
