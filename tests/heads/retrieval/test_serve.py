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
from click.testing import CliRunner
from packed_data import PackedData
from PIL import Image
from small_runs import make_pictures, make_run, make_store

from xret.cli import main
from xret.heads.retrieval.indexing import index_run
from xret.heads.retrieval.retriever import Retriever
from xret.pipeline.data.images import PictureFile

http = pytest.importorskip("httpx").Client(timeout=120, headers={"Connection": "close"})
pytest.importorskip("gradio", reason="Gradio is not here: pip install 'xret[serve]'")
EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 40 40\n%%EndComments\n0 0 40 40 rectfill\nshowpage\n%%EOF\n"
on_files = pytest.mark.parametrize("served", ["files"], indirect=True)


def start(run, *options, **more):
    words = [sys.executable, "-m", "xret.cli", "serve", str(run), "--device", "cpu", *map(str, options)]
    return subprocess.Popen(words, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **more)


@pytest.fixture(scope="module", params=["files", "tars", "images"])
def served(request, tmp_path_factory):
    """Serve a run on a kind of data set, or on a folder of pictures (``images``)."""
    folder = tmp_path_factory.mktemp(request.param)
    data = folder / "pictures"
    manifest = PackedData(data).as_tars() if request.param == "tars" else make_pictures(data)
    run = make_run(make_store(manifest, folder / "s.zarr"), folder / "run", "setdiv")
    name, place = ("images", data / "images") if request.param == "images" else ("data_root", data)
    retriever = Retriever(run, device="cpu", **{name: place})
    (folder / "tmp").mkdir()
    options = (f"--{name.replace('_', '-')}", place)
    proxies = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), "http://127.0.0.1:1")  # nobody answers there
    with start(run, *options, env={**os.environ, **proxies, "TMPDIR": str(folder / "tmp")}) as server:
        line = server.stdout.readline()
        assert line.startswith(f"{run} is served at http://127.0.0.1:"), server.stderr.read()
        yield SimpleNamespace(address=line.split()[-1].rstrip("/"), retriever=retriever, folder=folder)
        server.send_signal(signal.SIGTERM)
        assert server.wait(120) == 0
    assert not list((folder / "tmp").iterdir())  # nothing is left of what clients sent


def test_an_index_of_something_else_is_refused_before_anybody_asks(made, tmp_path):
    pytest.importorskip("faiss", reason="FAISS is not here: pip install 'xret[index]'")
    index_run(Retriever(made.run(), device="cpu"), tmp_path / "index")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        words = ("--index", tmp_path / "index", "--split", "val", "--port", taken.getsockname()[1])
        with start(made.run(), *words) as server:
            _, said = server.communicate(timeout=120)
    assert (server.returncode, "is an index of all pictures; leave --split out" in said) == (1, True)


def ask(address, name, *data):
    """Call an endpoint; return its gallery and hits, or the sentence that it fails with."""
    call = f"{address}/gradio_api/call/{name}"
    data = (*data, "", "")[:4] if name == "search_text" else data
    event = http.post(call, json={"data": data}).json()["event_id"]
    kind, values = http.get(f"{call}/{event}").text.strip().splitlines()[-2:]
    values = json.loads(values.removeprefix("data: "))
    return values if kind == "event: complete" else values["error"]


def test_answers_are_those_of_the_retriever_with_their_pictures(served):
    searched = served.retriever.searched
    picture, deep = searched.picture(0), io.BytesIO()
    Image.fromarray(np.asarray(Image.open(picture).convert("L")).astype(np.uint16) * 257).save(deep, "PNG")
    asked = [("search_text", "red dog", "red dog")]
    for query in (picture, PictureFile(deep.getvalue(), "deep.png")):
        (path,) = http.post(f"{served.address}/gradio_api/upload", files={"files": ("q.png", query.getvalue())}).json()
        asked.append(("search_picture", {"path": path, "meta": {"_type": "gradio.FileData"}}, query))
    for name, sent, query in asked:
        shown, hits = ask(served.address, name, sent, 3)
        expected = served.retriever.search(query, 3)
        assert [hit["id"] for hit in hits] == [hit.id for hit in expected]
        assert [hit["score"] for hit in hits] == pytest.approx([hit.score for hit in expected], abs=1e-5)
        for one, hit in zip(shown, expected, strict=True):
            label = hit.caption or hit.file_name
            if hit.caption is None:
                row = searched.names("images")[0].index(hit.id)
                if served.folder.name.startswith(("files", "tars")):
                    label = searched.texts[searched.caption_image.tolist().index(row)]
            else:
                row = searched.caption_image[searched.caption_ids.index(hit.id)]
            known = hit.probability is not None
            assert one["caption"] == f"{format(hit.probability, '.0%') if known else format(hit.score, '.3f')}  {label}"
            content = io.BytesIO(http.get(one["image"]["url"]).content)
            pair = [Image.open(file).convert("RGB") for file in (content, searched.picture(row))]
            assert pair[0].size == pair[1].size
            np.testing.assert_allclose(*(np.asarray(image.resize((2, 1)), dtype=float) for image in pair), atol=16)


@on_files
def test_images_like_one_text_and_unlike_another(served):
    others = {"like": ["a blue side and a grey side"], "unlike": ["green beside red"]}
    _, hits = ask(served.address, "search_text", "red beside blue", 5, *others["like"], *others["unlike"])
    expected = served.retriever.search("red beside blue", 5, **others)
    assert [(hit["id"], hit["score"]) for hit in hits] == [(h.id, pytest.approx(h.score, abs=1e-4)) for h in expected]


@on_files
def test_mistakes_are_told_and_nothing_else_is_given_away(served):
    address, folder = served.address, served.folder
    url = {"path": "http://127.0.0.1:1/x.png", "meta": {"_type": "gradio.FileData"}}
    stolen = {"path": str(folder / "pictures/images/0.png"), "meta": {"_type": "gradio.FileData"}}
    (eps,) = http.post(f"{address}/gradio_api/upload", files={"files": ("e.png", EPS)}).json()
    itself = "send the picture itself and not its address"
    for name, sent, sentence in (
        ("search_text", " ", "the query is empty"),
        ("search_text", "zeppelin", "no word of the query is in the vocabulary"),
        *(("search_picture", one, itself) for one in (url, {"path": stolen["path"]}, {"path": None})),
        ("search_text", url, itself),
        *((name, stolen, "was not uploaded by a user") for name in ("search_text", "search_picture")),
        ("search_picture", {**stolen, "path": eps}, "e.png: this is no JPEG, "),
    ):
        assert sentence in ask(address, name, sent, 3)
    assert not list((folder / "tmp").rglob("0.png"))  # what was only named is not copied either
    for path in ("/etc/passwd", folder / "run/run.json", folder / "pictures/images/0.png", "http://127.0.0.1:1/"):
        assert http.get(f"{address}/gradio_api/file={path}").status_code in (403, 404), path
    config = http.get(f"{address}/config").json()
    assert config["analytics_enabled"] is False
    assert str(folder) not in json.dumps(config).replace(str(folder / "tmp"), "")


@pytest.mark.browser
@on_files
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_has_captions_in_a_list_and_tells_unknown_words(served, chromium, width):
    page = chromium.new_page(viewport={"width": width, "height": 800})
    page.goto(served.address)
    page.get_by_role("button", name=" side").first.click()  # an example, which is one of the captions
    page.locator(".thumbnail-item, .thumbnail-lg").first.wait_for()
    assert page.get_by_label("Describe a picture").input_value() in served.retriever.gallery.texts
    page.get_by_label("Describe a picture").fill("a red zeppelin")
    page.keyboard.press("Enter")
    page.get_by_text("Not in the vocabulary, and left out: zeppelin").wait_for()
    assert page.locator(".thumbnail-item, .thumbnail-lg").count() > 0
    name = served.retriever.gallery.file_names[2]
    page.set_input_files("input[type=file]", served.folder / "pictures/images" / name)
    page.get_by_role("listitem").last.wait_for()
    expected = [hit.caption for hit in served.retriever.search(served.folder / "pictures/images" / name)]
    items = page.get_by_role("listitem").all()
    assert [item.inner_text().rsplit(" ", 1)[0] for item in items] == expected
    boxes = [item.bounding_box() for item in items]
    assert all(box["x"] >= 0 and box["x"] + box["width"] <= width for box in boxes)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert not page.get_by_text("Not in the vocabulary").is_visible()
    page.close()


@on_files
def test_pictures_that_are_missing_leave_the_answers_and_a_port_that_is_taken_is_said(served):
    run = served.retriever.run.path
    with socket.create_server(("127.0.0.1", 0)) as taken, start(run, "--port", taken.getsockname()[1]) as server:
        _, said = server.communicate(timeout=120)
    assert server.returncode == 1
    assert "no pictures will be shown: " in said
    assert said.splitlines()[-1].startswith("Error: the server cannot listen at 127.0.0.1, port ")


def test_without_the_extra_it_is_named(monkeypatch, tmp_path):
    handler = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.delitem(sys.modules, "xret.heads.retrieval.serve", raising=False)
    monkeypatch.setitem(sys.modules, "gradio", None)
    (tmp_path / "run.json").touch()
    result = CliRunner().invoke(main, ["serve", str(tmp_path)])
    signal.signal(signal.SIGTERM, handler)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.endswith("which is not installed: pip install 'xret[serve]'\n")
