"""`xret import --from clip-retrieval`: what a user can do with embeddings that others computed, and what not."""

import json
import re
import shlex

import numpy as np
import pytest
from command_line import refused, run
from embedding_sources import Pairs

from xret.pipeline.store import FeatureCache

BRING = ["--encoder", "ViT-B/32"]
# 200 pairs, of which about 20 are tested: a few epochs say nothing of how good a recipe is.
FEW = ["--set=model.dim=16", "--set=data.batch_size=32", "--set=schedule.epochs=2"]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("embeddings")
    source = Pairs(200).clip_retrieval(folder / "e")
    printed = run("import", "--store", folder / "s.zarr", "--from", "clip-retrieval", "--source", source, *BRING)
    assert re.search(
        r"vit-b-32@\w{8}: 200 imported in [^;]*; read [\d.]+ s, write [\d.]+ s\), \d+ shards? w", printed.stdout
    )
    return folder / "s.zarr"


def known_text(store):
    cache = FeatureCache.open(str(store))
    return cache.caption_texts(*cache.captions_of(*cache.splits["test"]))[0]


def test_one_model_is_evaluated_without_a_head(store):
    found = json.loads(run("eval", store, "--json").stdout)
    assert found["results"][0]["rsum"] > 500  # pairs lie close to each other


@pytest.mark.parametrize("recipe", ["linear", "mlp", "lit", "sail", "fusemix"])
def test_recipes_of_global_features_train_and_search(store, tmp_path, recipe):
    out = tmp_path / "run"
    blocks = {"fusemix": ("grid", "tokens"), "lit": ("tokens",)}.get(recipe, ())
    words = ["train-head", store, "--recipe", recipe, "--out", out, *FEW]
    words += [f"--set=adapter.{kind}.depth=1" for kind in blocks]
    run(*words)
    assert json.loads(run("eval", out, "--json").stdout)["results"][0]["rsum"] > 0
    run(*words, "--resume")
    if recipe == "mlp":
        text = next(iter(json.loads(run("search", out, known_text(store), "--json").stdout)))
        assert set(text) == {"rank", "id", "score", "file_name"}
        said = refused("search", out, "a text that is nowhere")
        assert "was imported, so xret has no encoder for new captions; train on features of `xret extract`" in said
        assert said.endswith("`, search with a caption of split 'test', or name another --split")
        cache = FeatureCache.open(str(store))
        (name,) = cache.file_names(first := cache.splits["test"][0], first + 1)
        assert run("search", out, "--image", f"photos/{name}", "--json").stdout
        said = refused("search", out, "--image", "nowhere.jpg")
        assert said.endswith("`, search with a picture of split 'test', or name another --split")
        run("index", out, "--out", tmp_path / "index")
        run("report", out, "--out", tmp_path / "r.html")
        run("eval", out, "--diagnostics")
        run("export", out, "--out", tmp_path / "e.safetensors")
        run("ablate", store, "--recipe", "mlp", "--vary", "optimizer.lr=0.001", "--out", tmp_path / "a", *FEW)


def test_images_whose_captions_failed_do_not_stop_a_training_that_blends(tmp_path):
    pairs, store, out = Pairs(120), tmp_path / "s.zarr", tmp_path / "run"
    pairs.captions[::7] = np.nan
    source = pairs.clip_retrieval(tmp_path / "e")
    run("import", "--store", store, "--from", "clip-retrieval", "--source", source, *BRING, "--on-error", "skip")
    cache = FeatureCache.open(str(store))
    assert set(cache.file_names(*cache.splits["train"])) & set(cache.caption_set().failed)
    words = ["train-head", store, "--recipe", "fusemix", "--out", out, *FEW, "--set=schedule.epochs=3"]
    run(*words, *(f"--set=adapter.{kind}.depth=1" for kind in ("grid", "tokens")))
    assert json.loads(run("eval", out, "--json").stdout)["results"][0]["rsum"] > 0


@pytest.mark.parametrize("recipe", ["setdiv", "vse-infty", "scan", "pcmepp"])
def test_recipes_of_local_features_say_what_is_missing(store, tmp_path, recipe):
    said = refused("train-head", store, "--recipe", recipe, "--out", tmp_path / "run", *FEW)
    assert re.match(rf"recipe '{recipe}' reads local features of images \(aggregator.image '[\w-]+'\), and these", said)
    assert said.endswith("take linear, mlp, lit, sail or fusemix, or --set aggregator.image.name=global")
    assert not (tmp_path / "run").exists()


def test_what_is_there_is_listed_and_sound(store):
    assert re.search(r"images/vit-b-32@\w{8}: global, 16, float16", run("cache", "info", store).stdout)
    assert run("cache", "verify", store).exit_code == 0


def test_a_repaired_source_takes_the_place_of_one_that_failed(tmp_path):
    pairs, store = Pairs(40), tmp_path / "s.zarr"
    whole = pairs.images.copy()
    pairs.images[3] = np.nan
    words = ["import", "--store", store, "--from", "clip-retrieval", "--source", tmp_path / "e", *BRING]
    pairs.clip_retrieval(tmp_path / "e")
    *_, said = run(*words, "--on-error", "skip").stdout.strip().splitlines()
    commands = re.findall(r"`xret (cache rm [^`]+)`", said)
    assert [re.search(r"(\w+)/vit-b-32@\w{8}$", one)[1] for one in commands] == ["images", "captions"]
    assert said.endswith(", and import again.")
    pairs.images = whole
    pairs.clip_retrieval(tmp_path / "e")
    for command in commands:
        run(*shlex.split(command), "--yes")
    run(*words)
    assert not FeatureCache.open(str(store)).image_set().failed


def test_a_changed_caption_without_a_manifest_wants_another_store(tmp_path):
    pairs = Pairs(40)
    words = ["import", "--store", tmp_path / "s.zarr", "--from", "clip-retrieval", "--source", tmp_path / "e", *BRING]
    pairs.clip_retrieval(tmp_path / "e")
    run(*words)
    pairs.texts[5] = "another caption"
    pairs.clip_retrieval(tmp_path / "e")
    assert refused(*words).endswith("; choose another store")


def test_what_does_not_belong_together_is_wrong_usage(tmp_path):
    words = ["import", "--store", tmp_path / "s", "--source", tmp_path]
    assert "needs the data set: name a manifest as DATASET" in refused(*words, "--from", "scan", code=2)
    said = refused(*words, "--from", "clip-retrieval")
    assert "needs the name of the model that made the embeddings" in said
    said = refused(*words, "--from", "clip-retrieval", "--encoder", "модель")
    assert said == "--encoder 'модель' cannot name a feature set; use letters from a to z, digits, '.', '_', '-'"
    said = refused(*words, "--from", "clip-retrieval", *BRING, "--data-root", tmp_path, code=2)
    assert said == "--data-root is for a DATASET, which is not given; leave it out"
    assert "holds no images.npy" in refused(*words, "--from", "embeddings", *BRING)
    assert "holds no img_emb_*.npy" in refused(*words, "--from", "clip-retrieval", *BRING)
