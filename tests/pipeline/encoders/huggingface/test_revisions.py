"""A revision of a model on the hub: a cache as huggingface_hub lays it out, with two commits, and no network."""

import shutil

import huggingface_hub.constants
import numpy as np
import pytest
from encoder_contract import refused, text_encoder
from small_bert import save_bert

from xret.pipeline.data.manifest import load_manifest
from xret.pipeline.encoders.origin import Origin
from xret.pipeline.extraction.extraction import extract
from xret.pipeline.extraction.options import build_options
from xret.pipeline.store import FeatureCache

OLD, NEW = "a" * 40, "b" * 40


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Lay out what was downloaded of ``someone/bert``; return the folder beside it, with a folder for each commit."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    model = tmp_path / "hub" / "models--someone--bert"
    for commit, seed in ((OLD, 0), (NEW, 1)):
        (tmp_path / commit).mkdir()
        shutil.copytree(save_bert(tmp_path / commit, seed), model / "snapshots" / commit)
    for ref, commit in {"main": NEW, "refs/pr/1": OLD, "v1.0": OLD}.items():
        (model / "refs" / ref).parent.mkdir(parents=True, exist_ok=True)
        (model / "refs" / ref).write_text(commit)
    return tmp_path


@pytest.mark.parametrize("prefix", ["", "hf:"])
@pytest.mark.parametrize(
    ("revision", "commit"), [("", NEW), ("@main", NEW), ("@v1.0", OLD), ("@refs/pr/1", OLD), (f"@{OLD}", OLD)]
)
def test_a_revision_is_the_one_that_is_loaded_and_its_commit_is_recorded(cache, prefix, revision, commit):
    names = (f"someone/bert{revision}", cache / commit)
    hub, folder = (text_encoder(f"hf:{name}") if prefix else text_encoder("bert", name) for name in names)
    assert hub.identity == folder.identity
    assert hub.versions == folder.versions | {"commit": commit}
    ids = folder.tokenize(["a picture of thing 1"])
    assert np.array_equal(hub.encode(hub.tokenize(["a picture of thing 1"]))[0], folder.encode(ids)[0])
    if prefix:
        assert hub.name == "bert"


@pytest.mark.parametrize("text", [{"text": "hf:someone/bert"}, {"text_weights": "someone/bert@main"}])
def test_a_set_keeps_the_commit_when_a_branch_moves(cache, tiny_dataset, text):
    extract(load_manifest(tiny_dataset()), str(cache / "s.zarr"), build_options(visual=None, device="cpu", **text))
    store = FeatureCache.open(str(cache / "s.zarr"))
    features = store.caption_set()
    assert Origin.of(features).spec.source == f"someone/bert@{NEW}"
    (cache / "hub" / "models--someone--bert" / "refs" / "main").write_text(OLD)
    assert Origin.of(features).load_captions(None, "cpu").versions["commit"] == NEW


@pytest.mark.parametrize("name", ["someone/bert@nowhere", "someone/bert@", "someone/bert@-x", "someone/bert@v1 0"])
def test_a_revision_that_is_not_there_is_a_sentence(cache, name):
    refused(f"{name}.* (cannot be loaded|no such folder)", text_encoder, f"hf:{name}")


def test_a_folder_may_have_an_at_in_its_name(cache):
    folder = (cache / OLD).rename(cache / "bert@v1.0")
    encoder = text_encoder(f"hf:{folder}")
    assert "commit" not in encoder.versions
    assert encoder.name == "bert-v1.0"
