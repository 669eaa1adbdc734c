"""A real S3 server on loopback that refuses when it is told to."""

import threading
from contextlib import contextmanager

import boto3
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server


class S3Server:
    """moto's S3.

    Attributes:
        requests: method and path of all that came.
    """

    def __init__(self):
        self._moto, self._refuses, self.requests = DomainDispatcherApplication(create_backend_app), False, []
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True, request_handler=_Silent)
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def new_bucket(self, monkeypatch):
        """Let everybody take this server for Amazon's; return the URL of a bucket."""
        monkeypatch.setenv("AWS_ENDPOINT_URL", self.address)
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(key, "x")
        name = f"bucket-{len(self.requests)}"
        boto3.client("s3").create_bucket(Bucket=name)
        return f"s3://{name}"

    def stop(self):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @contextmanager
    def refusing(self):
        self._refuses = True
        yield
        self._refuses = False

    def _answer(self, environ, start_response):
        self.requests.append((environ["REQUEST_METHOD"], environ["PATH_INFO"]))
        if not self._refuses:
            return self._moto(environ, start_response)
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        start_response("403 AccessDenied", [("Content-Type", "application/xml")])
        return [b'<?xml version="1.0"?><Error><Code>AccessDenied</Code><Message>no</Message></Error>']


class _Silent(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"  # a connection serves many requests

    def log(self, *_):
        pass
