"""Benchmarks run with one command, in seconds where they are small."""

import importlib
import json
import re
from itertools import combinations
from pathlib import Path

import pytest
import small_store
import torch
from click.testing import CliRunner
from small_bert import save_bert
from small_runs import make_pictures, make_run, make_store

import xret
from xret.heads.recipes.names import recipe_names
from xret.pipeline.store import FeatureCache

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def of_this_folder(monkeypatch):
    monkeypatch.syspath_prepend(HERE)


def printed(command, *words):
    """Run ``NAME [COMMAND]`` small, and return what it prints."""
    name, *part = command.split()
    result = CliRunner().invoke(importlib.import_module(name).main, [*part, "--small", *map(str, words)])
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


def lines(command, *words):
    return [json.loads(line) for line in printed(command, *words).splitlines()]


def table(command, *words):
    """Return the rows of a markdown table by their first cell."""
    rows = [line.strip("| ").split(" | ") for line in printed(command, *words).splitlines() if line.startswith("|")]
    return {row[0]: dict(zip(rows[0], row, strict=True)) for row in rows[2:]}


def test_the_cost_of_retrieval():
    found = lines("retrieval_cost")
    macs = {line["recipe"]: line["macs"] for line in found if line["what"] == "query"}
    assert set(macs) == {name for name in recipe_names() if "/" not in name} - {"cca"}
    assert (macs["vse-infty"], macs["setdiv"], macs["scan"]) == (16, 16 * 16, 36 * 12 * 16 + 36 * 36 * 12)
    assert [line["images"] for line in found if line["what"] == "grown"] == [10] * 3 + [20] * 3
    paper = {line["recipe"]: line["paper"] for line in found if line["what"] == "pairs"}
    assert paper == {"vse-infty": 159, "setdiv": 168, "scan": 198121}


@pytest.mark.parametrize(
    "command",
    [
        *("gpu", "stacked", "similarity", "search", "reading speed", "extraction resume"),
        pytest.param("extraction memory", marks=pytest.mark.slow),
    ],
)
def test_what_prints_lines(command):
    assert all(isinstance(line, dict) for line in lines(command))


@pytest.mark.parametrize(
    ("command", "rows"),
    [
        ("training step", ["setdiv/f30k-butd-bigru", "maxmatch/f30k-butd-bigru"]),
        ("training epoch", ["vsepp", "vse-infty", "setdiv", "linear"]),
        pytest.param("large_batches", ["InfoNCE", "sigmoid"], marks=pytest.mark.slow),
        pytest.param("threads", ["training of mlp", "evaluation of mlp"], marks=pytest.mark.slow),
    ],
)
def test_what_prints_a_table(command, rows):
    assert list(table(command)) == rows


@pytest.mark.slow
@pytest.mark.parametrize("command", ["cluster extract", "cluster ablate"])
def test_workers_beside_one(command):
    assert [line["workers"] for line in lines(command)] == [1, 2]


@pytest.mark.slow
def test_what_a_scheduler_holds():
    (found,) = lines("cluster scheduler")
    assert found["tasks"] == 20 and found["after_mb"] < 2 * found["before_mb"]


def test_extraction_beside_its_network(tiny_dataset, tmp_path):
    (found,) = lines("extraction images", tiny_dataset())
    assert found["samples"] == 6
    (found,) = lines(
        "extraction captions", tmp_path / "tiny" / "tiny.yaml", "--text-weights", save_bert(tmp_path / "b")
    )
    assert found["samples"] >= 15  # captions are encoded by whole chunks


def test_what_reads_a_store(tmp_path):
    store = small_store.make_store(tmp_path / "s.zarr")
    assert [line.get("order") for line in lines("reading shuffle", store)] == ["memory", "stream", None]
    (images,) = FeatureCache.open(store).set_names("images")
    chosen = "--out", tmp_path / "table", "--images", images, "--captions", "words", "--row", "linear"
    assert list(table("frozen_table", store, *chosen)) == [images]


@pytest.mark.slow
def test_how_a_store_grows():
    pytest.importorskip("faiss")
    rows = table("growth")
    assert rows["recall"]["200"] == "1.00" and float(rows["store, files"]["200"]) < 50


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # aiobotocore leaves its connections to the garbage collector
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_what_an_object_store_costs():
    first, further, opening, *times = lines("object_store")
    assert first["requests"] <= 300 and further["requests"] <= 8 and opening["requests"] <= 2
    assert [line["what"] for line in times] == ["epoch", "extract"]


@pytest.mark.slow
def test_the_server_under_load(tmp_path):
    found = {line["what"]: line for line in lines("service", "--text", f"hf:{save_bert(tmp_path / 'b')}")}
    assert list(found) == ["store", "ready", "alone", "together", "afterwards"]
    assert found["together"]["queries"] >= found["together"]["clients"] == 3
    assert 0 < found["together"]["median"] <= found["together"]["p95"]


def test_the_closed_form_beside_trained_heads(tmp_path):
    store = small_store.make_store(tmp_path / "s.zarr", train=16, val=12, test=12, text="tokens")
    rows = table("few_pairs", store, "--out", tmp_path / "pairs")
    assert list(rows) == ["8", "16"]
    assert all(0 < float(value) <= 100 for row in rows.values() for value in row["`cca`"].split(", "))


def test_what_fit_chooses_and_foretells(tmp_path):
    store = small_store.make_store(tmp_path / "s.zarr", train=96, val=12, test=12, text="tokens")
    (row,) = table("fits", store, "--out", tmp_path / "fits").values()
    assert float(row["best row"]) >= float(row["chosen"]) > 0 and row["in the interval"] in ("0 of 1", "1 of 1")


def test_alignment_beside_trained_heads(tmp_path):
    store = small_store.make_store(tmp_path / "s.zarr", image=("grid", "roi"), text="tokens")
    heads, correlations = printed("alignment", store, "--out", tmp_path / "heads").split("\n\n")
    assert heads.count("\n") == 1 + 2  # a pair of each image set
    assert len(re.findall(r"^\| [^|]* \| -?1\.00 \| -?1\.00 \|$", correlations, re.MULTILINE)) == 3  # of two pairs


def test_disagreement(tmp_path):
    store = small_store.make_store(tmp_path / "s.zarr", text="tokens")
    xret.train(store, recipe="linear", out=tmp_path / "run", settings={"schedule.epochs": 1})
    found = table("disagreement", store, "--captions", "auto", "--head", f"linear={tmp_path / 'run'}")
    assert all(0 <= float(found["linear"][third]) <= 100 for third in ("agree", "in between", "disagree"))


def test_captions_disagree_by_the_mean_over_pairs():
    disagreement = importlib.import_module("disagreement").disagreement
    vectors, owner = (
        torch.randn(9, 4, generator=torch.Generator().manual_seed(0)),
        torch.tensor([0] * 5 + [1] * 3 + [2]),
    )
    found = disagreement(vectors, owner)
    for image in (0, 1):
        cosines = [torch.cosine_similarity(*pair, dim=0) for pair in combinations(vectors[owner == image], 2)]
        assert found[image] == pytest.approx(1 - float(torch.stack(cosines).mean()), abs=1e-6)
    assert found[2] == 0


def test_ways_of_measuring(tmp_path):
    store = small_store.make_store(tmp_path / "s.zarr")
    settings = {"model.dim": 8, "schedule.epochs": 1, "adapter.words.word_dim": 8}
    xret.train(store, recipe="vsepp", out=tmp_path / "run", settings=settings, device="cpu")
    rows = table("measuring", tmp_path / "run")
    whole = xret.evaluate(tmp_path / "run", device="cpu").results[0].mean_recall
    assert float(next(iter(rows.values()))["mR"]) == pytest.approx(whole, abs=0.05)


def test_what_is_not_wanted(tmp_path):
    run = make_run(make_store(make_pictures(tmp_path / "pictures"), tmp_path / "s.zarr"), tmp_path / "run")
    rows = table("negation", run, "--pairs", "red blue,green grey")
    shares = [float(row[name]) for row in rows.values() for name in ("wanted", "unwanted")]
    assert len(shares) == 6 and all(0 < share <= 100 for share in shares)


@pytest.mark.slow
def test_graphs_of_onnx(tmp_path):
    pytest.importorskip("onnxscript")
    options = {"text": "bert", "text_weights": str(save_bert(tmp_path / "bert"))}
    store = make_store(make_pictures(tmp_path / "pictures"), tmp_path / "s.zarr", **options)
    rows = table("onnx_graphs", make_run(store, tmp_path / "run", "linear"), "--data-root", tmp_path / "pictures")
    assert list(rows) == ["the run's own", "float32", "int8"]
    assert float(rows["float32"]["cosine text"]) > 0.99999 > float(rows["int8"]["cosine text"]) > 0.5
    assert rows["float32"]["same ten"] == "6 of 6" and rows["float32"]["mR"] == rows["the run's own"]["mR"]
