"""The heads of requests that `xret serve` refuses, before a body is read."""

import socket

import pytest
from small_server import refused, status_of

from xret.heads.retrieval.serving.guard import is_own, own_names


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
