"""Where weights came from: sets are named by their models, and commands find the weights by themselves."""

import json

import pytest
from command_line import refused, run
from encoder_contract import image_encoder
from safetensors.torch import load_file, save_file
from small_bert import save_bert

from xret.pipeline.store import FeatureCache

HEAD = ["model.dim=8", "schedule.epochs=1", "schedule.name=constant", "data.unit=image", "data.batch_size=4"]
IMAGES = ["--visual", "resnet18", "--visual-weights", "random:0", "--image-size", "64"]
TRAIN = ["--recipe", "vsepp", "--set", "data.text=bert", *(word for one in HEAD for word in ("--set", one))]


@pytest.fixture
def folder(tiny_dataset, tmp_path, monkeypatch):
    """A store whose captions went through a model in the folder `Mini LM`."""
    monkeypatch.chdir(tmp_path)
    save_bert(tmp_path / "Mini LM")
    tiny_dataset()
    extract(tmp_path)
    return tmp_path


def extract(folder, *words):
    options = ["--text-weights", "Mini LM", "--device", "cpu"]
    return run("extract", "tiny/tiny.yaml", "--store", "s.zarr", *IMAGES, *options, *words)


def captions():
    return FeatureCache.open("s.zarr").set_names("captions")


def test_a_set_is_named_by_its_model_and_says_where_it_was(folder):
    (name,) = captions()
    assert name.startswith("Mini-LM@")
    cache = FeatureCache.open("s.zarr")
    assert cache.caption_set().attributes["spec"] == {"name": "bert", "weights": str(folder / "Mini LM")}
    assert cache.caption_set("bert").name == cache.caption_set("Mini").name == name  # its kind, and its beginning
    assert "chunks_before" in extract(folder, "--json").stdout
    assert captions() == [name]


def test_after_a_fine_tuning_commands_that_worked_work(folder):
    run("train-head", "s.zarr", *TRAIN, "--out", "head", "--device", "cpu")
    (original,) = captions()
    run(
        "finetune", "head", "--reattach", "text", "--set", "schedule.epochs=2", "--out", "tuned", "--device", "cpu",
        "--set", "finetune.text_lr=1",
    )  # fmt: skip
    run("extract", "tiny/tiny.yaml", "--store", "s.zarr", "--encoder", "tuned", "--device", "cpu")
    assert sorted(name.partition("@")[0] for name in captions()) == ["Mini-LM", "tuned-text"]
    said = refused("train-head", "s.zarr", *TRAIN, "--out", "new")
    assert "several feature sets fit 'bert'" in said and "choose one with --set data.text" in said
    again = run("train-head", "s.zarr", *TRAIN, "--out", "head", "--resume", "--device", "cpu")
    assert "it was complete already" in again.stdout
    longer = run("train-head", "s.zarr", *TRAIN, "--set", "schedule.epochs=2", "--out", "head", "--resume")
    assert "1 epoch in" in longer.stdout
    assert json.loads((folder / "head" / "run.json").read_text())["text"][0]["name"] == original
    assert "RSUM" in run("eval", "tuned", "--split", "val").stdout


def test_a_search_finds_the_weights_or_says_which_it_wants(folder):
    run("train-head", "s.zarr", *TRAIN, "--out", "head", "--device", "cpu")
    words = ["search", "head", "a picture of thing number 3", "-k", "2", "--device", "cpu", "--split", "val"]
    found = run(*words, "--json").stdout
    assert len(json.loads(found)) == 2
    (folder / "Mini LM" / "README.md").write_text("It is the same model.")
    assert run(*words, "--json").stdout == found
    (folder / "Mini LM").rename(folder / "elsewhere")
    (name,) = captions()
    said = refused(*words)
    place = folder / "Mini LM"
    assert said.startswith(f"'{name}' was made with the weights {place}, which are not there; give their place as --")
    assert run(*words, "--text-weights", "elsewhere", "--json").stdout == found
    save_bert(folder / "Mini LM", seed=1)
    those = f"; give its own weights, {place}, as --text-weights"
    assert refused(*words) == f"'{place}' is not what '{name}' was made with (its weights differ){those}"
    said = refused("finetune", "head", "--reattach", "text", "--set", "schedule.epochs=2", "--out", "tuned")
    assert said.endswith(those)
    assert not (folder / "tuned").exists()


def test_weights_of_pictures_are_found_in_their_file(folder):
    image_encoder("resnet18", "random:3", 64).save(folder / "mine.safetensors")
    words = ["--visual", "resnet18", "--visual-weights", "mine.safetensors", "--image-size", 64, "--text", "words"]
    run("extract", "tiny/tiny.yaml", "--store", "v.zarr", *words)
    settings = [word for one in [*HEAD, "adapter.words.word_dim=4"] for word in ("--set", one)]
    run("train-head", "v.zarr", "--recipe", "vsepp", *settings, "--out", "v", "--device", "cpu")
    picture = next((folder / "tiny").rglob("*.jpg"), None) or next((folder / "tiny").rglob("*.png"))
    words = ["search", "v", picture, "-k", "1", "--device", "cpu", "--split", "val"]
    run(*words)
    weights = {name: value + 1 for name, value in load_file(folder / "mine.safetensors").items()}
    save_file(weights, folder / "mine.safetensors")
    assert "mine.safetensors' is not what" in refused(*words)
