"""`xret serve` in a thread: its answers are the retriever's, and whatever comes in, it lives."""

import contextlib
import gc
import io
import itertools
import json
import logging
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
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from small_server import COLOURS, FakeRetriever, Running, picture_bytes

from xret.heads.modules.similarity import SIMILARITIES
from xret.heads.retrieval.serving import server, site
from xret.heads.retrieval.serving.guard import is_own, own_names
from xret.heads.retrieval.serving.service import FORMATS, KEPT, MOST_PIXELS, Service
from xret.pipeline.data.images import open_image
from xret.pipeline.errors import EncoderError, QueryError, RunError, SampleError

JPEG = {"Content-Type": "image/jpeg"}


@pytest.fixture
def running(tmp_path):
    """Start a server; whatever a test did to it, it still answers at the end."""
    it = Running(FakeRetriever(tmp_path))
    yield it
    it.retriever.gate.set()
    try:
        if not it.server.should_exit:
            require_alive(it)
    finally:
        it.end()


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    it = Running(FakeRetriever(tmp_path_factory.mktemp("lasting")))
    yield it
    it.end()


@pytest.fixture
def lasting(started, caplog):
    """Return a server that all hostile requests are sent to: it still answers after each, and none fills its log."""
    started.retriever.asked.clear()
    yield started
    require_alive(started)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


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


# ------------------------------------------------------------------------------------------------------------ answers


def test_an_index_of_more_than_the_gallery_is_refused_before_the_first_query(tmp_path):
    retriever = FakeRetriever(tmp_path)
    retriever.searched = lambda answers: 99
    with pytest.raises(RunError, match=r"the index has 99 images, which are not the 8 of split test: .* alone"):
        Service(retriever)


def test_an_index_of_as_many_others_is_refused_too(tmp_path):
    retriever = FakeRetriever(tmp_path)
    retriever.searches_others = lambda answers: answers == "captions"
    with pytest.raises(
        RunError, match=r"the index has 16 captions, which are not the 16 of split test: .* of one store"
    ):
        Service(retriever)


def test_the_page_is_told_what_a_score_is(running):
    about = running.ask("/api/about")[2]
    assert about["score"] == SIMILARITIES["smooth-chamfer"].score
    assert b'id="meaning"' in running.ask("/")[2]
    assert b"`A score is ${scores}; larger is closer" in running.ask("/page.js")[2]


def test_a_text_finds_the_retrievers_images(running):
    status, headers, answer = running.ask("/api/search?q=a+blue+thing&k=3")
    assert status == 200
    assert headers["Cache-Control"] == "no-store"
    assert [hit["file_name"] for hit in answer["results"]] == ["blue.png", "orange.png", "purple.png"]
    assert answer["results"][0] == {
        "rank": 1,
        "id": "i2",
        "score": 1.0,
        "file_name": "blue.png",
        "row": 2,
        "captions": ["all blue", "nothing but blue <b>& more</b>"],
    }
    assert set(answer) == {"results", "seconds"}
    assert running.retriever.asked == ["a blue thing"]


@pytest.mark.parametrize(("form", "kind"), [("PNG", "image/png"), ("JPEG", "image/jpeg"), ("GIF", "image/gif")])
def test_a_picture_finds_the_retrievers_captions(running, form, kind):
    body = picture_bytes("teal", form=form)
    status, _, answer = running.ask("/api/search?k=2", "POST", body, {"Content-Type": kind})
    assert status == 200
    assert [hit["caption"] for hit in answer["results"]] == ["all teal", "nothing but teal <b>& more</b>"]
    assert [hit["row"] for hit in answer["results"]] == [5, 5]


def test_elements_are_answered_one_by_one(running):
    answer = running.ask("/api/search?q=green&k=2&elements=1")[2]
    names = [[hit["file_name"] for hit in hits] for hits in answer["elements"]]
    assert names == [["green.png", "blue.png"], ["blue.png", "orange.png"], ["orange.png", "purple.png"]]
    picture = running.ask("/api/search?k=1&elements=1", "POST", picture_bytes("green"), JPEG)[2]
    assert [hits[0]["caption"] for hits in picture["elements"]] == ["all green", "all blue", "all orange"]


def test_words_that_the_run_does_not_know_are_told(running):
    assert running.ask("/api/search?q=a+gold+zeppelin")[2]["unknown"] == ["zeppelin"]
    assert "unknown" not in running.ask("/api/search?q=a+gold+thing")[2]
    assert "unknown" not in running.ask("/api/search", "POST", picture_bytes(), JPEG)[2]


def test_examples_have_only_words_that_the_run_knows(tmp_path):
    retriever = FakeRetriever(tmp_path)
    retriever.gallery.texts[:2] = ["a red zeppelin", " "]
    retriever.gallery.texts[4] = "blue " * 30
    assert Service(retriever).about.examples == [retriever.gallery.texts[row] for row in (2, 7, 11, 15)]


def test_a_run_without_sets_has_no_elements(tmp_path):
    it = Running(FakeRetriever(tmp_path, kind="vector"))
    assert it.ask("/api/about")[2]["elements"] == 0
    assert "not sets" in refused(it.ask("/api/search?q=red&elements=1"), 400)
    it.end()


def test_gaussians_say_how_uncertain_they_are(tmp_path):
    it = Running(FakeRetriever(tmp_path, kind="gaussian"))
    answer = it.ask("/api/search?q=red&k=2")[2]
    assert answer["uncertainty"] == pytest.approx(-4)
    assert [hit["uncertainty"] for hit in answer["results"]] == [0.25, 0.25]
    it.end()


def test_pictures_come_by_row_small_and_without_their_files_secrets(running, tmp_path):
    exif = Image.Exif()
    exif[0x010E] = "a secret"
    Image.new("RGB", (3000, 1500), "red").save(tmp_path / "images" / "red.png", exif=exif)
    for size, expected in (("small", (400, 200)), ("large", (1200, 600))):
        status, headers, content = running.ask(f"/api/images/0?size={size}")
        assert (status, headers["Content-Type"]) == (200, "image/jpeg")
        image = Image.open(io.BytesIO(content))
        assert (image.size, image.format) == (expected, "JPEG")
        assert b"secret" not in content
    assert running.ask("/api/images/0?size=large", headers={"If-None-Match": headers["ETag"]})[0] == 304
    (tmp_path / "images" / "green.png").unlink()
    refused(running.ask("/api/images/1"), 404)


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


# ---------------------------------------------------------------------------------------------------- hostile requests


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


def test_long_heads(lasting):
    assert "16384" in refused(lasting.ask("/api/search?q=" + "a" * 20_000), 414)
    assert "16384" in refused(lasting.ask("/", headers={"X-Long": "a" * 20_000}), 431)
    endless = lasting.send(b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * (1 << 20))
    assert status_of(endless) in (400, None)  # None: the client still wrote when the connection was closed


@pytest.mark.parametrize(
    "data",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/9.9\r\nHost: localhost\r\n\r\n",
        b"GET /\r\n\r\n",
        b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",  # as TLS begins
        b"POST /api/search HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\nContent-Length: -5\r\n\r\n",
        b"POST /api/search HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\nContent-Length: 1, 2\r\n\r\n",
        b"POST /api/search HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\nContent-Length: 3\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n",
    ],
)
def test_what_is_no_http(lasting, data):
    assert status_of(lasting.send(data)) == 400


def test_raw_bytes_in_an_address(lasting):
    answer = lasting.send(b"GET /api/search?q=\xff\xfe HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    assert status_of(answer) == 400


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil", "x"])
def test_a_foreign_name_is_not_served(lasting, host):
    assert "address" in refused(lasting.ask("/api/search?q=red", headers={"Host": host}), 421)
    refused(lasting.ask("/", headers={"Host": host}), 421)


def test_own_names_and_addresses_are_served(lasting):
    port = lasting.address[1]
    for host in ("127.0.0.1", f"127.0.0.1:{port}", "localhost", f"LocalHost:{port}", "[::1]:80", "192.168.1.7"):
        assert lasting.ask("/", headers={"Host": host})[0] == 200, host
    assert is_own("box.lan", own_names("Box.LAN"))
    assert is_own(socket.gethostname(), own_names("0.0.0.0"))
    assert not is_own("0.0.0.0.evil.example", own_names("0.0.0.0"))


def test_pages_of_other_sites_may_only_link_here(lasting):
    foreign = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}
    refused(lasting.ask("/api/search?q=red", headers=foreign), 403)
    refused(lasting.ask("/api/images/0", headers=foreign), 403)
    assert lasting.ask("/", headers={**foreign, "Sec-Fetch-Mode": "navigate"})[0] == 200
    assert lasting.ask("/api/search?q=red", headers={"Sec-Fetch-Site": "same-origin"})[0] == 200


# ------------------------------------------------------------------------------------------------------- slow and many


def test_a_body_that_does_not_come_is_given_up(running, monkeypatch):
    monkeypatch.setattr(site, "BODY_SECONDS", 0.3)
    head = b"POST /api/search HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\nContent-Length: 100\r\n\r\nabc"
    answer = running.send(head)
    assert status_of(answer) == 408
    assert "0.3 seconds" in json.loads(answer.split(b"\r\n\r\n")[1])["error"]


def test_a_head_that_does_not_come_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(server, "IDLE_SECONDS", 0.3)
    it = Running(FakeRetriever(tmp_path))
    began = time.perf_counter()
    assert it.send(b"GET / HTTP/1.1\r\nHost: loc") == b""
    assert time.perf_counter() - began < 5
    it.end()


@pytest.mark.parametrize("requests", [1, 3], ids=["one", "several at once"])
def test_a_client_that_takes_no_answer_is_left(tmp_path, monkeypatch, requests):
    monkeypatch.setattr(server, "IDLE_SECONDS", 0.3)
    it = Running(FakeRetriever(tmp_path))
    it.site.service.picture = lambda row, size: bytes(32 << 20)  # more than the kernel's buffers hold
    with socket.create_connection(it.address) as lazy:
        lazy.sendall(requests * b"GET /api/images/0 HTTP/1.1\r\nHost: localhost\r\n\r\n")
        wait_until(lambda: it.connections)
        wait_until(lambda: not it.connections and not it.requests)
    it.end()


def test_an_answer_that_takes_long_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(server, "IDLE_SECONDS", 0.2)
    it = Running(FakeRetriever(tmp_path))
    it.retriever.gate.clear()
    threading.Timer(1.0, it.retriever.gate.set).start()
    assert it.ask("/api/search?q=red")[0] == 200
    it.end()


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


def test_connections_are_bounded(running, monkeypatch):
    monkeypatch.setattr(server, "CONNECTIONS", 3)
    with contextlib.ExitStack() as idle:
        for _ in range(3):
            idle.enter_context(socket.create_connection(running.address))
        wait_until(lambda: len(running.connections) == 3)
        assert status_of(running.send(b"")) == 503
    wait_until(lambda: not running.connections)


def test_many_at_once_get_their_own_answers(running):
    answers = {}

    def ask(number):
        name = COLOURS[number % len(COLOURS)]
        answers[number] = running.ask(f"/api/search?q={name}&k=1")[2]["results"][0]["file_name"] == f"{name}.png"

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert answers == dict.fromkeys(range(40), True)


def test_the_end_waits_for_answers_under_way(running):
    running.retriever.gate.clear()
    answers = []
    thread = threading.Thread(target=lambda: answers.append(running.ask("/api/search?q=gold&k=1")))
    thread.start()
    wait_until(lambda: running.site.searchers.calls == 1)
    with socket.create_connection(running.address) as idle:  # is not waited for
        wait_until(lambda: len(running.connections) == 2)
        running.stop()
        assert idle.recv(1) == b""
        with pytest.raises(ConnectionError):
            running.ask("/")
        assert running.running
        running.retriever.gate.set()
        wait_until(lambda: not running.running)
    thread.join(20)
    ((status, _, answer),) = answers
    assert status == 200
    assert answer["results"][0]["file_name"] == "gold.png"


# ------------------------------------------------------------------------------------------------------------- its own


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


def test_one_missing_encoder_leaves_the_other(tmp_path):
    retriever = FakeRetriever(tmp_path)
    encode = retriever.encode_query

    def only_text(query):
        if not isinstance(query, str):
            raise EncoderError("the weights are not named; give --visual-weights")
        return encode(query)

    retriever.encode_query = only_text
    it = Running(retriever)
    about = it.ask("/api/about")[2]
    assert (about["text"], about["image"]) == (True, False)
    assert it.ask("/api/search?q=red")[0] == 200
    assert "by image" in refused(it.ask("/api/search", "POST", picture_bytes(), JPEG), 422)
    it.end()


def test_a_picture_that_is_sent_is_read_as_the_cache_reads_files(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # turn it by 90 degrees
    (tmp_path / "turned.jpg").write_bytes(content := picture_bytes(size=(64, 48), form="JPEG", exif=exif))
    image = open_image(content, formats=FORMATS, most_pixels=MOST_PIXELS)
    assert (image.size, image.mode) == ((64, 48), "RGB")
    assert image.tobytes() == open_image(tmp_path / "turned.jpg").tobytes()
    assert MOST_PIXELS < 2 * Image.MAX_IMAGE_PIXELS  # Pillow's own limit is the second line


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(["PNG", "JPEG", "GIF", "BMP", "WEBP"]), st.data())
def test_a_damaged_picture_is_a_picture_or_refused(form, data):
    content = bytearray(picture_bytes(size=(24, 16), form=form))
    for _ in range(data.draw(st.integers(1, 6))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    try:
        cut = content[: data.draw(st.integers(len(content) // 2, len(content)))]
        image = open_image(cut, formats=FORMATS, most_pixels=MOST_PIXELS)
    except SampleError:
        return
    assert image.mode == "RGB"
    assert image.width * image.height <= MOST_PIXELS


def test_the_pictures_that_are_kept_are_bounded(tmp_path):
    service = Service(FakeRetriever(tmp_path))
    first = service.picture(0, "small")
    assert service.picture(0, "small") is first
    for size in range(2 * KEPT):
        service.picture.cache_clear() if size == 0 else None
        service.picture(size % len(COLOURS), "small")
    assert service.picture.cache_info().maxsize == KEPT
