"""`xret index`: what it builds, prints and refuses, and that a search by it finds what an exact one finds."""

import json
import re
import shutil
from contextlib import closing

import pytest
import torch
from click.testing import CliRunner
from distributed import LocalCluster
from small_store import make_store

from xret.cli import main
from xret.heads.recipes.recipe import load_recipe
from xret.heads.retrieval.index.candidates import Effort
from xret.heads.retrieval.index.search import Index
from xret.heads.retrieval.index.sharded import ShardedSearch, shards_of
from xret.heads.retrieval.retriever import Query, Retriever
from xret.heads.training.training import train

SETTINGS = ["model.dim=16", "data.batch_size=16", "adapter.words.word_dim=8", "schedule.epochs=1"]
HEADS = [f"aggregator.{side}.head_dim=16" for side in ("image", "text")]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("runs")
    store = make_store(folder / "small.zarr")
    train(store, load_recipe("setdiv", [*SETTINGS, *HEADS]), folder / "setdiv", device="cpu")
    train(store, load_recipe("vsepp", SETTINGS), folder / "vsepp", device="cpu")
    yield folder
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def built(runs):
    out = runs / "setdiv.index"
    report = json.loads(succeeds("index", runs / "setdiv", "--out", out, "--device", "cpu", "--json"))
    return out, report


def call(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def succeeds(*arguments):
    result = call(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def refusal(*arguments, code=1):
    result = call(*arguments)
    assert result.exit_code == code, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.stderr


def test_a_search_by_the_index_finds_what_an_exact_one_finds(runs, built):
    out, report = built
    assert [report[side]["samples"] for side in ("images", "captions")] == [12, 30]
    assert [report[side]["elements"] for side in ("images", "captions")] == [48, 120]
    exact, indexed = (Retriever(runs / "setdiv", device="cpu", index=index) for index in (None, out))
    embedding = exact.gallery.captions[:1], exact.gallery.images[:1]
    for query, answers, count in ((embedding[0], "images", 12), (embedding[1], "captions", 30)):
        expected, found = (retriever.search(Query(query, answers), count) for retriever in (exact, indexed))
        assert len(found) == count  # as many as there are: every sample is a candidate
        assert sorted(hit.id for hit in found) == sorted(hit.id for hit in expected)
        scores = {hit.id: hit.score for hit in expected}
        assert [hit.score for hit in found] == pytest.approx([scores[hit.id] for hit in found], abs=1e-5)
        assert found[0].id == expected[0].id
    index = Index(out / "images")
    assert [index.items.labels[row] for row in range(12)] == exact.gallery.file_names
    texts = Index(out / "captions").items
    assert [texts.labels[row] for row in range(30)] == exact.gallery.texts


@pytest.mark.parametrize("kind", ["flat", "hnsw", "pq"])
def test_what_is_printed(runs, tmp_path, kind):
    out = tmp_path / "deep" / "index"
    lines = succeeds("index", runs / "vsepp", "--out", out, "--kind", kind, "--device", "cpu").splitlines()
    assert lines[0] == f"{out}: index of {runs / 'vsepp'}"
    assert lines[1].startswith(f"images   12 with 12 elements, {kind}, 1 list, ")
    assert re.search(
        r", \d+\.\d kB; recall of the exact top 10 1\.000 with \d+ probes? and \d+ candidates an", lines[1]
    )
    assert lines[2].startswith(f"captions 30 with 30 elements, {kind}, ")
    assert len(lines) == 3


def test_an_effort_that_is_too_little_is_said(runs, tmp_path):
    out = tmp_path / "index"
    given = ("--kind", "flat", "--effort", 1, 2, "--recall", 0.9, "--device", "cpu")
    lines = succeeds("index", runs / "vsepp", "--out", out, *given).splitlines()
    assert "recall of the exact top 10 0.200 with 1 probe and 2 candidates an element" in lines[1]
    assert lines[2].strip() == "below the 0.9 that was wanted: try another --kind, or accept it"
    assert Index(out / "images").effort == Effort(1, 2)


def test_another_split_is_added_once(runs, built, tmp_path):
    out = shutil.copytree(built[0], tmp_path / "index")
    report = json.loads(
        succeeds("index", runs / "setdiv", "--out", out, "--split", "val", "--add", "--device", "cpu", "--json")
    )
    assert report["images"]["samples"] == 24
    retriever = Retriever(runs / "setdiv", device="cpu", split="val")
    index, compare = Index(out / "images", retriever.index_facts("images")), retriever.comparison("images")
    expected = index.hits(retriever.gallery.captions[:1], 24, compare)
    assert {hit.file_name for hit in expected} >= set(retriever.gallery.file_names)
    by_index = Retriever(runs / "setdiv", device="cpu", index=out)  # of the split test, but finds what was added
    assert by_index.search(Query(retriever.gallery.captions[:1], "images"), 24) == expected
    sentence = refusal("index", runs / "setdiv", "--out", out, "--split", "val", "--add", "--device", "cpu")
    assert "has these samples already" in sentence
    usage = refusal("index", runs / "setdiv", "--out", out, "--add", "--kind", "flat", code=2)
    assert "--kind was settled when the index was built; leave it out with --add." in usage


def test_an_addition_that_was_stopped_between_the_modalities_goes_on(runs, built, tmp_path):
    out = shutil.copytree(built[0], tmp_path / "index")
    command = ("index", runs / "setdiv", "--out", out, "--split", "val", "--add", "--device", "cpu")
    succeeds(*command)
    shutil.rmtree(out / "captions")
    shutil.copytree(built[0] / "captions", out / "captions")
    assert len(succeeds(*command).splitlines()) == 2
    assert [len(Index(out / side)) for side in ("images", "captions")] == [24, len(Index(out / "captions"))]
    assert len(Index(out / "captions")) > 30


def test_refusals(runs, built, tmp_path):
    run, (out, _) = runs / "setdiv", built
    before = sorted(path.name for path in runs.iterdir())
    assert "exists; take another --out" in refusal("index", run, "--out", out)
    assert "is an index of another run" in refusal(
        "index", runs / "vsepp", "--out", out, "--split", "val", "--add", "--device", "cpu"
    )
    assert "is not an index" in refusal("index", run, "--out", tmp_path / "none", "--add", "--device", "cpu")
    assert "has no split 'tset'" in refusal("index", run, "--out", tmp_path / "a", "--split", "tset", "--device", "cpu")
    assert "is no run" in refusal("index", tmp_path, "--out", tmp_path / "a")
    for seed in (-1, 2**31):
        assert f"{seed} is not in the range" in refusal("index", run, "--out", tmp_path / "a", "--seed", seed, code=2)
    assert list(tmp_path.iterdir()) == []
    assert sorted(path.name for path in runs.iterdir()) == before


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning:distributed")
def test_a_store_a_shard(runs, tmp_path):
    run, other = runs / "setdiv", make_store(tmp_path / "other.zarr", train=0, val=0, test=9)
    stores = ("--store", runs / "small.zarr", "--store", other)
    with LocalCluster(n_workers=1, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster:
        given = (*stores, "--kind", "flat", "--device", "cpu", "--scheduler", cluster.scheduler_address)
        lines = succeeds("index", run, "--out", tmp_path / "there", *given).splitlines()
        assert [line.split(":")[0] for line in lines[::3]] == [f"{tmp_path}/there/shard-000{n}" for n in range(2)]
        succeeds("index", run, "--out", tmp_path / "here", *stores, "--kind", "flat", "--device", "cpu")
        retrievers = [Retriever(run, store=str(store), device="cpu") for store in stores[1::2]]
        weights = {"weights": retrievers[0].index_facts("images")["weights"]}
        compare = retrievers[0].comparison("images")
        names = [name for retriever in retrievers for name in retriever.gallery.file_names]
        images = torch.cat([retriever.gallery.images for retriever in retrievers])
        query = retrievers[0].gallery.captions[:1]
        scores = compare(query, images)[0].detach()
        for folder, scheduler in ((tmp_path / "there", cluster.scheduler_address), (tmp_path / "here", None)):
            shards = [shard / "images" for shard in shards_of(folder)]
            with closing(ShardedSearch(shards, weights, compare, scheduler)) as search:
                found = search.hits(query, 21)  # all there are
            assert sorted(hit.file_name for hit in found) == sorted(names)
            assert [hit.score for hit in found] == pytest.approx(scores.sort(descending=True).values.tolist(), abs=1e-5)
        clients = set(cluster.scheduler.clients)
        query = ("search", run, "red cube", "--index", tmp_path / "there", "--scheduler", cluster.scheduler_address)
        assert ": 21 images" in succeeds(*query, "--device", "cpu")
        assert set(cluster.scheduler.clients) <= clients  # it has left
    assert "leave --add" in refusal("index", run, "--out", tmp_path / "there", *stores, "--add", code=2)
