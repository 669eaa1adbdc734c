"""The report: what is on the page is what the run does, and the page is sound HTML that needs nothing else."""

import base64
import io
import re
import shutil
from functools import partial
from html.parser import HTMLParser
from types import SimpleNamespace

import numpy as np
import pytest
import small_store
import torch
from PIL import Image
from small_store import make_store, seal_anew
from tick_labels import labels_apart
from torch.nn import functional
from torchvision.transforms import functional as transforms

from xret.heads.evaluation.evaluation import evaluate
from xret.heads.evaluation.subjects import score
from xret.heads.modules.embedding import Gaussian, Sequence
from xret.heads.recipes.recipe import load_recipe
from xret.heads.report import page as report_page
from xret.heads.report import write_report
from xret.heads.report.figures import heat_map, number
from xret.heads.report.pictures import COVER, SIDE, Picture, Pictures, input_of
from xret.heads.report.plots import curves
from xret.heads.report.sections.attention import attention_of
from xret.heads.report.sections.comparison import agreement_table, disagreements
from xret.heads.report.sections.examples import by_element, drawn, example, gallery, nearest
from xret.heads.report.sections.places import CELLS, Place, grid_boxes
from xret.heads.report.sections.space import element_map, tsne
from xret.heads.report.sections.tables import similarity_table
from xret.heads.report.views import elements, names, open_views
from xret.heads.runs.run import Run
from xret.heads.training.training import train
from xret.pipeline.cache.feature_cache import FeatureCache
from xret.pipeline.cache.layout import create_image_set
from xret.pipeline.data.sources import FOLDER, FolderReader
from xret.pipeline.errors import OutputError, RunError

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = ["model.dim=16", "data.batch_size=16", "adapter.words.word_dim=8", "schedule.epochs=2"]
OWN = {"setdiv": ["aggregator.image.head_dim=16", "aggregator.text.head_dim=16", "aggregator.image.iterations=2"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A store with captions that HTML must escape, and its pictures, one of which is damaged."""
    folder = tmp_path_factory.mktemp("report")
    make_store(folder / "small.zarr", words="<b>&amp;</b>")
    (folder / "images").mkdir()
    rng = np.random.default_rng(0)
    for number_ in range(72):
        pixels = rng.integers(0, 256, (30, 40, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "images" / f"{number_}.jpg")
    return folder


@pytest.fixture(scope="module")
def run(folder):
    def trained(name):
        path = folder / name
        if not path.exists():
            recipe = load_recipe(name, [*SMALL, *OWN.get(name, ())])
            train(str(folder / "small.zarr"), recipe, path, device="cpu")
        return path

    return trained


@pytest.fixture(scope="module")
def view(run):
    (view,) = open_views([run("setdiv")], None, "test", "cpu")
    return view


@pytest.fixture(scope="module")
def two(folder, run):
    out = folder / "two.html"
    size = write_report([run("setdiv"), run("vsepp")], out, data_root=folder, device="cpu")
    assert out.stat().st_size == size
    return out.read_text()


@pytest.fixture
def no_pictures(view):
    return Pictures(view.cache, None)


class Outline(HTMLParser):
    """Collects what a page is made of, and refuses tags that do not match."""

    VOID = ("meta", "br", "link", "img", "input", "hr")

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.links, self.levels, self.unnamed, self.tables, self.text = [], [], [], [], [], [], ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self._seen(tag, dict(attributes))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self._seen(tag, dict(attributes))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not {"style", "script"} & set(self.open):
            self.text += data

    def _seen(self, tag, attributes):
        self.ids += [attributes["id"]] if "id" in attributes else []
        self.links += [attributes[key] for key in ("href", "xlink:href", "src") if key in attributes]
        if attributes.get("role") in ("img", "region") and not attributes.get("aria-label"):
            self.unnamed.append(tag)
        if re.fullmatch("h[1-6]", tag):
            self.levels.append(int(tag[1]))
        if tag in ("table", "caption"):
            self.tables.append(tag)
        if tag == "th":
            assert attributes.get("scope") in ("row", "col")


def require_sound(text):
    """Return the outline of a page, having seen that it is sound and needs nothing else."""
    outline = Outline(text)
    assert len(set(outline.ids)) == len(outline.ids)
    assert {link[1:] for link in outline.links if link.startswith("#")} <= set(outline.ids)
    assert all(link.startswith(("#", "data:image/")) for link in outline.links)
    assert {url for url in re.findall(r"https?://[^\s\"'<]*", text) if "www.w3.org" not in url} == set()
    assert "url(http" not in text
    assert outline.levels[0] == 1
    assert outline.levels.count(1) == 1
    assert all(below <= above + 1 for above, below in zip(outline.levels, outline.levels[1:], strict=False))
    assert outline.unnamed == []
    assert outline.tables == ["table", "caption"] * (len(outline.tables) // 2)
    return outline


@pytest.mark.parametrize("name", ["gaussian-vsepp", "scan", "vse-infty", "pcme"])
def test_every_kind_of_embedding_has_its_page(folder, run, name):
    write_report([run(name)], folder / f"{name}.html", device="cpu")
    text = require_sound((folder / f"{name}.html").read_text()).text
    assert "There are no pictures on this page, only ids and captions" in text
    assert ("Most uncertain images" in text) == (name in ("gaussian-vsepp", "pcme"))
    assert ("weighs each rank" in text) == (name == "vse-infty")
    assert text.count("circular variance, single elements: The embeddings are no sets of several elements.") == (
        name != "pcme"
    )
    assert ("Each element on its own" in text) == (name == "pcme")
    assert "#attention" not in (folder / f"{name}.html").read_text()  # no pictures, which is said above
    result = evaluate([folder / name], device="cpu").results[0]
    assert number(result.rsum) in text


def test_a_page_of_two_runs(two, run):
    outline = require_sound(two)
    for name in ("setdiv", "vsepp"):
        result = evaluate([run(name)], device="cpu").results[0]
        row = re.search(rf'<tr><th scope="row">{name}</th>(.*)</tr>', two)[1]
        cells = re.findall("<td[^>]*>(.*?)</td>", row)
        assert cells[:3] == [number(result.image_to_text[f"R@{k}"]) for k in (1, 5, 10)]
        assert cells[4:7] == [number(result.text_to_image[f"R@{k}"]) for k in (1, 5, 10)]
        assert cells[8] == number(result.rsum)
    assert "Comparison of the runs" in outline.text
    for caption in ("Circular variance", "The same embedding sets"):  # only one of the runs has sets
        (first,) = re.findall(f'<caption>{caption}.*?<tr><th scope="row">([^<]*)</th>', two, flags=re.S)
        assert first == "setdiv"
    assert "no pictures" not in outline.text
    assert "12 images, 30 captions (2.50 an image), 0 skipped, ties pessimistic" in outline.text
    best = Run(run("setdiv")).info.best_rsum
    assert f"validation RSUM {best:.2f}" in outline.text


def test_topics_of_two_runs_stand_side_by_side(two):
    outline = require_sound(two)
    topics = re.findall(r'<h2 id="([a-z]+)">', two)
    assert re.findall(r'<li><a href="#([a-z]+)">', two) == topics
    assert topics == ["runs", "evaluation", "comparison", "training", "diagnostics", "space", "attention", "elements",
                      "galleries"]  # fmt: skip
    assert re.findall('<th scope="col">([^<]*)</th>', two[two.index('<h2 id="runs">') :])[:3] == [
        "run",
        "setdiv",
        "vsepp",
    ]
    assert two.count("<article") >= 6
    galleries = two[two.index('<h2 id="galleries">') :]
    labels = re.findall('<p><strong class="run">([^<]*)</strong>', galleries)
    assert labels == ["setdiv", "vsepp"] * 4  # two queries of each direction
    (why,) = re.findall(r"<li>([^<]*no sets of several elements[^<]*)</li>", two)
    assert why == "circular variance, single elements (vsepp): The embeddings are no sets of several elements."
    assert outline.text.count("Its image embeddings are made without attention") == 1
    marks = re.findall(r'<i class="(image|caption)" [^>]*title="([^"]+)"', two)
    assert len(marks) == 12 * (8 + 2)
    assert all(title.startswith(("Image ", "Caption: ")) for _, title in marks)


def test_wide_tables_name_their_cells(two):
    tables = re.findall(r'<table class="wide">.*?</table>', two, flags=re.S)
    assert tables
    for table in tables:
        header = re.findall('<th scope="col">([^<]*)</th>', table)
        for row in re.findall("<tr>(<th scope=.row.*?)</tr>", table):
            assert re.findall('data-label="([^"]*)"', row) == header[1:]


def test_captions_are_text_not_markup(two):
    assert "<b>&amp;</b>" not in two.replace("&lt;b&gt;", "")
    assert "&lt;b&gt;&amp;amp;&lt;/b&gt;" in two


def test_the_same_words_give_the_same_page(folder, run):
    for out in "ab":
        write_report([run("vsepp")], folder / f"{out}.html", data_root=folder, device="cpu")
    assert (folder / "a.html").read_text() == (folder / "b.html").read_text()


def test_damaged_pictures_are_named(folder, run, tmp_path):
    shutil.copytree(folder / "images", tmp_path / "images")
    for number_ in range(61, 72):
        (tmp_path / "images" / f"{number_}.jpg").write_bytes(b"no picture")
    write_report([run("vsepp")], tmp_path / "r.html", data_root=tmp_path, device="cpu")
    text = " ".join(require_sound((tmp_path / "r.html").read_text()).text.split())
    (listed,) = re.findall(
        r"(\d+) pictures could not be read and are shown as id and caption: ((?:\d+\.jpg(?:, )?)+)", text
    )
    assert int(listed[0]) == len(listed[1].split(", ")) > 1
    assert "60.jpg" not in listed[1]


def test_a_gallery_is_the_head_of_the_ranking(view, run, no_pictures):
    scores = score(run("setdiv"), device="cpu")
    for direction, matrix in (("image_to_text", scores.similarity), ("text_to_image", scores.similarity.T)):
        examples = gallery(view, no_pictures, direction, 6, 5, 3)
        assert len(examples) == 6
        for shown in examples:
            if direction == "image_to_text":
                query = scores.ids.index(shown.query.name)
                best = [(scores.texts[row], scores.caption_image[row] == query) for row in _ranked(matrix[query])]
                assert [(item.text, item.right) for item in shown.found] == best
            else:
                asking = [row for row, text in enumerate(scores.texts) if text == shown.query.text]
                found = [
                    [(scores.ids[i], scores.caption_image[row] == i) for i in _ranked(matrix[row])] for row in asking
                ]
                assert [(item.name, item.right) for item in shown.found] in found


def test_a_failure_shows_the_right_answer_its_rank_and_its_score(view, no_pictures):
    failed = 0
    for direction, way in view.ways.items():
        for query in way.queries.tolist():
            scores = way.similarity[query].tolist()
            ranking = sorted(range(len(scores)), key=lambda item: (-scores[item], item))
            own = [item for item in ranking if way.item_image[item] == way.query_image[query]]
            rank = 1 + ranking.index(own[0])
            assert way.right(query) == (own[0], rank)
            one = example(view, no_pictures, direction, query, ranking[:1])
            assert one.found[0].note == number(scores[ranking[0]])
            failed += rank > 1
            if rank == 1:
                assert one.missed is None
                continue
            said = view.scores.texts[own[0]] if direction == "image_to_text" else view.scores.ids[own[0]]
            assert (one.missed.text if direction == "image_to_text" else one.missed.name) == said
            assert (one.missed.right, one.missed.note) == (True, f"rank {rank}: {number(scores[own[0]])}")
            assert example(view, no_pictures, direction, query, ranking[:rank]).missed is None  # it is there already
    assert failed > 5


def test_where_runs_disagree_each_says_its_score_and_the_rank_of_the_right_one(run, no_pictures):
    views = open_views([run("setdiv"), run("vsepp")], None, "test", "cpu")
    examples = disagreements(views, no_pictures, "text_to_image", 0)
    assert examples
    for one in examples:
        assert {item.right for item in one.found} == {True, False}
        for view, item in zip(views, one.found, strict=True):
            assert re.fullmatch(
                rf"{view.name}: [\d.−]+" + ("" if item.right else r", the right one at rank [1-9]\d*: [\d.−]+"),
                item.note,
            )


def _ranked(scores):
    return sorted(range(len(scores)), key=lambda place: (-scores[place].item(), place))[:5]


def test_each_element_finds_what_is_nearest_to_it():
    torch.manual_seed(0)
    queries, items = (functional.normalize(torch.randn(n, k, 6), dim=-1) for n, k in ((3, 4), (7, 2)))
    for query, found in zip(queries, nearest(queries, items).tolist(), strict=True):
        for element, item in zip(query, found, strict=True):
            by_item = [max((element @ other).item() for other in own) for own in items]
            assert item == by_item.index(max(by_item))
    assert nearest(queries[:0], items).shape == (0, 4)


def test_successes_succeed_and_failures_fail(view, no_pictures):
    for direction in ("image_to_text", "text_to_image"):
        cases = by_element(view, no_pictures, direction, 3, 0)
        assert cases["failures"]
        for name, right in (("successes", True), ("failures", False)):
            for shown in cases[name]:
                assert [item.note.split(":")[0] for item in shown.found] == [f"element {k}" for k in (1, 2, 3, 4)]
                assert (shown.missed is None) is right
                if direction == "image_to_text":
                    row = view.scores.ids.index(shown.query.name)
                    assert bool(view.ways[direction].hits[row]) is right
                    own = {view.scores.texts[c] for c in np.flatnonzero(view.scores.caption_image == row)}
                    assert all(item.text in own for item in shown.found if item.right)
                else:
                    asked = [c for c, text in enumerate(view.scores.texts) if text == shown.query.text]
                    assert any(bool(view.ways[direction].hits[c]) is right for c in asked)


def test_attention_is_that_of_the_model(view):
    weights = attention_of(view, [1, 4])
    assert weights.shape == (2, 2, 4, 4)
    torch.testing.assert_close(weights.sum(2), torch.ones(2, 2, 4))  # slots compete for every row
    again = attention_of(view, [4])
    torch.testing.assert_close(weights[:, 1:], again)
    assert (weights[:, 0] - weights[:, 1]).abs().max() > 1e-6


def warmth(overlay):
    """Return how far an overlay colours each of its cells, from 0 to 1."""
    data = re.search('base64,([^"]+)', overlay)[1]
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))))[..., 3] / COVER


def test_the_boxes_of_a_grid_lie_row_by_row():
    assert grid_boxes(1, 2).tolist() == [[0, 0, 0.5, 1], [0.5, 0, 1, 1]]
    assert grid_boxes(2, 3)[4].tolist() == pytest.approx([1 / 3, 1 / 2, 2 / 3, 1])


def test_a_grid_is_lit_where_it_is_attended_to():
    weights = np.array([0.4, 0.1, 0.0, 0.2])
    overlay = Place(Picture("p", (30, 20), ""), grid_boxes(2, 2), (2, 2)).drawn(weights, "")
    np.testing.assert_allclose(warmth(overlay), weights.reshape(2, 2) / 0.4, atol=0.01)
    outlines = re.findall('<rect x="([^"]+)" y="([^"]+)" width="([^"]+)" height="([^"]+)"', overlay)
    assert outlines == [("0.0", "0.0", "15.0", "10.0"), ("15.0", "10.0", "15.0", "10.0")]


def test_regions_are_lit_where_they_are():
    boxes = np.array([[0.0, 0.0, 0.5, 0.5], [0.25, 0.25, 1.0, 1.0], [0.0, 0.5, 0.25, 1.0]])
    weights = np.array([0.2, 0.4, 0.1])
    overlay = Place(Picture("p", (40, 20), ""), boxes, (CELLS, CELLS)).drawn(np.append(weights, 0.0), "")
    warm = warmth(overlay)
    side = len(warm)
    for row in range(side):
        for column in range(side):
            x, y = (column + 0.5) / side, (row + 0.5) / side
            inside = [w for w, (x1, y1, x2, y2) in zip(weights, boxes, strict=True) if x1 <= x <= x2 and y1 <= y <= y2]
            assert warm[row, column] == pytest.approx(max(inside, default=0) / 0.4, abs=0.01)
    assert re.findall('<rect x="([^"]+)" y="([^"]+)" width="([^"]+)"', overlay) == [
        ("10.0", "5.0", "30.0"),
        ("0.0", "0.0", "20.0"),
    ]


def test_regions_of_a_store_are_drawn(tmp_path, folder, monkeypatch):
    with_boxes = partial(create_image_set, extras=("boxes",))
    monkeypatch.setattr(small_store, "create_image_set", with_boxes)
    store = make_store(tmp_path / "roi.zarr", image="roi")
    features = FeatureCache.open(store).image_set()
    boxes = features.cache.store.open_array(f"{features.path}/boxes", writable=True)
    boxes[...] = np.tile(np.array([4.0, 3.0, 20.0, 15.0], dtype=np.float32), (*boxes.shape[:2], 1))
    size = features.cache.store.open_array(f"{features.path}/size", writable=True)
    size[...] = np.tile(np.array([40, 30], dtype=np.int32), (size.shape[0], 1))
    seal_anew(features)
    train(store, load_recipe("setdiv", [*SMALL, *OWN["setdiv"]]), tmp_path / "run", device="cpu")
    write_report([tmp_path / "run"], tmp_path / "roi.html", data_root=folder, device="cpu")
    text = (tmp_path / "roi.html").read_text()
    require_sound(text)
    outlines = re.findall('<rect x="([^"]+)" y="([^"]+)" width="([^"]+)" height="([^"]+)" class="outline"', text)
    assert len(outlines) == 3 * 2 * 4 * 2  # images, iterations, slots, regions
    assert set(outlines) == {("4.0", "3.0", "16.0", "12.0")}
    size[...] = np.zeros(size.shape, dtype=np.int32)  # as imports have it whose source does not tell
    seal_anew(features)
    write_report([tmp_path / "run"], tmp_path / "roi.html", data_root=folder, device="cpu")
    text = (tmp_path / "roi.html").read_text()
    assert "The store does not know how large the pictures of its regions are." in text
    assert 'class="outline"' not in text


def test_a_picture_is_shown_as_the_network_saw_it(tmp_path):
    across, down = np.meshgrid(np.linspace(0, 255, 320), np.linspace(0, 255, 200))
    Image.fromarray(np.stack([across, down, 0 * down], 2).astype(np.uint8)).save(tmp_path / "a.png")
    features = SimpleNamespace(kind="grid", identity={"preprocessing": {"resize": 256, "crop": 224}})
    held = Pictures(holding("a.png"), tmp_path).hold("a.png", input_of(features))
    shown = np.asarray(Image.open(io.BytesIO(base64.b64decode(held.data)))).astype(float)
    resized = transforms.resize(Image.open(tmp_path / "a.png"), [256])
    expected = np.asarray(transforms.center_crop(resized, [224]).resize((SIDE, SIDE))).astype(float)
    assert held.size == (SIDE, SIDE)
    assert np.abs(shown - expected).mean() < 3
    features.identity = {"preprocessing": {"stretch": 64}}
    assert input_of(features) == ("stretch", 1.0)
    features.identity = {}
    assert input_of(features) is None


def holding(name):
    """Return what stands for a store of one picture."""

    def opened(folder, *_):
        return FolderReader(folder)

    return SimpleNamespace(file_names=lambda *_: [name], dataset="x", images=1, source=FOLDER, open_pictures=opened)


def test_a_video_is_shown_by_its_first_frame(tmp_path):
    (tmp_path / "clip").mkdir()
    for name, colour in (("10.png", "blue"), ("9.png", "red")):
        Image.new("RGB", (400, 200), colour).save(tmp_path / "clip" / name)
    pictures = Pictures(holding("clip"), tmp_path)
    held = pictures.hold("clip")
    shown = Image.open(io.BytesIO(base64.b64decode(held.data)))
    assert held.size == shown.size == (SIDE, SIDE // 2)
    np.testing.assert_allclose(shown.getpixel((20, 20)), (255, 0, 0), atol=3)
    assert not pictures.unreadable


def test_a_crop_is_cut_where_its_box_is(tmp_path):
    pixels = np.zeros((40, 60, 3), dtype=np.uint8)
    pixels[8:24, 16:48] = (0, 0, 255)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    pictures = Pictures(holding("a.png"), tmp_path)
    held = pictures.hold("a.png", (16, 8, 48, 24))
    shown = np.asarray(Image.open(io.BytesIO(base64.b64decode(held.data)))).astype(int)
    assert shown.shape == (16, 32, 3)
    assert np.abs(shown - (0, 0, 255)).max() < 6
    assert pictures.hold("a.png").key != held.key


def test_a_picture_is_held_once(folder, view):
    pictures = Pictures(view.cache, folder)
    shown = [pictures.show("60.jpg", 'a "quoted" <one>') for _ in range(3)]
    assert len(pictures.held) == 1
    assert shown[0] == shown[2]
    assert 'aria-label="a &quot;quoted&quot; &lt;one&gt;"' in shown[0]


def test_groups_stay_groups_on_the_map():
    rng = np.random.default_rng(0)
    rows = np.concatenate([rng.normal(size=(30, 8)) * 0.05 + centre for centre in np.eye(8)[:2] * 5])
    placed = tsne(rows, 0)
    assert placed.shape == (60, 2)
    np.testing.assert_array_equal(placed, tsne(rows, 0))
    one, other = placed[:30], placed[30:]
    between = np.linalg.norm(one.mean(0) - other.mean(0))
    assert between > 2 * max(np.linalg.norm(group - group.mean(0), axis=1).mean() for group in (one, other))
    np.testing.assert_array_equal(tsne(np.ones((5, 3)), 0), np.zeros((5, 2)))
    np.testing.assert_array_equal(tsne(np.ones((1, 3)), 0), np.zeros((1, 2)))


def test_marks_of_a_map_are_few_and_say_what_they_are(view, run):
    found = element_map(view, 0)
    assert [name for name, _ in found.legend] == ["image", "caption", "slot 1", "slot 2", "slot 3", "slot 4"]
    assert len(found.samples) == 12
    for sample in found.samples:
        assert [(mark.modality, mark.colour) for mark in sample] == [
            (modality, slot) for modality in ("image", "caption") for slot in range(4)
        ]
        row = view.scores.ids.index(sample[0].title.split(":")[0].removeprefix("Image "))
        assert sample[1].title == f"Image {view.scores.ids[row]}: {view.first_caption(row)} (slot 2)"
        assert sample[7].title == f"Caption: {view.first_caption(row)} (slot 4)"
        assert all(3 <= place <= 97 for mark in sample for place in (mark.left, mark.top))
    (vectors,) = open_views([run("vsepp")], None, "test", "cpu")
    found = element_map(vectors, 0)
    assert [(name, mark.colour) for name, mark in found.legend] == [("image", 0), ("caption", 1)]
    assert {tuple(mark.colour for mark in sample) for sample in found.samples} == {(0, 1)}


def test_other_similarities_are_measured_as_a_run_with_them(view, run, folder):
    table = similarity_table(view, "pessimistic")
    rows = {row[0]: row[1:] for row in table.rows}
    assert list(rows) == ["smooth-chamfer (its own)", "mil", "chamfer", "assignment"]
    own = evaluate([run("setdiv")], device="cpu").results[0]
    assert rows["smooth-chamfer (its own)"][-1] == number(own.rsum)
    (other,) = open_views([run("vsepp")], None, "test", "cpu")
    assert similarity_table(other, "pessimistic") is None
    left, right = view.image_elements, view.caption_elements
    best = torch.einsum("ikd,cjd->ickj", left, right).amax((2, 3))
    hits = (view.scores.caption_image[best.argmax(1)] == torch.arange(len(left))).double().mean()
    assert rows["mil"][0] == number(100 * hits.item())


def test_agreement_is_counted_query_by_query(run):
    views = open_views([run("setdiv"), run("vsepp")], None, "test", "cpu")
    right = []
    for view in views:
        owner = view.scores.caption_image.tolist()
        to_text = [
            owner[max(range(len(owner)), key=lambda c: row[c])] == i for i, row in enumerate(view.scores.similarity)
        ]
        to_image = [max(range(12), key=lambda i: view.scores.similarity[i, c]) == own for c, own in enumerate(owner)]
        right.append(to_text + to_image)
    only = [sum(a and not b for a, b in zip(*pair, strict=True)) for pair in (right, right[::-1])]
    table = agreement_table(views)
    assert [row[1:] for row in table.rows] == [
        ["–", number(100 * only[0] / 42)],
        [number(100 * only[1] / 42), "–"],
    ]


def test_elements_of_every_kind_are_unit_rows():
    torch.manual_seed(0)
    rows = torch.randn(2, 3, 4)
    sequence = Sequence(rows, torch.tensor([1, 3]))
    kinds = {1: [rows[:, 0], Gaussian(rows[:, 0], rows[:, 1]), sequence], 3: [rows]}
    for count, embeddings in kinds.items():
        for embedding in embeddings:
            made = elements(embedding)
            assert made.shape == (2, count, 4)
            torch.testing.assert_close(made.norm(dim=2), torch.ones(2, count))
    torch.testing.assert_close(elements(sequence)[0, 0], functional.normalize(rows[0, 0], dim=0))
    torch.testing.assert_close(elements(Gaussian(rows[:, 0], rows[:, 1])), elements(rows[:, 0]))


def test_runs_are_told_apart(tmp_path):
    a, b, c = tmp_path / "x" / "run", tmp_path / "y" / "run", tmp_path / "z"
    assert names([a]) == ["run"]
    assert names([a, b, c]) == ["x/run", "y/run", f"{tmp_path.name}/z"]
    assert names([c, c]) == ["z (1)", "z (2)"]


def test_numbers_as_the_tables_show_them():
    assert [number(value) for value in (None, 1234.567, -0.001, -2.5)] == ["–", "1,234.57", "0.00", "−2.50"]
    table = heat_map("c", "x", [[-0.5, 2.0]], digits=1, whole=(0.0, 4.0))
    assert table.rows == [["1", "−0.5", "2.0"]]
    assert table.heat == [[0.0, 0.5]]
    assert heat_map("c", "x", [[50.0, 69.1], [84.5, 90.0]]).heat == [[0.0, pytest.approx(0.4775)],
                                                                     [pytest.approx(0.8625), 1.0]]  # fmt: skip
    assert heat_map("c", "x", [[2.0, 2.0]]).heat == [[0.0, 0.0]]


def test_a_drawing_takes_the_colours_of_the_page():
    drawing = curves([("one", [1, 2], [1.0, 3.0]), ("a < b", [1, 2], [2.0, 200.0])], "epoch", "loss", log=True)
    assert not re.search("#[0-9a-fA-F]{6}", re.sub(r'href="#|url\(#', "", drawing))
    assert {"var(--ink)", "var(--series-1)", "var(--series-2)"} <= set(re.findall(r"var\(--[a-z0-9-]+\)", drawing))
    texts = re.findall("<text[^>]*>([^<]*)</text>", drawing)
    assert {"epoch", "loss", "one", "a &lt; b"} <= set(texts)
    assert drawing == curves([("one", [1, 2], [1.0, 3.0]), ("a < b", [1, 2], [2.0, 200.0])], "epoch", "loss", log=True)


@pytest.mark.parametrize("values", [[-1187.15, -1186.97], [-40.7485, -40.7468], [0.0, 0.0]])
def test_numbers_below_a_drawing_have_room(values):
    series = [("images", np.linspace(*values, 11).tolist(), list(range(11)))]
    labels, _ = labels_apart(lambda: curves(series, "uncertainty", "below (%)"))
    assert len(labels) > 1


@pytest.mark.filterwarnings("error")
def test_names_of_a_legend_are_shown_as_they_are():
    names = ["_first", "cost_$5$", "$\\foo$", "<script>"]
    drawing = curves([(name, [1, 2], [1.0, 3.0]) for name in names], "epoch", "loss")
    texts = [text.strip("\N{ZERO WIDTH SPACE}") for text in re.findall("<text[^>]*>([^<]*)</text>", drawing)]
    assert {"_first", "cost_$5$", "$\\foo$", "&lt;script&gt;"} <= set(texts)
    assert "<script>" not in drawing


def test_drawn_with_a_seed():
    rows = np.arange(10, 20)
    assert drawn(rows, 30, 0) == rows.tolist()
    assert drawn(rows, 3, 0) == drawn(rows, 3, 0) == sorted(drawn(rows, 3, 0))
    assert drawn(rows[:0], 3, 0) == []
    assert len({tuple(drawn(rows, 3, seed)) for seed in range(9)}) > 3


def test_what_is_no_report_is_not_replaced(folder, run, tmp_path):
    other = tmp_path / "thesis.html"
    other.write_text("<!DOCTYPE html><p>mine")
    with pytest.raises(RunError, match=r"thesis\.html exists and is no report of xret; take another --out"):
        write_report([run("vsepp")], other, device="cpu")
    assert other.read_text() == "<!DOCTYPE html><p>mine"
    with pytest.raises(RunError, match=r"is a folder; give --out the name of a file"):
        write_report([run("vsepp")], tmp_path, device="cpu")
    with pytest.raises(OutputError, match=r"because .*thesis\.html is a file; choose another --out"):
        write_report([run("vsepp")], other / "r.html", device="cpu")
    assert list(tmp_path.iterdir()) == [other]


def test_missing_packages_are_named(monkeypatch, tmp_path):
    monkeypatch.setattr(report_page, "find_spec", lambda name: None if name == "sklearn" else True)
    with pytest.raises(RunError, match=r"a report needs scikit-learn: `pip install 'xret\[report\]'`"):
        write_report(["run"], tmp_path / "r.html")


def test_runs_of_two_data_sets_are_refused(run, tmp_path, monkeypatch):
    monkeypatch.setattr(small_store, "Samples", partial(_named, small_store.Samples))
    store = make_store(tmp_path / "other.zarr")
    train(store, load_recipe("vsepp", SMALL), tmp_path / "run", device="cpu")
    with pytest.raises(RunError, match=r"data set 'small' and .* of 'other'; a page is about one"):
        write_report([run("vsepp"), tmp_path / "run"], tmp_path / "r.html", device="cpu")


def _named(samples, _, *rest):
    return samples("other", *rest)


def test_no_run_is_a_sentence(tmp_path):
    with pytest.raises(RunError, match="is no run"):
        write_report([tmp_path], tmp_path / "r.html")
