"""`xret serve` as a user starts it: a process with a real run, what it prints, and how it ends."""

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
from contextlib import closing, contextmanager
from urllib.parse import quote

import pytest
import torch
from click.testing import CliRunner
from small_runs import make_pictures, make_run, make_store

from xret.cli import main
from xret.cli.serve import is_loopback
from xret.heads.retrieval.retriever import Retriever


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors this small are slower on several threads
    folder = tmp_path_factory.mktemp("serve")
    store = make_store(make_pictures(folder / "pictures"), folder / "s.zarr")
    make_run(store, folder / "run", "setdiv", "aggregator.image.head_dim=16", "aggregator.text.head_dim=16")
    yield folder
    torch.set_num_threads(threads)


def refused(*words):
    result = CliRunner().invoke(main, ["serve", *map(str, words)])
    assert (result.exit_code, result.stdout) == (1, ""), result.output
    assert "Traceback" not in result.stderr
    return result.stderr.strip().splitlines()[-1].removeprefix("Error: ")


@contextmanager
def started(*words):
    command = [sys.executable, "-m", "xret.cli", "serve", *map(str, words), "--port", "0", "--device", "cpu"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_server_from_its_start_to_its_end(folder):
    root = folder / "pictures" / "images"
    with started(folder / "run", "--data-root", root) as process:
        line = process.stdout.readline()
        found = re.fullmatch(rf"{folder}/run is served at http://127\.0\.0\.1:(\d+)/\n", line)
        assert found, process.communicate(timeout=20)

        def ask(*request, **options):
            with closing(http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=30)) as connection:
                connection.request(*request, **options)
                answer = connection.getresponse()
                return answer.status, answer.read()

        retriever = Retriever(folder / "run", data_root=root, device="cpu")
        expected = [hit.to_dict() for hit in retriever.search("red beside blue", 4)]
        answer = json.loads(ask("GET", f"/api/search?q={quote('red beside blue')}&k=4")[1])
        assert [hit["id"] for hit in answer["results"]] == [hit["id"] for hit in expected]
        assert [hit["score"] for hit in answer["results"]] == pytest.approx(
            [hit["score"] for hit in expected], abs=1e-5
        )
        picture = root / retriever.gallery.file_names[2]
        expected = [hit.to_dict() for hit in retriever.search(picture, 3)]
        headers = {"Content-Type": "image/png"}
        answer = json.loads(ask("POST", "/api/search?k=3&elements=1", picture.read_bytes(), headers=headers)[1])
        assert [hit["caption"] for hit in answer["results"]] == [hit["caption"] for hit in expected]
        assert len(answer["elements"]) == 4
        status, content = ask("GET", "/api/images/2")
        assert (status, content[:3]) == (200, b"\xff\xd8\xff")
        assert b"/page.js" in ask("GET", "/")[1]
        assert folder.name.encode() not in ask("GET", "/api/about")[1]  # no path of this machine

        taken = refused(folder / "run", "--port", found[1])
        assert f"cannot listen at 127.0.0.1, port {found[1]} (address already in use)" in taken
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=30)
        assert (process.returncode, out, err) == (0, "", "loading gallery and encoders …\n")


def test_ctrl_c_ends_it_soundly(folder):
    with started(folder / "run") as process:
        assert "is served at" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (0, "")
    assert err.startswith("loading gallery and encoders …\n")
    assert "Traceback" not in err


def test_mistakes(folder, tmp_path):
    run = folder / "run"
    assert "is no run" in refused(tmp_path / "none")
    for host in ("no.such.host.invalid", "192.0.2.1", "x" * 99):
        assert f"the server cannot listen at {host}, port 0 (" in refused(run, "--host", host, "--port", "0")
    assert "tests" in refused(run, "--split", "tests", "--port", "0")
    result = CliRunner().invoke(main, ["serve", str(run), "--port", "70000"])
    assert result.exit_code == 2


@pytest.mark.parametrize("missing", ["starlette", "uvicorn"])
def test_without_the_extra_it_is_named(folder, monkeypatch, missing):
    for name in list(sys.modules):
        if name.startswith(("xret.heads.retrieval.serving", f"{missing}.")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    sentence = refused(folder / "run")
    assert sentence.startswith(f"the server needs Starlette and uvicorn ({missing}")
    assert sentence.endswith(" is not installed): pip install 'xret[serve]'")


def test_whoever_opens_it_to_others_is_told(folder):
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        result = CliRunner().invoke(
            main, ["serve", str(folder / "run"), "--host", "0.0.0.0", "--port", str(taken.getsockname()[1])]
        )
    assert result.exit_code == 1
    assert "anyone who reaches 0.0.0.0 can search" in result.stderr


def test_loopback():
    assert [is_loopback(host) for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost")] == [True] * 4
    assert [is_loopback(host) for host in ("0.0.0.0", "::", "192.168.0.1", "box.lan")] == [False] * 4
