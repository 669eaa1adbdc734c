"""Runs in the hub's layout: what is saved is loaded again without store or paths, and what a push would send."""

import json
import shutil

import pytest
import torch
from huggingface_hub import ModelCard
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from small_bert import save_bert
from small_runs import make_pictures, make_run, make_store

import xret
from xret.heads.retrieval import hub
from xret.heads.retrieval.retriever import Retriever
from xret.heads.runs.run import Run
from xret.heads.training.finetuning.finetuning import finetune
from xret.pipeline.errors import EncoderError, RunError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("hub")
    manifest = make_pictures(folder / "pictures")
    make_run(make_store(manifest, folder / "words.zarr"), folder / "words")
    bert = save_bert(folder / "bert")
    make_run(
        make_store(manifest, folder / "bert.zarr", text="bert", text_weights=str(bert)), folder / "tokens", "setdiv"
    )
    yield folder
    torch.set_num_threads(threads)


def open_run(folder, name, **options):
    return Retriever(folder / name, device="cpu", **options)


@pytest.mark.parametrize(("name", "options"), [("words", {}), ("tokens", {"text_weights": "bert"})])
def test_a_saved_run_embeds_alike_without_its_store(folder, tmp_path, name, options):
    options = {key: str(folder / value) for key, value in options.items()}
    retriever = open_run(folder, name, **options)
    saved = hub.save_to_folder(retriever, tmp_path / "saved")
    there = {path.name for path in saved.iterdir()}
    assert there == {"model.safetensors", "run.json", "recipe.yaml", "README.md"}
    assert not [path for path in saved.iterdir() if str(folder) in path.read_bytes().decode(errors="replace")]
    loaded = xret.load(saved, device="cpu", **options)
    pictures, texts = [folder / "pictures/images/3.png"], ["red beside blue"]
    torch.testing.assert_close(loaded.encode_images(pictures), retriever.encode_images(pictures))
    torch.testing.assert_close(loaded.encode_text(texts), retriever.encode_text(texts))
    with pytest.raises(RunError, match="name where it is now with --store"):
        loaded.search("red")
    assert xret.load(saved, store=str(folder / f"{['words', 'bert'][name == 'tokens']}.zarr"), **options).search("red")


def test_the_card_is_one_and_its_example_names_what_must_be_named(folder, tmp_path):
    card = ModelCard.load(hub.save_to_folder(open_run(folder, "tokens"), tmp_path / "a", "user/name") / "README.md")
    assert (card.data.library_name, card.data.tags) == ("xret", ["image-text-retrieval", "xret"])
    assert card.text.startswith("\n# name") or card.text.startswith("# name")
    assert 'xret.load("user/name", text_weights="…")' in card.text
    hub.save_to_folder(open_run(folder, "words"), tmp_path / "b", "user/words")
    assert 'xret.load("user/words")' in (tmp_path / "b/README.md").read_text()


def test_a_hub_id_of_the_text_encoder_is_written_down(folder, tmp_path):
    saved = hub.save_to_folder(open_run(folder, "tokens", text_weights="user/bert"), tmp_path / "saved")
    origins = json.loads((saved / "run.json").read_text())
    assert origins["text"][0]["spec"] == {"name": "bert", "weights": "user/bert"}
    assert origins["image"][0]["spec"]["weights"] == "random:0"
    assert "text_weights" not in (saved / "README.md").read_text()
    saved = hub.save_to_folder(open_run(folder, "tokens", text_weights=str(folder / "bert")), tmp_path / "again")
    assert str(folder) not in (saved / "run.json").read_text()  # which means nothing elsewhere
    with pytest.raises(
        EncoderError, match=r"made with the weights \./bert, which are not there; give their place as --text-weights"
    ):
        xret.load(saved).encode_text(["red"])


def test_other_origins_are_refused(folder, tmp_path):
    saved = hub.save_to_folder(open_run(folder, "words"), tmp_path / "saved")
    said = json.loads((saved / "run.json").read_text())
    said["image"][0]["spec"]["weights"] = "random:1"
    (saved / "run.json").write_text(json.dumps(said))
    with pytest.raises(EncoderError, match="'random:1' is not what"):
        xret.load(saved).encode_images(["x.png"])
    with pytest.raises(RunError, match="saved exists"):
        hub.save_to_folder(open_run(folder, "words"), saved)


@pytest.mark.parametrize(("damage", "sentence"), [("cut", r"model\.safetensors"), ("gone", "model")])
def test_a_damaged_run_is_not_saved(folder, tmp_path, damage, sentence):
    weights = shutil.copytree(folder / "words", tmp_path / "run") / "model.safetensors"
    content = weights.read_bytes()
    weights.unlink()
    if damage == "cut":
        weights.write_bytes(content[:-9])
    with pytest.raises(RunError, match=sentence):
        hub.save_to_folder(Retriever(tmp_path / "run", device="cpu"), tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_no_store_that_was_learnt_from_is_told_with_its_path(folder, tmp_path):
    shutil.copytree(folder / "words", tmp_path / "run")
    Run(tmp_path / "run").record(also_stores=[str(tmp_path / "other.zarr")], init_from=str(tmp_path / "first"))
    saved = hub.save_to_folder(Retriever(tmp_path / "run", device="cpu"), tmp_path / "saved")
    said = json.loads((saved / "run.json").read_text())
    assert (said["also_stores"], said["init_from"]) == (["other.zarr"], "first")


def test_no_file_of_word_vectors_is_told_with_its_path(folder, tmp_path):
    vectors = tmp_path / "vectors.txt"
    vectors.write_text(f"red {' '.join('1' * 8)}\n")
    run = make_run(folder / "words.zarr", tmp_path / "run", "vsepp", f"adapter.words.vectors={vectors}")
    saved = hub.save_to_folder(Retriever(run, device="cpu"), tmp_path / "saved", "user/name")
    assert not [path for path in saved.iterdir() if str(tmp_path) in path.read_bytes().decode(errors="replace")]
    assert xret.load(saved, device="cpu").run.recipe.adapter["words"]["vectors"] == "vectors.txt"
    texts = ["red beside blue"]
    torch.testing.assert_close(xret.load(saved).encode_text(texts), open_run(tmp_path, "run").encode_text(texts))


def test_a_tuned_run_is_saved_with_its_backbone_and_another_one_is_refused(folder, tmp_path):
    run, settings = tmp_path / "tuned", ["schedule.epochs=2"]
    there = {"data_root": folder / "pictures", "visual_weights": "random:0", "device": "cpu"}
    finetune(folder / "words", run, settings=settings, reattach=["image"], **there)
    assert (hub.save_to_folder(Retriever(run), tmp_path / "saved") / "image_backbone.safetensors").is_file()
    weights = run / "image_backbone.safetensors"
    state = load_file(weights)
    state["features.0.0.weight"] += 1
    save_file(state, weights)
    with pytest.raises(EncoderError, match="is not what"):
        hub.save_to_folder(Retriever(run), tmp_path / "again")


def test_a_push_sends_the_folder(folder, monkeypatch):
    sent = {}

    class Api:
        def create_repo(self, repo, **options):
            sent["created"] = (repo, options)
            return f"https://hub/{repo}"

        def upload_folder(self, *, repo_id, folder_path, commit_message):
            sent[repo_id] = sorted(path.name for path in folder_path.iterdir())

    monkeypatch.setattr(hub, "HfApi", Api)
    assert hub.push(open_run(folder, "words"), "user/name", private=True) == "https://hub/user/name"
    assert sent["created"] == ("user/name", {"private": True, "exist_ok": True})
    assert {"README.md", "model.safetensors", "run.json"} <= set(sent["user/name"])
    assert "checkpoint.pt" not in sent["user/name"]


@pytest.mark.parametrize("error", [OSError, HfHubHTTPError.__bases__[0]])  # the second is the HTTP client's own
def test_a_push_that_is_refused_ends_in_a_sentence(folder, monkeypatch, error):
    class Api:
        def create_repo(self, *_arguments, **_options):
            raise error("no route to the hub\nand more")

    monkeypatch.setattr(hub, "HfApi", Api)
    with pytest.raises(RunError, match=r"user/name cannot be pushed to the hub \(no route to the hub\)"):
        hub.push(open_run(folder, "words"), "user/name")


def test_a_name_of_the_hub_is_looked_up_there_if_there_is_no_such_folder(folder, tmp_path, monkeypatch):
    saved = hub.save_to_folder(open_run(folder, "words"), tmp_path / "saved")
    monkeypatch.setattr(hub, "snapshot_download", lambda name, allow_patterns, revision: str(saved))
    assert xret.load("user/name").run.path == saved
    assert hub.local_folder(folder / "words") == folder / "words"
    with pytest.raises(RunError, match="nowhere is no run"):
        xret.load("nowhere")

    def refuse(*_arguments, **_options):
        raise LocalEntryNotFoundError("it is not in the cache")

    monkeypatch.setattr(hub, "snapshot_download", refuse)
    with pytest.raises(RunError, match=r"no run user/name here, .* cannot be loaded \(it is not in the cache\)"):
        xret.load("user/name")
