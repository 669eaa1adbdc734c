"""The server: what a client finds is what the retriever finds, with the pictures; no other file is given away."""

import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from base64 import b64encode
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace

import numpy as np
import pytest
from command_line import refused
from foreign import needed, node
from packed_data import PackedData
from PIL import Image
from small_runs import make_pictures, make_run, make_store

from xret.heads.retrieval.indexing import index_run
from xret.heads.retrieval.onnx import export_onnx
from xret.heads.retrieval.retriever import Retriever
from xret.pipeline.data.images import PictureFile

httpx = pytest.importorskip("httpx")
if not find_spec("gradio"):  # which takes seconds to import
    pytest.skip("Gradio is not here: pip install 'xret[serve]'", allow_module_level=True)
http = httpx.Client(timeout=120, headers={"Connection": "close"})  # which a server or proxy need not heed


@pytest.fixture(scope="module", autouse=True)
def connections_are_closed():
    yield
    http.close()


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 40 40\n%%EndComments\n0 0 40 40 rectfill\nshowpage\n%%EOF\n"


def start(run, *options, **more):
    words = [sys.executable, "-m", "xret.cli", "serve", str(run), "--device", "cpu", *map(str, options)]
    return subprocess.Popen(words, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **more)


def run_on(kind, folder):
    """Return a retriever of a run on ``files`` or ``tars``, or on a folder of pictures (``images``)."""
    data = folder / "pictures"
    manifest = PackedData(data).as_tars() if kind == "tars" else make_pictures(data)
    run = make_run(make_store(manifest, folder / "s.zarr"), folder / "run", "setdiv")
    return Retriever(run, device="cpu", **({"images": data / "images"} if kind == "images" else {"data_root": data}))


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    retriever = run_on("files", folder)
    (folder / "tmp").mkdir()
    proxies = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), "http://127.0.0.1:1")  # nobody answers there
    environment = {**os.environ, **proxies, "TMPDIR": str(folder / "tmp")}
    with start(folder / "run", "--data-root", folder / "pictures", env=environment) as server:
        line = server.stdout.readline()
        assert line.startswith(f"{folder / 'run'} is served at http://127.0.0.1:"), server.stderr.read()
        yield SimpleNamespace(address=line.split()[-1].rstrip("/"), retriever=retriever, folder=folder)
        server.send_signal(signal.SIGTERM)
        assert server.wait(120) == 0
    assert not list((folder / "tmp").iterdir())  # nothing is left of what clients sent


@pytest.fixture
def refused_here(monkeypatch):
    """Ask for a server in this process, whose state stays as it is; give what it says as it refuses to begin."""
    handler = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield lambda *words: refused("serve", *words, "--device", "cpu", "--port", taken.getsockname()[1])
    signal.signal(signal.SIGTERM, handler)


def test_an_index_of_something_else_is_refused_before_anybody_asks(made, tmp_path, refused_here):
    pytest.importorskip("faiss", reason="FAISS is not here: pip install 'xret[index]'")
    index_run(Retriever(made.run(), device="cpu"), tmp_path / "index")
    said = refused_here(made.run(), "--index", tmp_path / "index", "--split", "val")
    assert "is an index of all pictures; leave --split out" in said


def ask(address, name, *data):
    """Call an endpoint; return its gallery and hits, or the sentence that it fails with."""
    call = f"{address}/gradio_api/call/{name}"
    data = (*data, "", "")[:4] if name == "search_text" else data
    event = http.post(call, json={"data": data}).json()["event_id"]
    kind, values = http.get(f"{call}/{event}").text.strip().splitlines()[-2:]
    values = json.loads(values.removeprefix("data: "))
    return values if kind == "event: complete" else values["error"]


def assert_shown(pictures, labels, hits, searched, captioned=True):
    """Compare what is shown with hits; an image stands above its first caption, where there are any."""
    for picture, label, hit in zip(pictures, labels, hits, strict=True):
        what = hit.caption or hit.file_name
        if hit.caption is None:
            row = searched.names("images")[0].index(hit.id)
            what = searched.texts[searched.caption_image.tolist().index(row)] if captioned else what
        else:
            row = searched.caption_image[searched.caption_ids.index(hit.id)]
        known = hit.probability is not None
        assert label == f"{format(hit.probability, '.0%') if known else format(hit.score, '.3f')}  {what}"
        pair = [image.convert("RGB") for image in (picture, Image.open(searched.picture(row)))]
        assert pair[0].size == pair[1].size
        np.testing.assert_allclose(*(np.asarray(image.resize((2, 1)), dtype=float) for image in pair), atol=16)


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
        pictures = [Image.open(io.BytesIO(http.get(one["image"]["url"]).content)) for one in shown]
        assert_shown(pictures, [one["caption"] for one in shown], expected, searched)


@pytest.mark.parametrize("kind", ["tars", "images"])
def test_pictures_lie_in_archives_and_folders_too(kind, tmp_path):
    from xret.heads.retrieval.serve import Answers

    retriever = run_on(kind, tmp_path)
    answers = Answers(retriever)
    for query in ("red dog", retriever.searched.picture(0)):
        hits = answers.find(query, 3).result()
        assert_shown(*zip(*answers.pictures_of(hits), strict=True), hits, retriever.searched, kind == "tars")


JAVASCRIPT = """
import {Client} from "@gradio/client";
const [address, text] = process.argv.slice(2);
const client = await Client.connect(address);
const {data} = await client.predict("/search_text", {text, k: 5});
console.log(JSON.stringify(data[1]));
process.exit(0);
"""


def gradio_client(address, text):
    return needed("gradio_client").Client(address, verbose=False).predict(text, 5, api_name="/search_text")[1]


@pytest.mark.foreign
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("ask", [gradio_client, lambda *words: node(JAVASCRIPT, *words)], ids=["python", "javascript"])
def test_clients_of_gradio_get_the_answers(served, ask):
    hits = ask(served.address, "grey beside red")
    expected = served.retriever.search("grey beside red", 5)
    assert [(hit["id"], hit["score"]) for hit in hits] == [(h.id, pytest.approx(h.score, abs=1e-5)) for h in expected]


def test_images_like_one_text_and_unlike_another(served):
    others = {"like": ["a blue side and a grey side"], "unlike": ["green beside red"]}
    _, hits = ask(served.address, "search_text", "red beside blue", 5, *others["like"], *others["unlike"])
    expected = served.retriever.search("red beside blue", 5, **others)
    assert [(hit["id"], hit["score"]) for hit in hits] == [(h.id, pytest.approx(h.score, abs=1e-4)) for h in expected]


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


@contextmanager
def started(run, *options, **more):
    """Serve a run; give what begins its addresses."""
    with start(run, *options, **more) as server:
        yield server.stdout.readline().split()[-1].rstrip("/")
        server.terminate()
        assert server.wait(120) == 0


@pytest.fixture(scope="module")
def client(made):
    with (
        started(made.run(), "--root-path", "/photos/", env={**os.environ, "XRET_TOKEN": "geheim"}) as address,
        httpx.Client(base_url=address, timeout=120, headers={"Authorization": "Bearer geheim"}) as client,
    ):
        yield client


def test_a_program_gets_the_answers_of_the_retriever_as_json(client, made):
    retriever, picture = Retriever(made.run(), device="cpu"), made.images / "0.png"
    given = {"query": "red side zeppelin", "k": 3}
    others = {"like": ["green", "blue beside red"], "unlike": ["grey"]}
    for asked, hits in (
        (given, retriever.search("red side zeppelin", 3)),
        ({**given, **others}, retriever.search("red side zeppelin", 3, **others)),
        ({**given, "at_least": 0.2}, retriever.search("red side zeppelin", 3, at_least=0.2)),
    ):
        answer = client.post("/search", json=asked)
        assert answer.json() == {"hits": [hit.to_dict() for hit in hits], "unknown_words": ["zeppelin"]}
    answer = client.post("/search/picture?k=4", content=picture.read_bytes())
    assert answer.json() == {"hits": [hit.to_dict() for hit in retriever.search(picture, 4)], "unknown_words": []}


@pytest.mark.parametrize(
    ("path", "body", "status", "sentence"),
    [
        ("", b'{"query": " "}', 422, "the query is empty; "),
        ("", b'{"query": "zeppelin"}', 422, "no word of the query is in the vocabulary"),
        ("", b'{"query": "red", "k": 0}', 422, "k: Input should be greater than or equal to 1; send JSON such as"),
        ("", b'{"query": "red", "at_leats": 1}', 422, "at_leats: Extra inputs are not permitted; "),
        ("", b'{"query": "%s"}' % (1001 * b"a"), 422, "query: String should have at most 1000 characters; "),
        ("", b'{"query": "red", "like": ["0.png"]}', 422, "'0.png' is a file name and not a text"),
        ("", b"red", 422, "the body: JSON decode error; send JSON such as"),
        ("", b"", 422, "the body: Field required; send JSON such as"),
        ("/picture", b"", 422, "the picture: the file is empty"),
        ("/picture", EPS, 422, "the picture: this is no JPEG, "),
        ("", '{"query": "café"}'.encode("latin-1"), 400, "the body: this is no JSON in UTF-8; send JSON such as"),
        ("/picture?k=0", b"", 422, "k: Input should be greater than or equal to 1; ask as /search/picture?k=10"),
        ("/picture", bytes(17 << 20), 413, "the body has more than 16 MiB; "),
        ("/picture", iter([b"chunked"]), 411, "the length of the body is missing; "),
    ],
)
def test_what_cannot_be_answered_is_said_with_its_status(client, path, body, status, sentence):
    answer = client.post(f"/search{path}", content=body, headers={"Content-Type": "application/json"})
    assert (answer.status_code, list(answer.json())) == (status, ["detail"])
    assert answer.json()["detail"].startswith(sentence)


def test_a_token_is_asked_for_but_not_by_a_health_check(client):
    asked, basic = {"json": {"query": "red"}}, {"Authorization": f"Basic {b64encode(b'x:geheim').decode()}"}
    assert client.post("/search", **asked, headers=basic).status_code == 200
    assert client.get("/", headers=basic).status_code == 200
    for wrong in ("", "geheim", "Bearer", "Bearer geheim2", "Bearer gehe\u0131m".encode(), "Basic ?", "Basic geheim"):
        refused = client.post("/search", **asked, headers={"Authorization": wrong})
        assert (refused.status_code, refused.headers["www-authenticate"]) == (401, 'Basic realm="xret"')
        assert "token; send the header 'Authorization: Bearer TOKEN'" in refused.json()["detail"]
    assert http.get(f"{client.base_url}/gradio_api/info").status_code == 401
    health = http.get(f"{client.base_url}/health")
    assert (health.status_code, health.json()) == (200, {"status": "ok"})


@pytest.mark.parametrize(
    ("words", "variable", "sentence"),
    [
        (["--token", ""], "", "it must be letters and digits, such as "),
        ([], "", "it must be letters and digits, such as "),
        (["--token", "two words"], "x", "it must be letters and digits, such as "),
        (["--root-path", "photos"], "x", "'photos' is no path such as /photos"),
    ],
)
def test_a_token_that_protects_nothing_is_refused(words, variable, sentence, tmp_path, monkeypatch):
    (tmp_path / "run.json").touch()
    monkeypatch.setenv("XRET_TOKEN", variable)
    assert sentence in refused("serve", tmp_path, *words, code=2)


SLOW = """if True:
    import sys, time
    from xret.cli import main
    from xret.heads.retrieval import retriever, serve
    search = retriever.Retriever.search
    serve.QUEUE = 3
    def slow(*given, **options):
        print("searching", flush=True)
        time.sleep(1)
        return search(*given, **options)
    retriever.Retriever.search = slow
    main(sys.argv[1:])
"""


def test_what_runs_is_answered_before_the_end_and_too_many_are_refused(made):
    words = [sys.executable, "-c", SLOW, "serve", str(made.run()), "--device", "cpu"]
    with subprocess.Popen(words, text=True, stdout=subprocess.PIPE) as server, ThreadPoolExecutor(5) as pool:
        assert server.stdout.readline() == "searching\n"  # before anybody asks
        address = server.stdout.readline().split()[-1]
        answers = [pool.submit(http.post, f"{address}search", json={"query": "red"}) for _ in range(5)]
        refused = [next(done).result() for done in [as_completed(answers)] for _ in range(2)]
        assert [(one.status_code, one.headers["retry-after"]) for one in refused] == [(503, "1")] * 2
        assert refused[0].json()["detail"] == "3 searches wait already; ask again later"
        server.terminate()
        assert sorted(one.result().status_code for one in answers) == [200] * 3 + [503] * 2
        with pytest.raises(httpx.ConnectError):
            http.get(f"{address}health")
        assert server.wait(30) == 0


@pytest.mark.browser
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


def test_pictures_that_are_missing_leave_the_answers_and_a_port_that_is_taken_is_said(
    refused_here, made, caplog, monkeypatch
):
    from xret.heads.retrieval import serve

    monkeypatch.setattr(serve, "make_app", lambda retriever, *_: serve.Answers(retriever))  # a page leaves loops open
    assert refused_here(made.run()).startswith("the server cannot listen at 127.0.0.1, port ")
    assert "no pictures will be shown: " in caplog.text


def test_its_own_trial_query_has_words_that_the_run_knows(served, caplog):
    retriever = Retriever(served.retriever.run.path, split="test", device="cpu")
    retriever.gallery.texts = ["a zeppelin"] * len(retriever.gallery.texts)
    resolve_name("xret.heads.retrieval.serve.Answers")(retriever)
    assert "zeppelin" not in caplog.text


def test_without_the_extra_it_is_named(monkeypatch, tmp_path, refused_here):
    monkeypatch.delitem(sys.modules, "xret.heads.retrieval.serve", raising=False)
    monkeypatch.setitem(sys.modules, "gradio", None)
    (tmp_path / "run.json").touch()
    assert refused_here(tmp_path).endswith("which is not installed: pip install 'xret[serve]'")


PAGE = (Path(__file__).parents[3] / "docs/how-to/service.md").read_text(encoding="utf-8")
NGINX = shutil.which("nginx", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin")


def block(language):
    """Return the page's last block of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)[-1]


@contextmanager
def listening(words, port, **more):
    """Run what listens at a port, from when it does."""
    with subprocess.Popen(words, **more) as server:
        for _ in range(300):
            time.sleep(0.1)
            with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
        yield f"http://127.0.0.1:{port}"
        server.terminate()


@pytest.fixture(scope="module")
def proxied(client, tmp_path_factory):
    """Put the page's nginx before the server, and give its address."""
    if NGINX is None:
        pytest.skip("nginx is not here: apt install nginx-light")
    folder, port = tmp_path_factory.mktemp("nginx"), free_port()
    server = block("nginx").replace("listen 80;", f"listen 127.0.0.1:{port};")
    server = server.replace("http://127.0.0.1:7860", str(client.base_url).rstrip("/"))
    places = "".join(
        f"{name}_temp_path {folder}/{name};" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    about = f"daemon off; pid {folder}/pid; error_log {folder}/errors; events {{}}"
    (folder / "nginx.conf").write_text(f"{about}\nhttp {{ access_log off; {places}\n{server}}}")
    words = [NGINX, "-c", str(folder / "nginx.conf"), "-e", str(folder / "errors")]
    with listening(words, port) as address:
        yield f"{address}/photos"


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as some:
        return some.getsockname()[1]


def test_behind_nginx_all_is_below_its_path(proxied, client):
    token = dict(client.headers)
    asked = {"json": {"query": "red side", "k": 2}}
    expected = client.post("/search", **asked).json()
    assert http.post(f"{proxied}/search", **asked).status_code == 401
    assert http.post(f"{proxied}/search", **asked, headers=token).json() == expected
    assert http.get(f"{proxied}/health").json() == {"status": "ok"}
    assert http.post(f"{proxied}/search/picture", content=bytes(18 << 20), headers=token).status_code == 413
    page = pytest.importorskip("gradio_client").Client(
        f"{proxied}/", headers={"Authorization": token["authorization"]}, verbose=False
    )
    assert page.predict("red side", 2, api_name="/search_text")[1] == expected["hits"]
    with ThreadPoolExecutor(40) as pool:
        codes = list(pool.map(lambda _: http.post(f"{proxied}/search", **asked, headers=token).status_code, range(40)))
    assert set(codes) == {200, 429}


@pytest.mark.browser
def test_the_page_behind_nginx_takes_the_token_as_a_password(proxied, chromium):
    context = chromium.new_context(http_credentials={"username": "any", "password": "geheim"})
    page, failed = context.new_page(), []
    page.on("response", lambda answer: failed.append(answer.url) if answer.status >= 400 else None)
    page.goto(f"{proxied}/")
    page.get_by_label("Describe a picture").fill("a red zeppelin")
    page.keyboard.press("Enter")
    page.get_by_text("Not in the vocabulary, and left out: zeppelin").wait_for()
    assert [url for url in failed if "/photos/" not in url] == []
    context.close()


@pytest.mark.slow
def test_fifteen_lines_over_an_export_find_what_the_run_does(made, tmp_path):
    pytest.importorskip("onnxscript", reason="onnxscript is not here: pip install 'xret[onnx]'")
    export_onnx(Retriever(made.run("mlp"), device="cpu"), tmp_path / "model")
    (tmp_path / "pictures").symlink_to(made.images)
    (tmp_path / "service.py").write_text(block("python"))
    code, port = (
        "import sys; sys.modules |= dict.fromkeys(('torch', 'xret')); import uvicorn; uvicorn.main()",
        free_port(),
    )
    words = [sys.executable, "-c", code, "service:app", "--port", str(port), "--log-level", "error"]
    expected = Retriever(made.run("mlp"), device="cpu").search("red beside blue", 5)
    with listening(words, port, cwd=tmp_path) as address:
        hits = http.get(f"{address}/search", params={"query": "red beside blue", "k": 5}).json()
        refused = http.get(f"{address}/search", params={"query": "?"})
    assert [hit["file"] for hit in hits] == [hit.file_name for hit in expected]
    assert [hit["score"] for hit in hits] == pytest.approx([hit.score for hit in expected], abs=2e-3)
    assert (refused.status_code, "has no words" in refused.json()["detail"]) == (422, True)
