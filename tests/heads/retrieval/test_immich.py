"""A run as immich reads it: by its machine-learning service's steps, written down from their source."""

import json

import numpy as np
import pytest
from command_line import refused
from command_line import run as call
from PIL import Image

from xret.heads.retrieval.retriever import Retriever

for package in ("onnx", "onnxruntime", "onnxscript"):
    pytest.importorskip(package, reason=f"{package} is not here: pip install 'xret[onnx]'")
TEXTS = ["a red side and a blue side", "  grey beside\n green "]


def embed(folder, part, inputs):
    import onnxruntime

    session = onnxruntime.InferenceSession(str(folder / part / "model.onnx"), providers=["CPUExecutionProvider"])
    return session.run(None, inputs)[0][0]


def picture(folder, path):
    """Return what immich embeds a picture as: resize the shorter side, cut the middle, normalise."""
    how = json.loads((folder / "visual/preprocess_cfg.json").read_text())
    size, image = how["size"][0], Image.open(path).convert("RGB")
    if how["resize_mode"] == "squash":
        image = image.resize((size, size), Image.Resampling[how["interpolation"].upper()])
    else:
        width, height = image.size
        shape = (size, int(height / width * size)) if width < height else (int(width / height * size), size)
        image = image.resize(shape, Image.Resampling[how["interpolation"].upper()])
        left, top = int(image.width / 2 - size / 2), int(image.height / 2 - size / 2)
        image = image.crop((left, top, left + size, top + size))
    values = (np.asarray(image, np.float32) / 255 - np.float32(how["mean"])) / np.float32(how["std"])
    return embed(folder, "visual", {"image": values.transpose(2, 0, 1)[None]})


def query(folder, text):
    """Return what immich embeds a text as: spaces joined, all padded to one length, int32."""
    from tokenizers import Tokenizer

    length = json.loads((folder / "config.json").read_text())["text_cfg"]["context_length"]
    pad = json.loads((folder / "textual/tokenizer_config.json").read_text())["pad_token"]
    tokenizer = Tokenizer.from_file(str(folder / "textual/tokenizer.json"))
    tokenizer.enable_padding(length=length, pad_token=pad, pad_id=tokenizer.token_to_id(pad))
    tokenizer.enable_truncation(max_length=length)
    encoded = tokenizer.encode(" ".join(text.split()))
    ids, mask = (np.array([values], np.int32) for values in (encoded.ids, encoded.attention_mask))
    return embed(folder, "textual", {"input_ids": ids, "attention_mask": mask})


@pytest.mark.slow
def test_immich_embeds_as_the_run_does(made, tmp_path):
    run, out = made.run("linear", "tokens"), tmp_path / "model"
    about = json.loads(call("export", run, "--to", "immich", "--out", out, "--json").stdout)
    assert about["name"] == "XLM-Roberta-Large-Vit-B-32"
    retriever, files = Retriever(run, device="cpu"), [tmp_path / "square.png", tmp_path / "wide.png"]
    for file, (width, height) in zip(files, ((96, 96), (320, 240)), strict=True):  # cut at the same pixel by both
        across, down = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
        Image.fromarray(np.stack([across, down, 255 - across], 2).astype(np.uint8)).save(file)
    found = np.stack([picture(out, file) for file in files]), np.stack([query(out, text) for text in TEXTS])
    ours = retriever.encode_images(files).numpy(), retriever.encode_text(TEXTS, warn=False).numpy()
    for embedded, expected in zip(found, ours, strict=True):
        assert embedded.shape[1] == 512 and not embedded[:, expected.shape[1] :].any()
        assert (embedded[:, : expected.shape[1]] * expected).sum(1).min() > 0.999
    assert "by cosine" in refused("export", made.run("setdiv"), "--to", "immich", "--out", tmp_path / "other")
    assert not (tmp_path / "other").exists()
