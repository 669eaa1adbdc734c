"""The server: what a client finds is what the retriever finds, with the pictures; no other file is given away."""

import io
import json
import os
import signal
import socket
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from packed_data import PackedData
from PIL import Image
from small_runs import make_pictures, make_run, make_store

from xret.heads.retrieval.retriever import Retriever

httpx = pytest.importorskip("httpx")
pytest.importorskip("gradio", reason="Gradio is not here: pip install 'xret[serve]'")
pytestmark = pytest.mark.usefixtures("one_thread")


def start(run, *options, **more):
    words = [sys.executable, "-m", "xret.cli", "serve", str(run), "--device", "cpu", *map(str, options)]
    return subprocess.Popen(words, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **more)


@pytest.fixture(scope="module", params=["files", "tars", "parquet", "images"])
def served(request, tmp_path_factory):
    """Serve a run on a kind of data set, or on a folder of pictures (``images``)."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param in ("files", "images"):
        data, manifest = folder / "pictures", make_pictures(folder / "pictures")
    else:
        packed = PackedData(folder / "data")
        data, manifest = packed.folder, getattr(packed, f"as_{request.param}")()
    run = make_run(make_store(manifest, folder / "s.zarr"), folder / "run", "setdiv")
    name, place = ("images", data / "images") if request.param == "images" else ("data_root", data)
    retriever = Retriever(run, device="cpu", **{name: place})
    (folder / "tmp").mkdir()
    options = (f"--{name.replace('_', '-')}", place)
    with start(run, *options, env={**os.environ, "TMPDIR": str(folder / "tmp")}) as server:
        line = server.stdout.readline()
        assert line.startswith(f"{run} is served at http://127.0.0.1:"), server.stderr.read()
        yield SimpleNamespace(address=line.split()[-1].rstrip("/"), retriever=retriever, folder=folder)
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0
    assert not list((folder / "tmp").iterdir())  # nothing is left of what clients sent


def ask(address, name, *data):
    """Call an endpoint; return its gallery and hits, or the sentence that it fails with."""
    call = f"{address}/gradio_api/call/{name}"
    event = httpx.post(call, json={"data": data}).json()["event_id"]
    kind, values = httpx.get(f"{call}/{event}", timeout=60).text.strip().splitlines()[-2:]
    values = json.loads(values.removeprefix("data: "))
    return values if kind == "event: complete" else values["error"]


def upload(address, content):
    (path,) = httpx.post(f"{address}/gradio_api/upload", files={"files": ("q.png", content)}).json()
    return {"path": path, "meta": {"_type": "gradio.FileData"}}


def test_answers_are_those_of_the_retriever_with_their_pictures(served):
    searched = served.retriever.searched
    text, picture = "red dog", searched.picture(0)
    for name, sent, query in (
        ("search_text", text, text),
        ("search_picture", upload(served.address, picture.getvalue()), picture),
    ):
        shown, hits = ask(served.address, name, sent, 3)
        expected = served.retriever.search(served.retriever.encode_query(query), 3)
        assert [hit["id"] for hit in hits] == [hit.id for hit in expected]
        assert [hit["score"] for hit in hits] == pytest.approx([hit.score for hit in expected], abs=1e-5)
        assert [one["caption"] for one in shown] == [f"{h.score:.3f}  {h.caption or h.file_name}" for h in expected]
        for one, hit in zip(shown, expected, strict=True):
            if hit.caption is None:
                row = searched.names("images")[0].index(hit.id)
            else:
                row = searched.caption_image[searched.caption_ids.index(hit.id)]
            content = httpx.get(one["image"]["url"]).content
            assert_alike(Image.open(io.BytesIO(content)), Image.open(searched.picture(row)))


def assert_alike(one, other):
    assert one.size == other.size
    small = [np.asarray(image.convert("RGB").resize((2, 1)), dtype=float) for image in (one, other)]
    np.testing.assert_allclose(*small, atol=16)


@pytest.mark.parametrize("served", ["files"], indirect=True)
def test_mistakes_are_told_and_nothing_else_is_given_away(served):
    address, folder = served.address, served.folder
    url = {"path": "http://127.0.0.1:1/x.png", "meta": {"_type": "gradio.FileData"}}
    stolen = {"path": str(folder / "run/run.json"), "meta": {"_type": "gradio.FileData"}}
    for name, sent, sentence in (
        ("search_text", " ", "the query is empty"),
        ("search_text", "zeppelin", "no word of the query is in the vocabulary"),
        ("search_picture", url, "send the picture itself and not its address"),
        ("search_picture", stolen, "was not uploaded by a user"),
    ):
        assert sentence in ask(address, name, sent, 3)
    for path in ("/etc/passwd", folder / "run/run.json", folder / "pictures/images/0.png", "http://127.0.0.1:1/"):
        assert httpx.get(f"{address}/gradio_api/file={path}").status_code in (403, 404), path
    config = httpx.get(f"{address}/config").json()
    assert config["analytics_enabled"] is False
    assert str(folder) not in json.dumps(config).replace(str(folder / "tmp"), "")


@pytest.mark.parametrize("served", ["files"], indirect=True)
def test_pictures_that_are_missing_leave_the_answers_and_a_port_that_is_taken_is_said(served):
    run = served.retriever.run.path
    with socket.create_server(("127.0.0.1", 0)) as taken, start(run, "--port", taken.getsockname()[1]) as server:
        _, said = server.communicate(timeout=120)
    assert server.returncode == 1
    assert "no pictures will be shown: " in said
    assert said.splitlines()[-1].startswith("Error: the server cannot listen at 127.0.0.1, port ")
