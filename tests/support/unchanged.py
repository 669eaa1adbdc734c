"""What a rewrite must not change, through the public interface: features, trainings, answers and exports.

    PYTHONPATH=tests/support python tests/support/unchanged.py             # compare, bit for bit
    PYTHONPATH=tests/support python tests/support/unchanged.py --record    # put today's in their place

The bits of features depend on the processor and the libraries. Beside their SHA-256 a signature is recorded that
tolerates this: projections on fixed directions.
"""

import argparse
import json
import platform
import tempfile
import zlib
from contextlib import suppress
from hashlib import sha256
from importlib.metadata import version
from itertools import product
from pathlib import Path

import numpy as np
import torch
from click.testing import CliRunner
from PIL import Image

import xret
from xret.cli import main as main_command
from xret.pipeline.errors import XretError

RECORDED = Path(__file__).parents[1] / "golden" / "unchanged.json"
WORDS = ["a", "red", "green", "blue", "grey", "square", "disc", "and", "beside", "with", "two", "of", "picture"]
SYSTEMS = ["fusemix", "gaussian-vsepp", "gaussian-vsrn", "linear", "lit", "maxmatch", "mlp", "pcme", "pcmepp", "pvse"]
SYSTEMS += ["sail", "scan", "setdiv", "setdiv-small", "vse-infty", "vsepp", "vsrn"]
ANSWERING = ("vsepp", "setdiv", "pcme", "gaussian-vsepp")  # a vector, a set, samples of a Gaussian, a Gaussian
SMALL = {"model.dim": 16, "data.batch_size": 12, "schedule.epochs": 2}
OF_BERT = ("fusemix", "lit", "pcmepp", "sail", "setdiv-small")  # the others read words
GRID = {"visual": "resnet18", "visual_weights": "random:0", "image_size": 64}
# Options of `extract`; {hf}, {clip} and {bert} are folders of small models.
ENCODERS = {
    "resnet18": GRID,
    "resnet18, views, whole, pool": {**GRID, "image_size": 128, "whole": True, "pool": (2, 2), "views": "dihedral:8"},
    "butd": {"visual": "butd", "visual_weights": "random:0", "splits": "test"},
    "butd-grid": {"visual": "butd-grid", "visual_weights": "random:0", "splits": "test"},
    "timm": {"visual": "timm:test_vit", "visual_weights": "random:0"},
    "ViT": {"visual": "hf:{vit}", "dtype": "float32"},
    "CLIP": {"visual": "hf:{clip}", "text": "hf:{clip}"},
    "BERT": {"text": "bert", "text_weights": "{bert}", "dtype": "float32"},
    "words": {"text": "words"},
}


def extract(manifest, store, models=None, **options):
    """Call `xret.extract`; the only place that knows how its options are called."""
    options = {"visual": None, "text": None, "device": "cpu", "workers": 1, "batch_size": 4, **options}
    for key in ("visual", "text", "text_weights"):
        if models and options.get(key):
            options[key] = options[key].format(**{name: models / name for name in ("vit", "clip", "bert")})
    xret.extract(manifest, store, **options)


def train(store, system, out):
    """Train a system for two epochs; return its lines of metrics without times."""
    settings = {**SMALL, "data.text": "bert" if system in OF_BERT else "words"}
    xret.train(store, recipe=system, out=out, settings=settings, device="cpu", seed=1)
    lines = [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]
    return [{"loss": line["loss"], "rsum": line["rsum"]} for line in lines]


def make_pictures(folder, train=24, val=10, test=2):
    """Draw pictures of coloured halves with noise, and captions; return the manifest's path."""
    (folder / "images").mkdir(parents=True)
    rng, images = np.random.default_rng(0), []
    for split, count in (("train", train), ("val", val), ("test", test)):
        for _ in range(count):
            number, size = len(images), (40 + 8 * (len(images) % 3), 56)
            colours = rng.integers(0, 4, 2)
            pixels = rng.integers(0, 60, (*size, 3))
            for half, colour in enumerate(colours):
                pixels[:, 28 * half : 28 * (half + 1), colour % 3] += 60 + 40 * int(colour)
            Image.fromarray(pixels.astype(np.uint8)).save(folder / "images" / f"{number}.png")
            names = [WORDS[1 + colour] for colour in colours]
            texts = [f"a {names[0]} square beside a {names[1]} disc", f"a picture of {names[1]} and {names[0]}"]
            said = [{"raw": text, "sentid": 10 * number + k} for k, text in enumerate(texts[: 1 + number % 2])]
            images.append({"filename": f"{number}.png", "imgid": number, "split": split, "sentences": said})
    (folder / "captions.json").write_text(json.dumps({"dataset": "pictures", "images": images}))
    manifest = folder / "pictures.yaml"
    manifest.write_text("name: pictures\nimages: images\ncaptions: captions.json\n")
    return manifest


def make_models(folder):
    """Save a ViT, a CLIP and a BERT of a moment, whose weights no library draws."""
    import transformers

    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    of_images = {**size, "image_size": 32, "patch_size": 8}
    ends = {"bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0}
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    of_texts = {**size, "vocab_size": len(vocabulary), "max_position_embeddings": 24, "pad_token_id": 0}
    clip = transformers.CLIPConfig(text_config={**of_texts, **ends}, vision_config=of_images, projection_dim=16)
    models = {
        "vit": transformers.ViTModel(transformers.ViTConfig(**of_images)),
        "clip": transformers.CLIPModel(clip),
        "bert": transformers.BertModel(transformers.BertConfig(**of_texts)),
    }
    for name, model in models.items():
        with torch.no_grad():
            for key, value in model.named_parameters():
                rng = np.random.default_rng(zlib.crc32(key.encode()))
                base = 1.0 if value.ndim == 1 and key.endswith("weight") else 0.0
                value.copy_(torch.tensor(base + rng.normal(0, 0.2, value.shape)))
        model.save_pretrained(folder / name)
        if name != "bert":
            squared = {"height": 32, "width": 32}
            processor = {"size": squared} if name == "vit" else {"size": {"shortest_edge": 32}, "crop_size": squared}
            kind = transformers.ViTImageProcessor if name == "vit" else transformers.CLIPImageProcessor
            kind(**processor).save_pretrained(folder / name)
        if name != "vit":
            (folder / name / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
            tokenizer = {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "model_max_length": 24}
            (folder / name / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return folder


def arrays_of(store):
    """Return the features of a store by set and array, in the order of the samples."""
    cache, found = xret.FeatureCache.open(str(store)), {}
    for modality in ("images", "captions"):
        for name in cache.set_names(modality):
            features = cache.set_at(f"{modality}/{name}")
            rows = np.flatnonzero(features.status == 0)
            arrays = {"length": features.length[rows]}
            if modality == "captions" and features.kind == "words":
                arrays["token"] = features.token(rows)
            elif modality == "captions":
                arrays |= {"local": features.local(rows), "global": features.global_(rows)}
            for view in range(features.views if modality == "images" else 0):
                arrays[f"local {view}"] = features.local(rows, view)
                if features.global_channels:
                    arrays[f"global {view}"] = features.global_(rows, view)
            for key in ("boxes", "classes", "scores") if getattr(features, "kind", "") == "roi" else ():
                with suppress(XretError):  # imported regions need have none
                    arrays[key] = features.array(key, rows)
            found |= {f"{modality} {key}": np.ascontiguousarray(array) for key, array in arrays.items()}
    return found


def signature(array):
    """Return what is recorded of an array: its SHA-256 and, in units of its norm, four projections."""
    values = array.astype(np.float64).ravel()
    norm = float(np.linalg.norm(values)) or 1.0
    at = np.arange(1, values.size + 1, dtype=np.float64)
    projected = [round(float(values @ np.cos(at * root)) / norm, 7) for root in np.sqrt([2.0, 3.0, 5.0, 7.0])]
    kind = f"{array.dtype.str[1:]} {list(array.shape)}"
    return {"is": kind, "sha256": sha256(array.tobytes()).hexdigest(), "norm": norm, "projected": projected}


def features(name, folder, manifest, models):
    """Extract with one of `ENCODERS`, and return the signatures by array."""
    store = folder / f"{name.replace(', ', '-')}.zarr"
    extract(manifest, store, models, **ENCODERS[name])
    return {key: signature(array) for key, array in arrays_of(store).items()}


def answers(store, system, folder):
    """Search the pictures of a store with 32 texts, and export a trained system; return answers and signatures."""
    retriever, hits = xret.load(folder / system, device="cpu"), {}
    for one, other in product(WORDS[1:5], repeat=2):
        for text in (f"a {one} square beside a {other} disc", f"a picture of {other} and {one}"):
            hits[text] = [[hit.file_name, round(hit.score, 5)] for hit in retriever.search(text, k=3)]
    out = folder / f"{system}-export"
    words = ["export", str(folder / system), "--out", str(out), "--device", "cpu"]
    done = CliRunner().invoke(main_command, words)
    assert done.exit_code == 0, done.output
    files = {file.stem: signature(np.load(file)) for file in sorted(out.glob("*.npy"))}
    return {"searches": hits, "exports": files}


def machine():
    """Return what the bits depend on."""
    versions = {name: version(name) for name in ("numpy", "pillow", "timm", "torch", "torchvision", "transformers")}
    model = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {"processor": model[0].partition(": ")[2] if model else platform.machine(), **versions}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--record", action="store_true")
    record = parser.parse_args().record
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        manifest, models = make_pictures(folder / "data"), make_models(folder / "models")
        found = {"machine": machine(), "training": {}}
        found["features"] = {name: features(name, folder, manifest, models) for name in ENCODERS}
        store = make_training_store(folder, manifest, models)
        for system in SYSTEMS:
            found["training"][system] = train(store, system, folder / system)
        found["answers"] = {system: answers(store, system, folder) for system in ANSWERING}
    if record:
        RECORDED.write_text(json.dumps(found, indent=1) + "\n")
        return
    before, others = json.loads(RECORDED.read_text()), 0
    for kind in found:
        for key, value in found[kind].items():
            if before[kind][key] != value:
                others += 1
                print(f"{kind} {key}: {before[kind][key]}\n  is now {value}")
    print(f"{others} of {sum(map(len, found.values()))} differ")


def make_training_store(folder, manifest, models):
    """Extract what `SYSTEMS` are trained on."""
    store = folder / "training.zarr"
    extract(manifest, store, models, visual="hf:{vit}", text="words", dtype="float32")
    extract(manifest, store, models, text="bert", text_weights="{bert}", dtype="float32")
    return store


if __name__ == "__main__":
    main()
