"""`xret extract` and `xret import`: what they print, their exit codes, and heads trained on what was imported."""

import json
import re
import shlex

import numpy as np
import pytest
from command_line import refused, run
from embedding_sources import Pairs
from region_sources import World
from small_checkpoints import save_text_model
from small_disk import small_disk

from xret.pipeline.store import FeatureCache

SMALL = ("--visual", "resnet18", "--visual-weights", "random:0", "--image-size", "64", "--text", "none")


@pytest.fixture
def extract(tiny_dataset, tmp_path):
    start = ["extract", tiny_dataset(), "--store", tmp_path / "s"]
    return lambda *words, **options: run(*start, *words, **options)


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        ("--workers two", 2, "'two' is neither a number nor the address of a Dask scheduler"),
        ("--layers 6,x", 2, "'6,x' names no layers; give one, as 9, or several, as 6,9,12"),
        ("--pool 4", 2, "'4' is no window; give height and width in cells, as 2x2"),
        ("--on-error stop", 2, "'stop' is not one of"),
        ("--price 2", 2, "--price is for --plan"),
        ("--device cuda:77", 1, "is missing"),
        ("--visual hf:../absent --text none", 1, "'../absent': there is no such folder"),
    ],
)
def test_what_cannot_be_is_refused_and_leaves_nothing(words, code, sentence, extract, tmp_path):
    assert sentence in extract(*words.split(), code=code).stderr
    assert not (tmp_path / "s").exists()


def test_a_plan_is_printed_and_writes_nothing(extract, tmp_path):
    printed = extract(*SMALL, "--plan", "--price", "2")
    lines = printed.stdout.splitlines()
    assert printed.stderr == "measuring on 32 pictures\n"
    assert "32 images" in lines[1] and lines[2].startswith("in all ") and "at 2 an hour of a worker" in lines[2]
    assert not (tmp_path / "s").exists()


def test_views_and_threads(extract, tmp_path):
    extract(*SMALL, "--views", "dihedral:3", "--splits", "val", "--workers", "2")
    for command in ("info", "ls"):
        assert "3 views x 4 x 512" in run("cache", command, tmp_path / "s").stdout


def test_sets_of_one_network_can_be_told_apart(extract, tmp_path):
    for seed, pool in ((1, "2x2"), (2, "1x2")):
        weights = ("--visual-weights", f"random:{seed}", "--pool", pool)
        extract(*SMALL, *weights, "--splits", "val")
    for command in ("info", "ls"):
        shown = run("cache", command, tmp_path / "s").stdout
        assert "64 pixels, weights random:1, pool [2, 2]" in shown and "weights random:2, pool [1, 2]" in shown


def test_what_failed_is_named_and_what_to_do(extract, tmp_path):
    extract("--visual", "none", "--text", "words")
    pictures = next(tmp_path.rglob("1.jpg")).parent
    for number in (1, 3, 5, 7):
        (pictures / f"{number}.jpg").write_bytes(b"")
    for _ in range(2):  # the second finds everything done
        lines = extract(*SMALL, "--on-error", "skip").stdout.splitlines()
        assert lines[0] == f"tiny: 32 images, 80 captions in {tmp_path / 's'}"
        assert lines[1].endswith(" there before, 4 failed")
        assert [line.split(":")[1].strip() for line in lines[2:5]] == ["1.jpg", "3.jpg", "5.jpg"]
        assert lines[5] == "    and 1 more"
        assert lines[6].endswith("; repair those files and run the same command with --repair.")
        assert len(lines) == 7


@pytest.mark.parametrize("under", ["file", "file/deeper/s", "mine"])
def test_a_store_that_cannot_be_made_is_refused_before_the_encoders_are(under, tiny_dataset, tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "x").write_text("mine")
    dataset = tiny_dataset()
    if under != "file/deeper/s":
        (dataset.parent / "captions.json").write_text("no captions")  # which are not even read
    said = refused("extract", dataset, "--store", tmp_path / under, "--visual", "no-such-network")
    assert "choose another store" in said
    assert "no-such-network" not in said
    if under != "file/deeper/s":
        words = ("--from", "embeddings", "--source", tmp_path / "file", "--encoder", "x")  # which are none
        assert "choose another store" in refused("import", "--store", tmp_path / under, *words)


def test_both_towers_of_a_checkpoint(extract, tmp_path, monkeypatch):
    folder = save_text_model(tmp_path / "clip", "clip")
    for done in ("encoded", "0 encoded"):
        assert done in extract("--encoder", f"hf:{folder}", "--prompt", "a photo of {}", "--pool", "2x2").stdout
        monkeypatch.setattr("xret.pipeline.extraction.extraction.load_encoders", None)  # all is done
    cache = FeatureCache.open(str(tmp_path / "s"))
    images, captions = cache.image_set("clip"), cache.caption_set("clip")
    assert images.space == captions.space is not None
    assert (images.grid, images.rows, images.global_channels) == ((2, 2), 4, captions.global_channels)
    assert captions.identity["preprocessing"]["prompt"] == "a photo of {}"


def test_a_full_disk_is_named_and_the_same_command_goes_on(extract, tmp_path):
    with small_disk(20_000):
        said = extract(*SMALL, "--dtype", "float32", code=1).stderr.splitlines()[-1]
    assert re.fullmatch(rf"Error: File too large \({tmp_path}/s/images/.*\); make room, and run the same .*", said)
    assert "32 encoded" in extract(*SMALL, "--dtype", "float32").stdout


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
    assert re.search(r"vit-b-32@\w{8}: 200 imported in [^;]*; work: read \d+%, write \d+%\), 1 chunk", printed.stdout)
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
