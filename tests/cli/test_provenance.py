"""Where weights came from: sets are named by their models, and commands find the weights by themselves."""

import json

import pytest
from click.testing import CliRunner
from command_line import refused, run
from safetensors.torch import load_file, save_file
from small_bert import save_bert

from xret.cli import main
from xret.pipeline.cache import FeatureCache
from xret.pipeline.cache.storage.store import Store
from xret.pipeline.cache.upkeep.verify import verify

pytestmark = pytest.mark.usefixtures("one_thread")

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
    return run(
        "extract",
        "tiny/tiny.yaml",
        "--store",
        "s.zarr",
        *IMAGES,
        "--text-weights",
        "Mini LM",
        "--device",
        "cpu",
        *words,
    )


def captions():
    return FeatureCache.open("s.zarr").set_names("captions")


def change(path):
    weights = load_file(path)
    save_file({name: value + 1 for name, value in weights.items()}, path)


def test_a_set_is_named_by_its_model_and_says_where_it_was(folder):
    (name,) = captions()
    assert name.startswith("Mini-LM@")
    cache = FeatureCache.open("s.zarr")
    source = cache.caption_set().attributes["source"]
    assert source["file"] == "Mini LM"
    assert source["path"] == str(folder / "Mini LM")
    assert len(source["sha256"]) == 64
    assert cache.caption_set("bert").name == cache.caption_set("Mini").name == name  # its kind, and its beginning
    assert "source" not in cache.image_set().attributes  # `random:0` says it everywhere
    assert "shards_before" in extract(folder, "--json").stdout
    assert captions() == [name]


def test_an_extraction_says_where_the_weights_were_moved(folder, monkeypatch):
    before = FeatureCache.open("s.zarr").caption_set()
    (folder / "Mini LM").rename(folder / "moved")
    again = ("extract", "tiny/tiny.yaml", "--store", "s.zarr", *IMAGES, "--text-weights", "moved", "--device", "cpu")
    with monkeypatch.context() as patch:
        patch.setattr(Store, "write_bytes", lambda *_: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))
        run(*again)  # the store may lie where nothing can be written
    assert FeatureCache.open("s.zarr").caption_set().attributes == before.attributes
    run(*again)
    source, place = before.attributes["source"], str(folder / "moved")
    now = FeatureCache.open("s.zarr").caption_set()
    assert now.name == before.name
    assert now.attributes["source"] == {"file": "moved", "sha256": source["sha256"], "path": place}
    words = before.attributes["command"]
    assert now.attributes["command"] == [place if word == source["path"] else word for word in words] != words
    assert verify("s.zarr").ok


def test_after_a_fine_tuning_commands_that_worked_work(folder):
    run("train-head", "s.zarr", *TRAIN, "--out", "head", "--device", "cpu")
    (original,) = captions()
    run(
        "finetune", "head", "--reattach", "text", "--set", "schedule.epochs=2", "--out", "tuned", "--device", "cpu",
        "--set", "finetune.text_lr=1",
    )  # fmt: skip
    run("extract", "tiny/tiny.yaml", "--store", "s.zarr", "--from-run", "tuned", "--device", "cpu")
    assert sorted(name.partition("@")[0] for name in captions()) == ["Mini-LM", "tuned-text"]
    assert "several feature sets fit 'bert'" in refused("train-head", "s.zarr", *TRAIN, "--out", "new")
    again = run("train-head", "s.zarr", *TRAIN, "--out", "head", "--resume", "--device", "cpu")
    assert "it was complete already" in again.stdout
    longer = run("train-head", "s.zarr", *TRAIN, "--set", "schedule.epochs=2", "--out", "head", "--resume")
    assert "1 epoch in" in longer.stdout
    assert json.loads((folder / "head" / "run.json").read_text())["text_set"] == original
    assert "RSUM" in run("eval", "tuned", "--split", "val").stdout


def test_a_search_finds_the_weights_or_says_which_it_wants(folder):
    run("train-head", "s.zarr", *TRAIN, "--out", "head", "--device", "cpu")
    words = ["search", "head", "a picture of thing number 3", "-k", "2", "--device", "cpu", "--split", "val"]
    found = run(*words, "--json").stdout
    assert len(json.loads(found)) == 2
    (folder / "Mini LM" / "README.md").write_text("It is the same model.")
    assert run(*words, "--json").stdout == found
    source = FeatureCache.open("s.zarr").caption_set().attributes["source"]
    (folder / "Mini LM").rename(folder / "elsewhere")
    (name,) = captions()
    said = refused(*words)
    assert said.startswith(f"'{name}' was made with Mini LM (SHA-256 ")
    assert said.endswith(f", which is no longer at {folder / 'Mini LM'}; give its place as --text-weights")
    assert run(*words, "--text-weights", "elsewhere", "--json").stdout == found
    save_bert(folder / "Mini LM", seed=1)
    those = f"; give Mini LM (SHA-256 {source['sha256'][:8]}…) as --text-weights"
    assert refused(*words) == f"'{folder / 'Mini LM'}' is not what '{name}' was made with (its weights differ){those}"
    said = refused("finetune", "head", "--reattach", "text", "--set", "schedule.epochs=2", "--out", "tuned")
    assert said.endswith(those)
    assert not (folder / "tuned").exists()


def test_weights_of_pictures_are_found_in_their_file(folder):
    from xret.pipeline.encoders.grid import GridEncoder

    GridEncoder("resnet18", "random:3", 64, "cpu").save(folder / "mine.safetensors")
    words = ["--visual", "resnet18", "--visual-weights", "mine.safetensors", "--image-size", 64, "--text", "words"]
    run("extract", "tiny/tiny.yaml", "--store", "v.zarr", *words)
    settings = [word for one in [*HEAD, "adapter.words.word_dim=4"] for word in ("--set", one)]
    run("train-head", "v.zarr", "--recipe", "vsepp", *settings, "--out", "v", "--device", "cpu")
    picture = next((folder / "tiny").rglob("*.jpg"), None) or next((folder / "tiny").rglob("*.png"))
    words = ["search", "v", "--image", picture, "-k", "1", "--device", "cpu", "--split", "val"]
    run(*words)
    change(folder / "mine.safetensors")
    assert refused(*words).endswith("mine.safetensors is another one by now; give its place as --visual-weights")


def test_a_set_of_an_earlier_version_goes_on_under_its_name(tiny_dataset, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_bert(tmp_path / "Mini LM")
    tiny_dataset()
    with monkeypatch.context() as then:
        then.setattr("xret.pipeline.encoders.huggingface.bert.short_name", lambda _: "bert")
        then.setattr("xret.pipeline.extraction.extraction.source_of", lambda *_: None)
        extract(tmp_path, "--splits", "train")
    (name,) = captions()
    assert name.startswith("bert@")
    extract(tmp_path)
    assert captions() == [name]
    assert FeatureCache.open("s.zarr").caption_set().complete("val")
    run("train-head", "s.zarr", *TRAIN, "--out", "head", "--device", "cpu")
    words = ["search", "head", "a picture", "--split", "val", "--device", "cpu"]
    assert "give that folder, or the model's hub id, as --text-weights HUB_ID|DIR" in refused(*words)
    run(*words, "--text-weights", "Mini LM")


def test_help_speaks_of_weights_that_are_found(folder):
    for command in ("search", "finetune", "serve", "report"):
        text = CliRunner().invoke(main, [command, "--help"]).output
        assert "if not bert-base-uncased" not in " ".join(text.split())
