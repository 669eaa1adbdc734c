"""The life of the server of `xret serve`: slow clients, many at once, and the end."""

import contextlib
import socket
import threading
import time

import pytest
from small_server import COLOURS, FakeRetriever, Running, status_of, wait_until

from xret.heads.retrieval.serving import server


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
