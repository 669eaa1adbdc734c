"""A real S3 server on loopback that fails when it is told to, for as long as a test wants."""

import threading
from contextlib import contextmanager

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

ERROR = '<?xml version="1.0"?><Error><Code>{code}</Code><Message>{message}</Message></Error>'


class S3Server:
    """moto's S3 behind a gate.

    Attributes:
        address: where it listens.
        gate: called with the method and path of each request; returns None to let it pass, or an HTTP status, code
            and message to answer with instead.
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
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        status, code, message = refusal
        start_response(f"{status} {code}", [("Content-Type", "application/xml")])
        return [b"" if method == "HEAD" else ERROR.format(code=code, message=message).encode()]


class _Silent(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"  # a connection serves many requests

    def log(self, *_):
        pass
