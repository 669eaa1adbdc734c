"""The report: what is on the page is what the run does, and the page is sound HTML that needs nothing else."""

import re
import shutil
from functools import partial

import pytest
import small_store
from small_reports import SMALL, recipe_of, require_sound
from small_store import make_store

from xret.heads.evaluation.evaluation import evaluate
from xret.heads.recipes.recipe import load_recipe
from xret.heads.report import write_report
from xret.heads.report.figures import number
from xret.heads.report.page import differing_settings
from xret.heads.runs.run import Run
from xret.heads.training.training import train
from xret.pipeline.errors import OutputError, RunError

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def two(folder, run):
    out = folder / "two.html"
    size = write_report([run("setdiv"), run("vsepp")], out, data_root=folder, device="cpu")
    assert out.stat().st_size == size
    return out.read_text()


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


def test_a_page_tells_in_which_settings_its_runs_differ(folder, run, tmp_path):
    other = load_recipe("vsepp", [*SMALL, "optimizer.lr=0.25"])
    train(str(folder / "small.zarr"), other, tmp_path / "other", device="cpu")
    write_report([run("vsepp"), tmp_path / "other"], tmp_path / "page.html", device="cpu")
    text = (tmp_path / "page.html").read_text()
    row = re.search(r'<tr><th scope="row">optimizer\.lr</th>(.*)</tr>', text)[1]
    rate = Run(run("vsepp")).recipe.optimizer.lr
    assert re.findall("<td[^>]*>(.*?)</td>", row) == [str(rate), "0.25"]
    assert '<th scope="row">optimizer.name</th>' not in text


def test_settings_in_which_runs_of_one_recipe_differ_are_told():
    other = ["optimizer.lr=0.25", "schedule.warmup_epochs=0", "runtime.cache=stream", "similarity=mil"]
    recipes = [load_recipe("setdiv"), load_recipe("vsepp"), load_recipe("setdiv", other)]
    rows = {row[0]: row[1:] for row in differing_settings(recipes)}
    assert rows["optimizer.lr"] == ["0.001", "0.0002", "0.25"]
    assert rows["similarity.name"] == ["smooth-chamfer", "cosine", "mil"]
    assert rows["similarity.alpha"] == ["16.0", "–", "–"]
    assert differing_settings([recipes[0], recipes[1], load_recipe("setdiv", other[2:3])]) == []


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
    monkeypatch.setattr("xret.pipeline.versions.find_spec", lambda name: None if name == "sklearn" else True)
    with pytest.raises(RunError, match=r"a report needs scikit-learn; install with `pip install 'xret\[report\]'`"):
        write_report(["run"], tmp_path / "r.html")


def test_runs_of_two_data_sets_are_refused(run, tmp_path, monkeypatch):
    monkeypatch.setattr(small_store, "Samples", partial(_named, small_store.Samples))
    store = make_store(tmp_path / "other.zarr")
    train(store, recipe_of("vsepp"), tmp_path / "run", device="cpu")
    with pytest.raises(RunError, match=r"data set 'small' and .* of 'other'; a page is about one"):
        write_report([run("vsepp"), tmp_path / "run"], tmp_path / "r.html", device="cpu")


def _named(samples, _, *rest):
    return samples("other", *rest)


def test_no_run_is_a_sentence(tmp_path):
    with pytest.raises(RunError, match="is no run"):
        write_report([tmp_path], tmp_path / "r.html")
