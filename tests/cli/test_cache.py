"""`xret cache`: what its commands print, their exit codes, and the sentence each mistake gets."""

import csv
import json
import re
from pathlib import Path

import command_line
import pytest
from small_extraction import files
from small_store import make_store

from xret.pipeline.store import FeatureCache

SIZES = {"train": 12, "val": 3, "test": 3, "text": "tokens"}


def run(*words, **options):
    return command_line.run("cache", *words, **options)


def refused(*words, **options):
    return command_line.refused("cache", *words, **options)


@pytest.fixture
def store(tmp_path):
    return make_store(tmp_path / "s.zarr", **SIZES)


def name_of(store, modality="images"):
    return FeatureCache.open(store).set_names(modality)[0]


def test_info(store):
    facts = json.loads(run("info", store, "--json").stdout)["sets"][0]
    lines = run("info", store).stdout.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("images/"))
    assert lines[at].startswith(f"images/{facts['name']}: grid, 4 x 16, float16, ")
    assert lines[at + 1] == "  chunks done: train 2/2, val 1/1, test 2/2"


def test_verify_ends_with_what_to_do(store):
    leak, summary = run("verify", store).stdout.splitlines()
    assert leak == run("info", store).stdout.splitlines()[-1] and "1 of 8 captions of test" in leak
    assert summary == f"{store}: 6 chunks read, sound"
    name, captions = name_of(store), name_of(store, "captions")
    chunk = Path(store) / "images" / name / "global/c.0.0"
    chunk.write_bytes(b"?" + chunk.read_bytes()[1:])
    damaged, summary, advice = run("verify", store, code=1).stdout.splitlines()
    assert damaged == f"damaged: images/{name}/global, chunk 0, samples [0, 8]"
    assert summary == f"{store}: 6 chunks read, 1 damaged part"
    assert advice == "To repair: run the same `xret extract` or `xret import` with --repair."
    (Path(store) / "captions" / captions / "zarr.json").write_text("{")
    *_, last = run("verify", store, code=1).stdout.splitlines()
    remove = f"xret cache rm {store} captions/{captions}"
    assert last == f"To repair: `{remove}`, then extract it again."
    run(*remove.split()[2:])
    assert len(run("verify", store, code=1).stdout.splitlines()) == 3


@pytest.mark.parametrize("how", ["lost", "damaged", "metadata"])
def test_samples_at_fault_are_no_set_to_remove_or_repair(store, how):
    file = Path(store, "samples", "caption", "zarr.json" if how == "metadata" else "c.0")
    file.unlink() if how == "lost" else file.write_bytes(file.read_bytes().replace(b"a", b"b"))
    *_, advice = run("verify", store, code=1).stdout.splitlines()
    assert advice == "To repair: copy the store again, or extract into another --store."


def test_ls_of_a_store(store):
    (facts,) = json.loads(run("ls", store, "--json").stdout)
    lines = run("ls", store).stdout.splitlines()
    images, captions = (f"{features['bytes'] / 1e3:.1f} kB" for features in facts["sets"])
    assert [re.split(" {2,}", line.rstrip()) for line in lines] == [
        [f"images/{name_of(store)}", "grid", "4 x 16", "float16", images, "100% done"],
        [f"captions/{name_of(store, 'captions')}", "tokens", "12", "float16", captions, "100% done"],
    ]
    assert lines[0].index("float16") == lines[1].index("float16")
    assert "67% done" in run("ls", make_store(f"{store}2", splits=("train",), **SIZES)).stdout
    for modality in ("images", "captions"):
        run("rm", store, f"{modality}/{name_of(store, modality)}")
    assert run("ls", store).stdout == ""
    assert "no feature set" in run("ls", Path(store).parent).stdout


def test_ls_of_a_folder(store, tmp_path):
    make_store(tmp_path / "a.zarr", **SIZES)
    (Path(store) / "zarr.json").write_text("{")
    result = run("ls", tmp_path)
    (line,) = result.stdout.splitlines()
    assert line.split()[:2] == [f"{tmp_path}/a.zarr", "small"]
    assert "captions/states@" in line
    assert f"{store}/zarr.json is missing or damaged" in result.stderr
    facts = json.loads(run("ls", tmp_path, "--json").stdout)
    assert [list(one)[:2] for one in facts] == [["store", "dataset"], ["store", "error"]]
    assert "damaged" in refused("ls", store)
    (tmp_path / "empty").mkdir()
    for place in ("none", "empty"):
        assert "neither a feature store nor a folder that holds one" in refused("ls", tmp_path / place)


def test_leaks_are_printed_and_all_are_in_the_file(store, tmp_path):
    words = ["leaks", store, "--threshold", "0.2"]
    pairs = json.loads(run(*words, "--json").stdout)["pairs"]
    *lines, last = run(*words, "--out", tmp_path / "near.csv").stdout.splitlines()
    with (tmp_path / "near.csv").open(newline="") as file:
        rows = [row | {"cosine": float(row["cosine"])} for row in csv.DictReader(file)]
    assert rows == pairs and len(lines) == len(pairs) > 2
    assert f"{len(pairs)} pairs" in last
    assert lines[0].split() == [f"{pairs[0]['cosine']:.4f}", *list(pairs[0].values())[1:5]]
    assert not json.loads(run("leaks", store, "--threshold", "1", "--json").stdout)["pairs"]
    assert "no feature set fits 'none'" in refused("leaks", store, "--set", "none")


def test_rm_wants_the_whole_name(store):
    before, path = files(store), f"images/{name_of(store)}"
    said = refused("rm", store, "grid")
    assert "no feature set fits 'grid'" in said and path in said
    assert files(store) == before
    size = sum(p.stat().st_size for p in (Path(store) / path).rglob("*") if p.is_file())
    assert json.loads(run("rm", store, path, "--json").stdout) == {"removed": path, "bytes": size}
    assert not (Path(store) / path).exists()
    assert "no feature set fits 'grid'" in refused("rm", store, "grid")
