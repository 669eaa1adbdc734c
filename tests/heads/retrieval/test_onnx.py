"""A run as ONNX graphs: what onnxruntime makes of pictures and texts is what the run does, also without torch."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import small_open_clip  # noqa: F401 - it registers its architectures
import small_timm  # noqa: F401 - and so does it
import torch
import transformers
from command_line import refused
from command_line import run as call
from PIL import Image
from small_bert import save_bert
from small_checkpoints import save_image_model, save_text_model
from small_runs import make_pictures, make_run, make_store
from torchvision import transforms

import xret
from xret.heads.modules.embedding import tensors_of
from xret.heads.retrieval.onnx import export_onnx
from xret.heads.retrieval.retriever import Retriever
from xret.pipeline.errors import RunError

for package in ("onnx", "onnxruntime", "onnxscript"):
    pytest.importorskip(package, reason=f"{package} is not here: pip install 'xret[onnx]'")
from xret.heads.retrieval.onnx_search import Model, pixels  # noqa: E402

TEXTS = ["a red side and a blue side", "green", "Grey beside\tGREEN, and a well-known thing’s side!"]
# What a user has: search.py, and no module of ours or of torch.
BLOCKED = """
import runpy, sys
sys.modules |= dict.fromkeys(("torch", "torchvision", "transformers", "xret"))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def require_equal(retriever, folder, files):
    """Compare embeddings and scores of a folder's graphs with those of its run."""
    model = Model(folder)
    image, text = model.embed_images(files), model.embed_texts(TEXTS)
    ours = retriever.encode_images(files), retriever.encode_text(TEXTS, warn=False)
    for side, found, embedding in zip(("image", "text"), (image, text), ours, strict=True):
        expected = {f"{side}_{name}": tensor.numpy() for name, tensor in tensors_of(embedding).items()}
        assert found.keys() == expected.keys()
        for name, values in expected.items():
            np.testing.assert_allclose(found[name], values, rtol=0, atol=2e-3 * np.abs(values).max())
    scores = retriever.similarity(*ours).numpy()
    np.testing.assert_allclose(model.similarity(image, text), scores, rtol=0, atol=3e-3 * np.abs(scores).max())


class Tiny:
    """Runs on small networks, which are exported in seconds."""

    def __init__(self, folder):
        self.folder, self.pictures = (
            folder,
            sorted((make_pictures(folder / "pictures").parent / "images").iterdir())[:3],
        )

    def run(self, recipe, visual="timm:small_registers", **texts):
        url = self.folder / f"{len(list(self.folder.iterdir()))}.zarr"
        options = {"visual": visual, "visual_weights": "random:0", "image_size": None, **texts}
        make_store(self.folder / "pictures/pictures.yaml", url, **options)
        return make_run(str(url), url.with_suffix(".run"), recipe)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return Tiny(tmp_path_factory.mktemp("tiny"))


@pytest.mark.slow
def test_a_search_needs_neither_torch_nor_xret(tiny, tmp_path):
    run = tiny.run("setdiv", text="bert", text_weights=str(save_bert(tmp_path / "bert")))
    printed = call("export", run, "--to", "onnx", "--out", tmp_path / "model", "--json").stdout
    about, files = json.loads(printed), [str(path) for path in tiny.pictures]
    assert about["graphs"]["image"]["outputs"] == {"image_embedding": ["batch", 4, 16]}
    retriever = Retriever(run, device="cpu")
    require_equal(retriever, tmp_path / "model", files)
    words = [sys.executable, "-c", BLOCKED, str(tmp_path / "model/search.py"), TEXTS[0], *files]
    lines = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    scores = retriever.similarity(retriever.encode_images(files), retriever.encode_text(TEXTS[:1]))[:, 0]
    assert [line.split(maxsplit=1)[1] for line in lines] == [files[row] for row in scores.argsort(descending=True)]
    assert [float(line.split()[0]) for line in lines] == pytest.approx(
        scores.sort(descending=True)[0].tolist(), abs=2e-3
    )
    for wrong, message in (([], "search.py"), ([TEXTS[0], "gone.jpg"], "gone.jpg")):
        failed = subprocess.run([*words[:4], *wrong], capture_output=True, text=True)
        assert failed.returncode == 1 and message in failed.stderr and "Traceback" not in failed.stderr
    small = call("export", run, "--to", "onnx", "--dtype", "int8", "--out", tmp_path / "small", "--json").stdout
    small = json.loads(small)
    assert small["bytes"] < about["bytes"]
    assert all(0.95 < cosine < 1 for cosine in small["least_cosine"].values())
    whole, bytes_ = (Model(tmp_path / name).embed_texts(TEXTS)["text_embedding"] for name in ("model", "small"))
    assert 0.95 < (whole * bytes_).sum(-1).min() < 1
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer(TEXTS)["input_ids"] == retriever.text_encoders[0][0].tokenize(TEXTS)
    assert "exists already" in refused("export", run, "--to", "onnx", "--out", tmp_path / "model")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "visual", "text"),
    [
        ("mlp", "resnet18", "words"),
        ("linear", "open_clip:small-ViT", "open_clip:small-ViT"),
        ("maxmatch", "timm:small_swin", "words"),
        ("gaussian-vsepp", "timm:small_registers", "words"),
        ("gaussian-vsrn", "hf:siglip", "words"),
        ("vse-infty", "hf:beit", "hf:clip"),
        ("hrem", "timm:small_swin", "hf:clip"),
        ("pcmepp", "resnet18", "words"),
        ("pcme", "timm:small_registers", "hf:t5"),
        ("pvse", "hf:dinov2", "hf:siglip"),
    ],
)
def test_graphs_give_what_the_run_does(tiny, tmp_path, recipe, visual, text):
    options = {"visual_weights": None} if visual.startswith("hf:") else {}
    if visual.startswith("hf:"):
        visual = f"hf:{save_image_model(tmp_path / 'image', visual[3:])}"
    if text.startswith("hf:"):
        text = f"hf:{save_text_model(tmp_path / 'text', text[3:])}"
    elif ":" in text:
        options["text_weights"] = "random:0"
    retriever = Retriever(tiny.run(recipe, visual, text=text, **options), device="cpu")
    export_onnx(retriever, tmp_path / "model")
    require_equal(retriever, tmp_path / "model", tiny.pictures)


@pytest.mark.foreign
@pytest.mark.slow
def test_node_finds_the_same(tiny, tmp_path):
    packages = Path(os.environ.get("NODE_PATH", Path(sys.prefix, "node", "node_modules")))
    needed = [packages / name for name in ("onnxruntime-node", "@huggingface/tokenizers", "sharp")]
    if shutil.which("node") is None or not all(package.is_dir() for package in needed):
        pytest.skip("Node or its packages are not here: npm install --ignore-scripts, see docs/how-to/onnx.md")
    run = tiny.run("linear", text="bert", text_weights=str(save_bert(tmp_path / "bert")))
    export_onnx(Retriever(run, device="cpu"), tmp_path / "model")
    page = (Path(__file__).parents[3] / "docs/how-to/onnx.md").read_text("utf-8")
    (tmp_path / "search.mjs").write_text(page.partition("```js\n")[2].partition("```")[0])
    (tmp_path / "node_modules").symlink_to(packages)
    files = [tmp_path / f"{number}.png" for number in range(6)]
    for number, file in enumerate(files):
        across, down = np.meshgrid(np.linspace(0, 255, 150 + 3 * number), np.linspace(0, 50 * number, 120))
        Image.fromarray(np.stack([across, down, 255 - across], 2).astype(np.uint8)).save(file)
    words = [str(word) for word in ("model", TEXTS[0], *files)]
    commands = ["node", "search.mjs", *words], [sys.executable, "model/search.py", *words[1:]]
    tables = [subprocess.run(one, cwd=tmp_path, capture_output=True, text=True, check=True).stdout for one in commands]
    ours, theirs = ([line.split() for line in table.splitlines()] for table in tables)
    assert [file for _, file in ours] == [file for _, file in theirs]
    assert [float(score) for score, _ in ours] == pytest.approx([float(score) for score, _ in theirs], abs=5e-3)


def test_pictures_are_cut_as_their_library_does(tmp_path):
    ramp = Image.fromarray(np.broadcast_to(np.arange(43, dtype=np.uint8)[None, :, None], (36, 43, 3)))
    how = {"size": {"shortest_edge": 36}, "resample": 3, "crop_size": {"height": 32, "width": 32}}
    how |= {"rescale_factor": 1, "image_mean": [0, 0, 0], "image_std": [1, 1, 1]}
    of_transformers = transformers.CLIPImageProcessor(size={"shortest_edge": 36}, crop_size=how["crop_size"])
    expected = of_transformers(ramp, do_normalize=False, do_rescale=False)["pixel_values"][0][0, 0, 0]
    assert pixels(ramp, how | {"crop_offset": "floor"})[0, 0, 0] == float(expected) == 5
    expected = transforms.CenterCrop(32)(transforms.PILToTensor()(ramp))[0, 0, 0]
    assert pixels(ramp, how | {"crop_offset": "round"})[0, 0, 0] == float(expected) == 6


def test_pictures_of_16_bits_are_no_brighter(tmp_path):
    grey = np.random.default_rng(0).integers(0, 256, (20, 30), np.uint16)
    files = [tmp_path / f"{bits}.png" for bits in (8, 16)]
    for file, values in zip(files, (grey.astype(np.uint8), 256 * grey), strict=True):
        Image.fromarray(values).save(file)
    how = {"size": {"shortest_edge": 16}, "resample": 3, "crop_size": {"height": 16, "width": 16}}
    how |= {"crop_offset": "floor", "rescale_factor": 1 / 255, "image_mean": [0.0] * 3, "image_std": [1.0] * 3}
    assert np.array_equal(*(pixels(file, how) for file in files))


def test_what_cannot_be_exported_is_named(made, tmp_path, monkeypatch):
    words = ("export", made.run("scan"), "--to", "onnx", "--out", tmp_path / "model")
    assert "aggregator.image gives no vectors" in refused(*words)
    assert "takes no --dims" in refused(*words, "--dims", 2, code=2)
    xret.average([made.run("scan"), made.run("vsepp")], out=(average := tmp_path.with_name("of-rows")), device="cpu")
    assert "no single vector" in refused("export", average, *words[2:])
    retriever = Retriever(made.run("vsepp"), device="cpu")
    monkeypatch.setattr(torch.onnx, "export", lambda *_arguments, **_how: 1 / 0)
    with pytest.raises(RunError, match=r"its image side \(mobilenet.*ZeroDivisionError.*take another head"):
        export_onnx(retriever, tmp_path / "model")
    encoder = retriever.image_encoders[0][0]
    prepare = encoder.prepare
    monkeypatch.setattr(encoder, "prepare", lambda picture: prepare(picture).flip(1))
    with pytest.raises(RunError, match="in a way that no preprocessor_config"):
        export_onnx(retriever, tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_a_text_without_words_is_refused_by_the_search(tmp_path):
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>")).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "about.json").write_text('{"prompt": "{}"}')
    (tmp_path / "preprocessor_config.json").write_text("{}")
    with pytest.raises(ValueError, match="no words"):
        Model(tmp_path).embed_texts([""])
