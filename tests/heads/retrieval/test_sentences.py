"""A run as a model of sentence-transformers, which embeds as the run does."""

import json

import numpy as np
import pytest
from command_line import refused
from command_line import run as call
from PIL import Image
from small_checkpoints import save_image_model, save_sentence_model, save_text_model
from small_runs import make_pictures, make_run, make_store

import xret
from xret.heads.retrieval.retriever import Retriever

library = pytest.importorskip("sentence_transformers", reason="pip install 'xret[sentences]'")
TEXTS = ["a picture of thing number 3", "thing", "number 7 of a picture, number 8"]


@pytest.mark.parametrize(
    ("recipe", "image", "text", "settings"),
    [
        ("linear", "siglip", "sentences", ["adapter.tokens.global=cached"]),
        ("mlp", "dinov2", "bert", []),
        ("mlp", "clip", "clip", ["adapter.tokens.global=cached", "adapter.tokens.layers=mlp-on-linear"]),
        ("cca", "timm", "sentences", []),
        ("linear", "clip", "clip", []),
    ],
)
def test_the_library_embeds_as_the_run_does(tmp_path, recipe, image, text, settings):
    save = save_text_model if text != "sentences" else save_sentence_model
    source = save(tmp_path / "text", *((text,) if text != "sentences" else ("mean", True)))
    if recipe == "cca":  # the library cuts vectors after all modules
        settings_of = source / "config_sentence_transformers.json"
        settings_of.write_text(json.dumps({**json.loads(settings_of.read_text()), "truncate_dim": 9}))
    options = {"text": f"hf:{source}", "dtype": "float32", "image_size": None, "visual_weights": None}
    if image == "timm":
        options |= {"visual": "resnet18", "visual_weights": "random:0"}
    else:
        options["visual"] = f"hf:{save_image_model(tmp_path / 'image', image)}"
    store = make_store(make_pictures(tmp_path / "pictures"), tmp_path / "s.zarr", **options)
    run = make_run(store, tmp_path / "run", recipe, *([] if recipe == "cca" else settings))
    out = tmp_path / "model"
    sides = json.loads(call("export", run, "--to", "sentence-transformers", "--out", out, "--json").stdout)["sides"]
    model, retriever = library.SentenceTransformer(str(out), device="cpu"), Retriever(run, device="cpu")
    assert np.abs(model.encode(TEXTS) - retriever.encode_text(TEXTS, warn=False).numpy()).max() < 1e-5
    assert sides == (["text"] if image == "timm" else ["text", "image"])
    if "image" in sides:
        files = sorted((tmp_path / "pictures/images").iterdir())[:2]
        pictures = [Image.open(file).convert("RGB") for file in files]
        assert np.abs(model.encode(pictures) - retriever.encode_images(files).numpy()).max() < 1e-5


def test_a_head_that_it_cannot_run_is_refused(made, tmp_path):
    words = ("--to", "sentence-transformers", "--out", tmp_path / "model")
    assert "by cosine" in refused("export", made.run("setdiv"), *words)
    assert "--text hf:" in refused("export", made.run("vsepp"), *words)
    xret.average(
        [made.run("linear"), made.run("vsepp")], out=(average := tmp_path.with_name("of-vectors")), device="cpu"
    )
    assert "by cosine" in refused("export", average, *words)
    assert not list(tmp_path.iterdir())
