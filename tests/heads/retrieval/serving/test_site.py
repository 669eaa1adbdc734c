"""The paths of `xret serve`: whatever comes in, it lives."""

import gc
import itertools
import json
import re
import socket
import struct
import sys
import threading
import time
import tracemalloc
import zlib
from urllib.parse import quote

import pytest
from small_server import JPEG, FakeRetriever, Running, picture_bytes, refused, status_of, wait_until

from xret.heads.retrieval.serving import site
from xret.pipeline.errors import EncoderError, QueryError


def test_the_page_needs_nothing_from_elsewhere_and_says_so(running):
    for path, kind in (("/", "text/html"), ("/page.css", "text/css"), ("/page.js", "text/javascript")):
        status, headers, content = running.ask(path)
        assert status == 200
        assert headers["Content-Type"].startswith(kind)
        assert not re.search(rb"https?:|//\w+\.\w|<script>|<style>| on\w+=|style=", content), path
        assert running.ask(path, "HEAD")[0] == 200
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Referrer-Policy"] == "no-referrer"
        assert headers["Server"] == "xret"
        assert not [name for name in headers if name.startswith("Access-Control")]


@pytest.mark.parametrize(
    ("query", "word"),
    [
        ("", "q is missing"),
        ("q=", "q is missing"),
        ("q=++%09", "q is missing"),
        ("q=" + "a" * 1001, "1000 characters"),
        ("q=red&k=0", "k must"),
        ("q=red&k=101", "k must"),
        ("q=red&k=-1", "k must"),
        ("q=red&k=ten", "k must"),
        ("q=red&k=1e1", "k must"),
        ("q=red&k=", "k must"),
        ("q=red&k=" + "9" * 5000, "k must"),
        ("q=red&k=%D9%A3", "k must"),  # a digit, but none of ours
        ("q=red&elements=2", "elements must"),
        ("q=%ff%fe", "malformed"),
        ("q=%ed%a0%80", "malformed"),  # half of a character pair
    ],
)
def test_wrong_parameters(lasting, query, word):
    assert word in refused(lasting.ask(f"/api/search?{query}"), 400)
    assert lasting.retriever.asked == []


def test_odd_texts_are_texts(lasting):
    for text in ("<script>alert(1)</script>", "'; drop table", "../../etc/passwd", "красный", "🟥" * 400, "%s %d {0}"):
        assert lasting.ask(f"/api/search?q={quote(text)}")[0] == 200
        assert lasting.retriever.asked[-1] == text


@pytest.mark.parametrize(
    "path",
    [
        "/../../../etc/passwd",
        "/..%2f..%2fetc/passwd",
        "//etc/passwd",
        "/page/index.html",
        "/page.css/../site.py",
        "/api/images/../../red.png",
        "/api/images/red.png",
        "/api/images/-1",
        "/api/images/0/..",
        "/api/images/8",
        "/api/images/999999999",
        "/api/images/99999999999999999999",
        "/api/images/%00",
        "/api/images/0%0a",
        "/api",
        "/static/x",
    ],
)
def test_no_path_leads_elsewhere(lasting, path):
    refused(lasting.ask(path), 404)
    assert refused(lasting.ask("/api/images/0?size=../large"), 400)


def test_methods_that_do_nothing(lasting):
    for method, path in itertools.product(("PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "FOO"), ("/", "/api/search")):
        refused(lasting.ask(path, method), 405)
    refused(lasting.ask("/", "POST", b"x"), 405)
    connect = b"CONNECT evil.example:443 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    assert status_of(lasting.send(connect)) == 404


def png(width, height, data=b""):
    """Return a PNG whose header promises what it likes."""

    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def bad_pictures():
    """Yield a name, a word of the sentence that it gets, and the bytes."""
    honest = zlib.compress(bytes(8000 * 1001), 9)  # 8,000 x 8,000 pixels of a bit each, in 8 kB
    yield "bomb", "more than 50 million pixels", png(8000, 8000, honest)
    yield "wide", "more than 50 million pixels", png(30_000, 5_000)
    yield "largest", "more than 50 million pixels", png(2**31 - 1, 2**31 - 1)
    gif = bytearray(picture_bytes(form="GIF"))
    gif[6:10] = b"\xff\xff\xff\xff"
    yield "large GIF", "more than 50 million pixels", bytes(gif)
    yield "cut header", "no JPEG, PNG, WEBP, GIF or BMP file", b"GIF89a"
    yield "PDF", "no JPEG, PNG, WEBP, GIF or BMP file", b"%PDF-1.4"
    yield (
        "EPS",
        "no JPEG, PNG, WEBP, GIF or BMP file",
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
    )  # Pillow would ask Ghostscript
    yield "SVG", "no JPEG, PNG, WEBP, GIF or BMP file", b"<svg xmlns='http://www.w3.org/2000/svg'/>"
    yield "JSON", "no JPEG, PNG, WEBP, GIF or BMP file", b'{"q": "red"'
    yield "zeros", "no JPEG, PNG, WEBP, GIF or BMP file", b"\x00" * 4096
    whole = picture_bytes(size=(200, 200), form="JPEG")
    yield "half a JPEG", "truncated", whole[: len(whole) // 2]
    yield "thin", "more than 100 times as long as it is wide", png(1, 20_000, zlib.compress(bytes(40_000)))
    yield "no pixels", "broken", png(100, 100, b"no zlib at all")
    comment = b"zTXtComment\x00\x00" + zlib.compress(bytes(1 << 26), 9)  # 64 MiB of it
    chunk = struct.pack(">I", len(comment) - 4) + comment + struct.pack(">I", zlib.crc32(comment))
    sound = picture_bytes()
    at = sound.index(b"IDAT") - 4
    yield "comment bomb", "", sound[:at] + chunk + sound[at:]


@pytest.mark.parametrize(("word", "body"), [pytest.param(*rest, id=name) for name, *rest in bad_pictures()])
def test_bodies_that_are_no_pictures_to_decode(lasting, word, body):
    began = time.perf_counter()
    assert word in refused(lasting.ask("/api/search", "POST", body, JPEG), 400)
    assert lasting.retriever.asked == []
    assert time.perf_counter() - began < 5


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("multipart/form-data; boundary=x", b"--x\r\nContent-Disposition: form-data; name="),
        ("multipart/form-data", b"--"),
        ("application/json", b'{"q": '),
        ("application/x-www-form-urlencoded", b"q=red"),
        ("text/html", b"<p>"),
        ("", b"x"),
    ],
)
def test_types_that_are_no_pictures(lasting, kind, body):
    assert "Content-Type" in refused(lasting.ask("/api/search", "POST", body, {"Content-Type": kind}), 415)


def test_an_empty_body(lasting):
    assert "empty" in refused(lasting.ask("/api/search", "POST", b"", JPEG), 400)


def test_a_long_body_is_refused_before_it_is_read_and_the_sender_hears_why(lasting):
    body = bytes(site.UPLOAD_BYTES + 1)
    assert "16 MiB" in refused(lasting.ask("/api/search", "POST", body, JPEG), 413)
    huge = b"POST /api/search HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\nContent-Length: 99999999999\r\n"
    began = time.perf_counter()
    assert status_of(lasting.send(huge + b"Expect: 100-continue\r\n\r\n", seconds=10)) == 413
    assert time.perf_counter() - began < 2
    assert status_of(lasting.send(huge.replace(b"99999999999", b"9" * 5000) + b"\r\n", seconds=10)) == 400


def test_a_body_of_no_stated_length_is_bounded_too(running, monkeypatch):
    monkeypatch.setattr(site, "UPLOAD_BYTES", 1 << 20)
    chunks = itertools.chain(
        itertools.repeat(b"%x\r\n%s\r\n" % (1 << 16, bytes(1 << 16)), 20),
        [b"0\r\n\r\n"],
    )
    head = b"POST /api/search HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\nTransfer-Encoding: chunked\r\n"
    answer = running.send(head + b"Connection: close\r\n\r\n", more=chunks)
    assert status_of(answer) == 413
    assert running.retriever.asked == []
    assert status_of(running.send(head + b"\r\nnonsense\r\n")) == 400


def test_bodies_that_wait_are_bounded_together(running, monkeypatch):
    monkeypatch.setattr(site, "HELD_BYTES", 1 << 20)
    body = bytes((1 << 19) + 9)
    head = b"POST /api/search HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\nContent-Length: %d\r\n\r\n"
    with socket.create_connection(running.address) as first:
        first.sendall(head % (len(body) + 1) + body)
        wait_until(lambda: running.site.held == len(body))
        refused(running.ask("/api/search", "POST", body, JPEG), 503)
    wait_until(lambda: running.site.held == 0)
    refused(running.ask("/api/search", "POST", body, JPEG), 400)  # it fits now, and is no picture


@pytest.mark.parametrize("share", [0.75, 1], ids=["on its way", "whole, and waits"])
def test_a_body_whose_sender_left_is_held_no_longer(running, share):
    size, uploads = 1 << 20, 20
    head = b"POST /api/search HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\nContent-Length: %d\r\n\r\n"
    running.retriever.gate.clear()
    busy = threading.Thread(target=running.ask, args=("/api/search?q=red",))
    busy.start()  # the others wait behind it
    wait_until(lambda: running.site.searchers.calls == 1)
    gc.disable()  # nothing is left to be found by it
    tracemalloc.start()
    try:
        for _ in range(uploads):
            with socket.create_connection(running.address) as leaver:
                leaver.sendall(head % size + bytes(int(share * size)))
                wait_until(lambda: running.site.held == int(share * size))
            wait_until(lambda: running.site.held == 0)
        assert tracemalloc.get_traced_memory()[0] < 2 * size
    finally:
        tracemalloc.stop()
        gc.enable()
        running.retriever.gate.set()
        busy.join(20)


def test_a_body_that_does_not_come_is_given_up(running, monkeypatch):
    monkeypatch.setattr(site, "BODY_SECONDS", 0.3)
    head = b"POST /api/search HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\nContent-Length: 100\r\n\r\nabc"
    answer = running.send(head)
    assert status_of(answer) == 408
    assert "0.3 seconds" in json.loads(answer.split(b"\r\n\r\n")[1])["error"]


def test_a_full_queue_refuses_and_drops_who_left(tmp_path, monkeypatch):
    monkeypatch.setattr(site, "QUEUE", 3)
    it = Running(FakeRetriever(tmp_path))
    it.retriever.gate.clear()
    answers = []
    threads = [
        threading.Thread(target=lambda word=word: answers.append(it.ask(f"/api/search?q={word}&k=1")))
        for word in ("red", "blue")
    ]
    for number, thread in enumerate(threads, 1):
        thread.start()
        wait_until(lambda number=number: it.site.searchers.calls == number)
    with socket.create_connection(it.address) as leaver:
        leaver.sendall(b"GET /api/search?q=gold HTTP/1.1\r\nHost: localhost\r\n\r\n")
        wait_until(lambda: it.site.searchers.calls == 3)
        busy = it.ask("/api/search?q=green")
        assert "again" in refused(busy, 503)
        assert busy[1]["Retry-After"] == "1"
        assert it.ask("/api/images/1")[0] == 200  # pictures do not wait behind searches
    wait_until(lambda: it.site.searchers.calls == 2)
    it.retriever.gate.set()
    for thread in threads:
        thread.join(20)
    assert [status for status, *_ in answers] == [200, 200]
    assert it.ask("/api/search?q=teal")[0] == 200
    assert it.retriever.asked == ["red", "blue", "teal"]
    it.end()


def test_what_is_sent_is_never_written(running):
    opened = []
    recording = [True]

    def record(event, arguments):
        if recording[0] and event == "open" and set(str(arguments[1])) & set("wax+"):
            opened.append(arguments)

    sys.addaudithook(record)  # cannot be taken back, only made silent
    body = picture_bytes("red", size=(1500, 1500), form="BMP")
    status = running.ask("/api/search", "POST", body, {"Content-Type": "image/bmp"})[0]
    running.ask("/api/images/0")
    recording[0] = False
    assert len(body) > 1 << 22
    assert (status, opened) == (200, [])


def test_a_failure_inside_tells_clients_nothing_of_it(running, monkeypatch, capfd):
    def fail(*_):
        raise EncoderError("/home/somebody/weights.pth is damaged")

    monkeypatch.setattr(running.retriever, "encode_query", fail)
    assert "somebody" not in refused(running.ask("/api/search?q=red"), 500)
    assert "/home/somebody/weights.pth is damaged" in capfd.readouterr().err


def test_a_query_that_makes_no_sense_gets_the_retrievers_sentence(running, monkeypatch):
    def fail(*_):
        raise QueryError("the query has no word that the run knows; use others")

    monkeypatch.setattr(running.retriever, "encode_query", fail)
    assert refused(running.ask("/api/search?q=red"), 400) == "The query has no word that the run knows; use others."
