"""`xret import`: what it prints, its exit codes, and heads trained on what it brought."""

import json
import re
import shlex

import numpy as np
import pytest
from command_line import refused, run
from embedding_sources import Pairs
from region_sources import World

from xret.pipeline.store import FeatureCache

BRING = ["--encoder", "ViT-B/32"]
# 200 pairs, of which about 20 are tested: a few epochs say nothing of how good a recipe is.
FEW = ["--set=model.dim=16", "--set=data.batch_size=32", "--set=schedule.epochs=1"]


@pytest.fixture
def world(tmp_path):
    return World(tmp_path / "w", ragged=True, captions=5)


def test_imported_regions_train_a_head(world, tmp_path):
    store, out = tmp_path / "s.zarr", tmp_path / "run"
    source = world.tsv(images=world.images[1:])
    words = ["import", world.manifest, "--store", store, "--from", "butd-tsv", "--source", source]
    printed = run(*words, "--on-error", "skip")
    assert "32 images, 160 captions" in printed.stdout
    assert "matched by COCO id, 1 chunk written, 0 there before, 1 failed" in printed.stdout
    failed = f"{world.images[0]['filepath']}/{world.images[0]['filename']}"
    assert f"\n    failed: {failed}: the source has no features of it\n" in printed.stdout
    assert "32/32 images" in printed.stderr
    summary = json.loads(run(*words, "--on-error", "skip", "--json").stdout)
    assert (summary["images"], summary["captions"], summary["matched_by"]) == (32, 160, "COCO id")
    assert [summary["sets"][0][key] for key in ("chunks", "chunks_before", "failed")] == [0, 1, 1]
    run("extract", world.manifest, "--store", store, "--visual", "none", "--text", "words")
    small = ["--set=aggregator.image.head_dim=16", "--set=aggregator.text.head_dim=16"]
    run("train-head", store, "--recipe", "setdiv", "--out", out, *FEW, *small)
    result = json.loads(run("eval", out, "--json").stdout)["results"][0]
    assert (result["images"], result["captions"], result["skipped"]) == (5, 25, 1)
    assert f"images/{summary['sets'][0]['name']}: roi, 5 x 16, float16" in run("cache", "info", store).stdout


def test_arrays_of_hdf5_are_named(world, tmp_path):
    words = ["import", world.manifest, "--store", tmp_path / "s", "--from", "hdf5", "--source", world.hdf5()]
    run(*words, "--arrays", "local=regions/local, length=count,id=name,boxes=regions/boxes")
    assert json.loads(run("cache", "verify", tmp_path / "s", "--json").stdout)["ok"]
    assert "'local' must have the form ROLE=NAME" in refused(*words, "--arrays", "local", code=2)
    assert "id is given twice" in refused(*words, "--arrays", "id=a,id=b", code=2)


def test_mistakes(world, tmp_path):
    words = ["import", world.manifest, "--store", tmp_path / "s", "--source", world.tsv()]
    assert "'tsv' is not one of 'scan'" in refused(*words, "--from", "tsv", code=2)
    for nothing in ("", ","):
        assert "nothing to import" in refused(*words, "--from", "butd-tsv", "--splits", nothing, code=2)
    words = ["import", "--store", tmp_path / "s", "--source", tmp_path]
    assert "needs the data set: name a manifest as DATASET" in refused(*words[:-1], world.tsv(), "--from", "butd-tsv")
    words += ["--from", "embeddings"]
    assert "--encoder 'модель' cannot name a feature set" in refused(*words, "--encoder", "модель")
    assert "--data-root is for a DATASET" in refused(*words, *BRING, "--data-root", tmp_path, code=2)
    assert "holds no embeddings" in refused(*words, *BRING)
    assert not (tmp_path / "s").exists()


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("embeddings")
    source = Pairs(200).clip_retrieval(folder / "e")
    printed = run("import", "--store", folder / "s.zarr", "--from", "embeddings", "--source", source, *BRING)
    assert re.search(r"vit-b-32@\w{8}: 200 imported in [^;]*; read [\d.]+ s, write [\d.]+ s\), 1 chunk", printed.stdout)
    return folder / "s.zarr"


def test_one_model_is_evaluated_without_a_head(store):
    assert json.loads(run("eval", store, "--json").stdout)["results"][0]["rsum"] > 500  # pairs lie close together
    assert re.search(r"images/vit-b-32@\w{8}: global, 16, float16", run("cache", "info", store).stdout)


@pytest.mark.parametrize("recipe", ["mlp", "fusemix"])
def test_recipes_of_global_features_train(store, tmp_path, recipe):
    out = tmp_path / "run"
    blocks = ("grid", "tokens") if recipe == "fusemix" else ()
    run("train-head", store, "--recipe", recipe, "--out", out, *FEW, *(f"--set=adapter.{b}.depth=1" for b in blocks))
    assert json.loads(run("eval", out, "--json").stdout)["results"][0]["rsum"] > 0


def test_a_query_is_the_picture_whose_path_it_ends_in(tmp_path):
    pairs, splits = Pairs(60), [*["train"] * 20, *["val"] * 5, *["test"] * 5] * 2
    pairs.names = [f"{folder}{number}.jpg" for folder in ("", "a/") for number in range(30)]
    run("import", "--store", tmp_path / "s", "--from", "embeddings", "--source",
        pairs.folder(tmp_path / "e", splits=splits), *BRING)  # fmt: skip
    run("train-head", tmp_path / "s", "--recipe", "linear", "--out", tmp_path / "run", *FEW)
    found = {name: run("search", tmp_path / "run", name, "--json").stdout for name in ("27.jpg", "a/27.jpg")}
    assert found["27.jpg"] != found["a/27.jpg"]
    assert run("search", tmp_path / "run", "there/a/27.jpg", "--json").stdout == found["a/27.jpg"]


def test_recipes_of_local_features_say_what_is_missing(store, tmp_path):
    said = refused("train-head", store, "--recipe", "setdiv", "--out", tmp_path / "run", *FEW)
    assert "local features" in said and "mlp" in said
    assert not (tmp_path / "run").exists()


def test_a_repaired_source_takes_the_place_of_one_that_failed(tmp_path):
    pairs, store = Pairs(40), tmp_path / "s.zarr"
    whole = pairs.images.copy()
    pairs.images[3] = np.nan
    words = ["import", "--store", store, "--from", "embeddings", "--source", tmp_path / "e", *BRING]
    pairs.clip_retrieval(tmp_path / "e")
    *_, said = run(*words, "--on-error", "skip").stdout.strip().splitlines()
    commands = re.findall(r"`xret (cache rm [^`]+)`", said)
    assert [re.search(r"(\w+)/vit-b-32@\w{8}$", one)[1] for one in commands] == ["images", "captions"]
    pairs.images = whole
    pairs.clip_retrieval(tmp_path / "e")
    for command in commands:
        run(*shlex.split(command))
    run(*words)
    assert not FeatureCache.open(str(store)).image_set().failures
    pairs.texts[5] = "another caption"
    pairs.clip_retrieval(tmp_path / "e")
    assert "holds other samples" in refused(*words)
