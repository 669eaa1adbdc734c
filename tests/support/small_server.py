"""A server in a thread of its own, over a retriever that finds things without a model."""

import contextlib
import http.client
import io
import json
import re
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from PIL import Image

from xret.heads.modules.embedding import Gaussian
from xret.heads.retrieval.hits import Hit
from xret.heads.retrieval.retriever import Query
from xret.heads.retrieval.serving.server import listen, server_of
from xret.heads.retrieval.serving.service import Service
from xret.heads.retrieval.serving.site import Site
from xret.pipeline.data.images import LONGEST, open_image

JPEG = {"Content-Type": "image/jpeg"}
COLOURS = ["red", "green", "blue", "orange", "purple", "teal", "gold", "grey"]


class FakeRetriever:
    """Finds the image whose colour is in the text, or the captions of the colour of a picture; then all others.

    Its embeddings are of a `kind`: ``set``, ``vector`` or ``gaussian``.

    `gate` holds searches back while it is not set; `asked` are the queries that came so far.
    It does not know zeppelins.
    """

    def __init__(self, folder, kind="set"):
        recipe = SimpleNamespace(name="setdiv", similarity={"name": "smooth-chamfer"})
        self.run = SimpleNamespace(path=Path(folder) / "a-run", recipe=recipe)
        self.gate, self.asked, self.kind = threading.Event(), [], kind
        self.gate.set()
        images = Path(folder) / "images"
        images.mkdir(exist_ok=True)
        for name in COLOURS:
            Image.new("RGB", (64, 48), name).save(images / f"{name}.png")
        self.gallery = SimpleNamespace(
            dataset="colours",
            split="test",
            upright=True,
            image_ids=[f"i{row}" for row in range(len(COLOURS))],
            file_names=[f"{name}.png" for name in COLOURS],
            caption_ids=[str(100 + row) for row in range(2 * len(COLOURS))],
            texts=[text for name in COLOURS for text in (f"all {name}", f"nothing but {name} <b>& more</b>")],
            caption_image=np.arange(2 * len(COLOURS)) // 2,
            picture=lambda row: images / f"{COLOURS[row]}.png",
            names=lambda answers: (range(len(COLOURS)) if answers == "images" else range(2 * len(COLOURS)), None),
        )

    def encode_query(self, query):
        if not isinstance(query, str):
            query = open_image(query, longest=LONGEST)  # as encoders do
        assert self.gate.wait(20)
        self.asked.append(query)
        if isinstance(query, str):
            best = next((row for row, name in enumerate(COLOURS) if name in query), 0)
        else:
            pixel = query.resize((1, 1)).getpixel((0, 0))
            distance = [np.subtract(Image.new("RGB", (1, 1), name).getpixel((0, 0)), pixel) for name in COLOURS]
            best = int(np.argmin(np.abs(distance).sum(1)))
        embedding = torch.full((1, 3, 2) if self.kind == "set" else (1, 2), float(best))
        if self.kind == "gaussian":
            embedding = Gaussian(embedding, torch.full((1, 2), -2.0))  # of a standard deviation of 1 / e
        if isinstance(query, str):
            return Query(embedding, "images", self.unknown_words([query]))
        return Query(embedding, "captions")

    def encode_captions(self, texts):
        return self.encode_query(texts[0]).embedding

    def unknown_words(self, texts):
        return [word for text in texts for word in text.split() if word == "zeppelin"]

    def search(self, query, k=10):
        spread = 0.25 if self.kind == "gaussian" else None
        first = int((query.embedding.mean if spread else query.embedding).flatten()[0])
        if query.answers == "images":
            rows = [(first + step) % len(COLOURS) for step in range(len(COLOURS))][:k]
            return [
                Hit(rank, f"i{row}", 1 / rank, file_name=self.gallery.file_names[row], uncertainty=spread)
                for rank, row in enumerate(rows, 1)
            ]
        rows = [(2 * first + step) % len(self.gallery.texts) for step in range(len(self.gallery.texts))][:k]
        return [
            Hit(rank, str(100 + row), 1 / rank, caption=self.gallery.texts[row], uncertainty=spread)
            for rank, row in enumerate(rows, 1)
        ]

    def searched(self, answers):
        return len(self.gallery.image_ids if answers == "images" else self.gallery.texts)

    def searches_others(self, answers):
        return False

    def search_elements(self, query, k=10):
        return [self.search(replace(query, embedding=query.embedding + slot), k) for slot in range(query.elements)]


class Running:
    """A server that runs; `address` is where."""

    def __init__(self, retriever):
        self.retriever = retriever
        self.site = Site(Service(retriever), "127.0.0.1")
        retriever.asked.clear()
        listening = listen("127.0.0.1", 0)
        self.address = listening.getsockname()
        ready = threading.Event()
        self.server = server_of(self.site, ready.set)
        self._thread = threading.Thread(target=self.server.run, args=([listening],), daemon=True)
        self._thread.start()
        assert ready.wait(20)

    @property
    def connections(self):
        return self.server.server_state.connections

    @property
    def requests(self):
        """The requests that are at work."""
        return self.server.server_state.tasks

    @property
    def running(self):
        return self._thread.is_alive()

    def stop(self):
        """Tell it to end, as a signal does."""
        self.server.should_exit = True

    def end(self):
        self.stop()
        self._thread.join(20)
        assert not self.running

    @property
    def url(self):
        return f"http://{self.address[0]}:{self.address[1]}/"

    def ask(self, path, method="GET", body=None, headers=()):
        """Return status, headers and body of an answer; a JSON body is parsed."""
        with contextlib.closing(http.client.HTTPConnection(*self.address, timeout=20)) as connection:
            connection.request(method, path, body=body, headers=dict(headers))
            answer = connection.getresponse()
            content = answer.read()
            kind = answer.headers.get("Content-Type", "")
            return answer.status, answer.headers, json.loads(content) if "json" in kind else content

    def send(self, data, *, seconds=20.0, more=None):
        """Send bytes as they are, then what `more` yields; return all that comes back until the server closes."""
        with socket.create_connection(self.address, timeout=seconds) as connection:
            received = b""
            with contextlib.suppress(ConnectionError):
                connection.sendall(data)
                for part in more or ():
                    connection.sendall(part)
            with contextlib.suppress(ConnectionError):
                while part := connection.recv(1 << 16):
                    received += part
            return received


def picture_bytes(colour="red", size=(64, 48), form="PNG", **options):
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, form, **options)
    return file.getvalue()


def require_alive(it):
    status, _, about = it.ask("/api/about")
    assert (status, about["images"]) == (200, len(COLOURS))
    wait_until(lambda: not it.requests and it.site.held == 0)


def wait_until(condition, seconds=10.0):
    until = time.perf_counter() + seconds
    while not condition():
        assert time.perf_counter() < until
        time.sleep(0.01)


def refused(answer, status):
    """Return the sentence of a refusal, which is all that it says."""
    assert answer[0] == status, answer
    assert set(answer[2]) == {"error"}
    assert re.fullmatch(r"\w.*[.]", answer[2]["error"])
    return answer[2]["error"]


def status_of(data):
    """Return the status line's number in what a server sent."""
    return int(data.split(b" ", 2)[1]) if data else None
