"""`xret cache`: what its commands print, their exit codes, and the sentence each mistake gets."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from parts import part_of, sound_store
from small_extraction import files

from xret.cli import main
from xret.cli.cache import cache
from xret.pipeline.store import FeatureCache

SIZES = {"train": 12, "val": 3, "test": 3}


def run(*words, code=0, answer=None):
    result = CliRunner().invoke(main, ["cache", *(str(word) for word in words)], input=answer)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == code, result.output
    return result


def refused(*words, code=1, answer=None):
    """Return the sentence that a wrong command ends in."""
    last = run(*words, code=code, answer=answer).stderr.strip().splitlines()[-1]
    assert last.startswith("Error: ")
    return last.removeprefix("Error: ")


@pytest.fixture
def store(tmp_path):
    return sound_store(tmp_path / "s.zarr", **SIZES)


def name_of(store, modality="images"):
    return FeatureCache.open(store).set_names(modality)[0]


def test_every_command_has_help_with_an_example():
    assert sorted(cache.commands) == ["export", "info", "ls", "merge", "rm", "verify"]
    for name in cache.commands:
        assert f"xret cache {name} " in run(name, "--help").stdout.split("Usage:")[1].split("\n", 1)[1]
        assert f"xret cache {name} " in run("--help").stdout


def test_info_tells_of_compression(store):
    facts = json.loads(run("info", store, "--json").stdout)["sets"][0]
    lines = run("info", store).stdout.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("images/"))
    assert lines[at].startswith(f"images/{facts['name']}: grid, 4 x 16, float16, ")
    spent = f"{facts['bytes_per_value']:.2f} bytes a stored value where raw are 2"
    assert (
        lines[at + 1] == f"  compression: none, {spent}; 43.8% of the values are padding, as all shards have one length"
    )
    assert lines[at + 2] == "  shards done: train 2/2, val 1/1, test 1/1"
    assert "  compression: none" in run("info", part_of(f"{store}2", **SIZES)).stdout.splitlines()


def test_verify_ends_with_what_to_do(store):
    assert run("verify", store).stdout == f"{store}: 8 shards read, sound\n"
    name, captions = name_of(store), name_of(store, "captions")
    shard = Path(store) / "images" / name / "global" / "c" / "0" / "0"
    shard.write_bytes(b"?" + shard.read_bytes()[1:])
    lines = run("verify", store, code=1).stdout.splitlines()
    assert lines[0] == f"damaged: images/{name}/global, shard 0, samples [0, 8]"
    assert lines[1] == f"{store}: 8 shards read, 1 damaged part"
    assert lines[2].startswith(
        f"To repair: run `xret extract small.yaml --store {store} … --repair`, with the other opt"
    )
    (Path(store) / "captions" / captions / "zarr.json").write_text("{")
    lines = run("verify", store, code=1).stdout.splitlines()
    remove = f"xret cache rm {store} captions/{captions}"
    assert lines[-2] == f"To repair: run `{remove}`, then extract or import that set again."
    assert "--repair" in lines[-1]
    run(*remove.split()[2:], "--yes")
    assert len(run("verify", store, code=1).stdout.splitlines()) == 3


def test_ls_tells_of_what_killed_writers_left(store, tmp_path):
    assert not run("ls", store).stderr
    for folder in (Path(store) / "samples", tmp_path):
        (folder / ".zarr.json.0a1b2c3d.partial").touch()
        place = store if folder != tmp_path else tmp_path
        assert f"Note: 1 partial file in {place}, such as .zarr.json.0a1b2c3d.partial: of a" in run("ls", place).stderr


def test_ls_of_a_store(store):
    (facts,) = json.loads(run("ls", store, "--json").stdout)
    lines = run("ls", store).stdout.splitlines()
    images, captions = (f"{features['bytes'] / 1e3:.1f} kB" for features in facts["sets"])
    assert [re.split(" {2,}", line) for line in lines] == [
        [f"images/{name_of(store)}", "grid", "4 x 16", "float16", images, "100% done"],
        [f"captions/{name_of(store, 'captions')}", "tokens", "12", "float16", captions, "100% done"],
    ]
    assert lines[0].index("float16") == lines[1].index("float16")
    assert "33% done" in run("ls", part_of(f"{store}2", "val", "test", **SIZES)).stdout


def test_ls_of_a_folder(store, tmp_path):
    part_of(tmp_path / "a.zarr", "train", **SIZES)
    (Path(store) / "zarr.json").write_text("{")
    lines = run("ls", tmp_path).stdout.splitlines()
    assert [line.split()[0] for line in lines] == [f"{tmp_path}/a.zarr", f"{store}:"]
    assert lines[0].split()[1] == "small"
    assert "captions/states@" in lines[0]
    assert "is damaged or missing" in lines[1]
    facts = json.loads(run("ls", tmp_path, "--json").stdout)
    assert [list(one)[:2] for one in facts] == [["store", "dataset"], ["store", "error"]]
    assert "damaged" in refused("ls", store)
    assert "neither a feature cache nor a folder that holds one" in refused("ls", tmp_path / "none")
    (tmp_path / "empty").mkdir()
    assert "neither" in json.loads(run("ls", tmp_path / "empty", "--json", code=1).stderr)["error"]


def test_ls_of_a_store_without_sets(store):
    for modality in ("images", "captions"):
        run("rm", store, f"{modality}/{name_of(store, modality)}", "--yes")
    assert run("ls", store).stdout == ""
    assert "no feature set" in run("ls", Path(store).parent).stdout


def test_rm_asks(store):
    before, path = files(store), f"images/{name_of(store)}"
    for answer in ("n\n", "\n", ""):
        sentence = refused("rm", store, "grid", answer=answer)
        assert sentence == f"{path} was not removed; agree, or give --yes to remove it without being asked"
    assert "give --yes" in json.loads(run("rm", store, "grid", "--json", code=2).stderr)["error"]
    assert files(store) == before
    result = run("rm", store, "grid", answer="y\n")
    assert f"Remove {path} (" in result.stderr
    assert result.stdout.startswith(f"{path}: removed, ")
    assert not (Path(store) / path).exists()
    assert "no feature set fits 'grid'" in refused("rm", store, "grid", "--yes")


def test_rm_as_json(store):
    name = name_of(store, "captions")
    size = sum(p.stat().st_size for p in (Path(store) / "captions" / name).rglob("*") if p.is_file())
    out = json.loads(run("rm", store, "states", "--yes", "--json").stdout)
    assert out == {"removed": f"captions/{name}", "bytes": size}


def test_merge(store, tmp_path):
    a, b = part_of(tmp_path / "a", "train", **SIZES), part_of(tmp_path / "b", "val", "test", **SIZES)
    result = run("merge", tmp_path / "c", a, b)
    assert f"images/{name_of(store)}: 4 shards copied, 0 there before, 4/4 done, 0 failed" in result.stdout
    assert "merge: 8/8 shards" in result.stderr
    assert files(tmp_path / "c") == files(store)
    summary = json.loads(run("merge", a, b, "--json").stdout)
    assert [(s["shards"], s["shards_before"]) for s in summary["sets"]] == [(2, 2), (2, 2)]
    assert files(a) == files(store)
    assert "no feature cache is there" in refused("merge", tmp_path / "new", tmp_path / "none")
    (tmp_path / "file").write_text("mine")
    assert "is a file, and a store is a folder" in refused("merge", tmp_path / "file", a)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "x").write_text("mine")
    assert "is not empty and holds no feature cache" in refused("merge", tmp_path / "mine", a)
    assert "Missing argument 'SOURCE...'" in refused("merge", a, code=2)
    assert not (tmp_path / "new").exists()


def test_export(store, tmp_path):
    out = run("export", store, "--to", "npy", "--out", tmp_path / "npy", "--splits", "train, test").stdout.splitlines()
    assert out[0].startswith(f"{tmp_path / 'npy'}: {name_of(store)}, ")
    assert out[1:] == ["  train: 12 images, 30 captions", "  test: 3 images, 8 captions"]
    assert np.load(tmp_path / "npy" / "test_ims.npy").shape == (8, 4, 16)
    words = ["export", store, "--to", "hdf5", "--out", tmp_path / "x.h5", "--set", "grid", "--set", "captions/st"]
    summary = json.loads(run(*words, "--json").stdout)
    assert summary["sets"] == [name_of(store), name_of(store, "captions")]
    assert summary["bytes"] == (tmp_path / "x.h5").stat().st_size
    assert "exists already" in refused(*words)
    assert "is a folder, and a file is written" in refused(*words[:5], tmp_path)
    assert "did you mean 'captions/states@" in refused(*words[:5], tmp_path / "y.h5", "--set", "captions/sttes@")


def test_export_tells_what_it_left_out(tmp_path):
    store = sound_store(tmp_path / "s", failed={0: "0.jpg: empty"}, **SIZES)
    out = run("export", store, "--to", "hdf5", "--out", tmp_path / "x.h5").stdout
    assert "train: 11 images, 28 captions, 1 failed image left out" in out


def test_mistakes_of_export(store, tmp_path):
    words = ["export", store, "--out", tmp_path / "x"]
    assert "'zip' is not one of 'npy', 'hdf5'" in refused(*words, "--to", "zip", code=2)
    assert "Missing option '--to'" in run(*words, code=2).stderr
    assert "has no split dev; it has train, val, test" in refused(*words, "--to", "npy", "--splits", "dev")
    assert "there is no split to export" in refused(*words, "--to", "npy", "--splits", "", code=2)
    blocked = tmp_path / "file"
    blocked.write_text("mine")
    sentence = refused("export", store, "--to", "npy", "--out", blocked / "x" / "y")
    assert sentence == f"{blocked}/x/y cannot be made, because {blocked} is a file; choose another --out"
    assert not (tmp_path / "x").exists()
