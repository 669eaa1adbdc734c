"""Runs in the hub's layout: what is saved is loaded again without store or paths, and what a push would send."""

import json

import pytest
import torch
from command_line import run as call
from huggingface_hub import ModelCard
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from small_runs import make_run

import xret
from xret.heads.retrieval import hub
from xret.heads.retrieval.retriever import Retriever
from xret.heads.runs.run import Run
from xret.heads.training.finetuning.finetuning import finetune
from xret.pipeline.errors import EncoderError, RunError


@pytest.fixture(scope="module")
def runs(made):
    return {"words": made.run(), "tokens": made.run("setdiv", "tokens")}


def save(run, out, repo=None, **options):
    return hub.save_to_folder(Retriever(run, device="cpu", **options), out, repo)


def without_path(saved, folder):
    return not [path for path in saved.iterdir() if str(folder) in path.read_bytes().decode(errors="replace")]


@pytest.mark.parametrize(("name", "options"), [("words", {}), ("tokens", {"text_weights": "bert"})])
def test_a_saved_run_embeds_alike_without_its_store(made, runs, tmp_path, name, options):
    options = {key: str(made.folder / value) for key, value in options.items()}
    retriever, saved = (
        Retriever(runs[name], device="cpu", **options),
        save(runs[name], tmp_path / "saved", **options),
    )
    assert {path.name for path in saved.iterdir()} == {"model.safetensors", "run.json", "recipe.yaml", "README.md"}
    assert without_path(saved, made.folder)
    loaded = xret.load(saved, device="cpu", **options)
    pictures, texts = [made.images / "3.png"], ["red beside blue"]
    torch.testing.assert_close(loaded.encode_images(pictures), retriever.encode_images(pictures))
    torch.testing.assert_close(loaded.encode_text(texts), retriever.encode_text(texts))
    with pytest.raises(RunError, match="name where it is now with `store`"):
        loaded.search("red")
    assert xret.load(saved, store=made.store(name), **options).search("red")
    with pytest.raises(RunError, match="saved exists"):
        save(runs[name], saved)


def test_the_card_is_one_and_its_example_names_what_must_be_named(made, runs, tmp_path):
    card = ModelCard.load(save(runs["tokens"], tmp_path / "a", "user/name") / "README.md")
    assert (card.data.library_name, card.data.tags) == ("xret", ["image-text-retrieval", "xret"])
    assert card.text.lstrip().startswith("# name")
    assert 'xret.load("user/name", text_weights="…")' in card.text
    assert 'xret.load("user/words")' in (save(runs["words"], tmp_path / "b", "user/words") / "README.md").read_text()


def test_a_hub_id_of_the_text_encoder_is_written_down_and_a_path_is_not(made, runs, tmp_path):
    saved = save(runs["tokens"], tmp_path / "saved", text_weights="user/bert")
    origins = json.loads((saved / "run.json").read_text())
    assert origins["text"][0]["spec"] == {"name": "bert", "weights": "user/bert"}
    assert origins["image"][0]["spec"]["weights"] == "random:0"
    assert "text_weights" not in (saved / "README.md").read_text()
    saved = save(runs["tokens"], tmp_path / "again", text_weights=str(made.folder / "bert"))
    assert without_path(saved, made.folder)
    with pytest.raises(EncoderError, match=r"the weights \./bert, which are not there; give their .* `text_weights`"):
        xret.load(saved, images=made.images).search("red")


def test_no_path_of_stores_runs_and_word_vectors_is_given_away(made, runs, tmp_path):
    vectors = tmp_path / "vectors.txt"
    vectors.write_text(f"red {' '.join('1' * 8)}\n")
    run = make_run(made.store(), tmp_path / "run", "vsepp", f"adapter.words.vectors={vectors}")
    Run(run).record(also_stores=[str(tmp_path / "other.zarr")], init_from=str(tmp_path / "first"))
    saved = save(tmp_path / "run", tmp_path / "saved", "user/name")
    assert without_path(saved, tmp_path) and without_path(saved, made.folder)
    facts = json.loads((saved / "run.json").read_text())
    assert (facts["also_stores"], facts["init_from"]) == (["other.zarr"], "first")
    texts, loaded = ["red beside blue"], xret.load(saved, device="cpu")
    assert loaded.run.recipe.adapter["words"]["vectors"] == "vectors.txt"
    torch.testing.assert_close(loaded.encode_text(texts), xret.load(run, device="cpu").encode_text(texts))


def test_a_tuned_run_is_saved_with_its_backbone_and_another_one_is_refused(made, runs, tmp_path):
    run, settings = tmp_path / "tuned", ["schedule.epochs=2"]
    there = {"data_root": made.pictures, "visual_weights": "random:0", "device": "cpu"}
    finetune(runs["words"], run, settings=settings, reattach=["image"], **there)
    assert (save(tmp_path / "tuned", tmp_path / "saved") / "image_backbone.safetensors").is_file()
    weights = run / "image_backbone.safetensors"
    state = load_file(weights)
    state["features.0.0.weight"] += 1
    save_file(state, weights)
    with pytest.raises(EncoderError, match="is not what"):
        save(tmp_path / "tuned", tmp_path / "again")


def test_an_average_is_refused(made, tmp_path):
    xret.average([made.run(), made.run("setdiv")], out=tmp_path / "a", device="cpu")
    with pytest.raises(RunError, match="push one of them"):
        save(tmp_path / "a", tmp_path / "saved")


def test_a_push_sends_the_folder(made, runs, monkeypatch):
    sent, retriever = {}, Retriever(runs["words"], device="cpu")

    class Api:
        def create_repo(self, repo, **options):
            sent["created"] = (repo, options)
            return f"https://hub/{repo}"

        def upload_folder(self, *, repo_id, folder_path, commit_message):
            sent[repo_id] = {path.name for path in folder_path.iterdir()}

    monkeypatch.setattr(hub, "HfApi", Api)
    assert hub.push(retriever, "user/name", private=True) == "https://hub/user/name"
    assert sent["created"] == ("user/name", {"private": True, "exist_ok": True})
    assert {"README.md", "model.safetensors", "run.json"} <= sent["user/name"]
    assert "checkpoint.pt" not in sent["user/name"]
    for error in (OSError, HfHubHTTPError.__bases__[0]):  # the second is the HTTP client's own

        def refuse(*_arguments, error=error, **_options):
            raise error("no route to the hub\nand more")

        monkeypatch.setattr(Api, "create_repo", refuse)
        with pytest.raises(RunError, match=r"user/name cannot be pushed to the hub \(no route to the hub\)"):
            hub.push(retriever, "user/name")


def test_a_name_of_the_hub_is_looked_up_there_if_there_is_no_such_folder(made, runs, tmp_path, monkeypatch):
    saved = save(runs["words"], tmp_path / "saved")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, allow_patterns, revision: str(saved))
    assert xret.load("user/name").run.path == saved
    found = call("search", "user/name", "red", "--store", made.store(), "--json")
    assert json.loads(found.stdout) == [hit.to_dict() for hit in xret.load(runs["words"]).search("red")]
    assert xret.load(runs["words"]).run.path == runs["words"]
    with pytest.raises(RunError, match="nowhere is no run"):
        xret.load("nowhere")

    def refuse(*_arguments, **_options):
        raise LocalEntryNotFoundError("it is not in the cache")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(RunError, match=r"no run user/name here, .* cannot be loaded \(it is not in the cache\)"):
        xret.load("user/name")
