"""`xret index`: what it builds, prints and refuses, and that a search by it finds what an exact one finds."""

import json

import pytest
from click.testing import CliRunner
from small_runs import make_pictures, make_run, make_store

from xret.cli import main

pytest.importorskip("faiss", reason="FAISS is not here: pip install 'xret[index]'")
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return make_run(make_store(make_pictures(folder / "pictures"), folder / "s.zarr"), folder / "run", "setdiv")


def call(*words, code=0):
    result = CliRunner().invoke(main, [*map(str, words), "--device", "cpu"], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result


def test_a_search_by_the_index_prints_what_an_exact_one_prints(run, tmp_path):
    report = json.loads(call("index", run, "--out", tmp_path / "index", "--json").stdout)
    assert (report["images"]["samples"], report["images"]["elements"]) == (6, 24)
    for query in (["red beside blue"], ["--image", run.parent / "pictures/images/18.png"]):
        exact, indexed = (call("search", run, *query, *more) for more in ([], ["--index", tmp_path / "index"]))
        assert indexed.stdout == exact.stdout


def test_what_is_printed(run, tmp_path):
    out = tmp_path / "deep" / "index"
    lines = call("index", run, "--out", out, "--factory", "HNSW8,SQ8").stdout.splitlines()
    assert lines[0] == f"{out}: index of {run}"
    assert lines[1].startswith("images   6 with 24 elements, HNSW8,SQ8, ")
    assert lines[1].endswith("; recall of the exact top 10 1.000, effort 1")
    assert lines[2].startswith("captions 9 with 36 elements, ")
    coarse = ("--factory", "PCA1,SQ4", "--recall", 1)
    (said,) = {*call("index", run, "--out", tmp_path / "coarse", *coarse).stdout.splitlines()[3::2]} or {""}
    assert said == "" or "below the 1.0 that was wanted" in said


def test_refusals(run, tmp_path):
    (tmp_path / "there").mkdir()
    for words, sentence in (
        ((run, "--out", tmp_path / "there"), "there exists; take another --out"),
        ((run, "--out", tmp_path / "a", "--factory", "Nix"), "FAISS cannot build 'Nix'"),
        ((run, "--out", tmp_path / "a", "--split", "tset"), "has no split 'tset'"),
        ((tmp_path, "--out", tmp_path / "a"), "is no run"),
    ):
        assert sentence in call("index", *words, code=1).stderr
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
