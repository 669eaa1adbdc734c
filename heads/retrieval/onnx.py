"""A run as ONNX graphs, which need neither xret nor torch: from pixels, and from token ids, to the embeddings.

    image.onnx                pixel_values, float32 [B,3,H,W], to image_embedding
    text.onnx                 input_ids and attention_mask, int64 [B,N], to text_embedding
    similarity.onnx           the embeddings of I images and C texts to scores [I,C]; none where that is a dot product
    tokenizer.json, tokenizer_config.json, preprocessor_config.json   as transformers and tokenizers read them
    search.py                 uses all of these, with numpy, onnxruntime, Pillow and tokenizers alone
    about.json, README.md     what made them, for programs and for readers

A Gaussian is `image_mean` and `image_log_variance` in place of an embedding. What is written was compared with the run.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from ...pipeline.encoders.base import TextEncoder
from ...pipeline.errors import RunError, require_packages
from ...pipeline.files import making, require_new
from ..average import NO_VECTOR
from ..model import Model
from ..modules.embedding import Gaussian
from ..recipes.blocks import Recipe
from .onnx_graphs import ImageGraph, ScoreGraph, TextGraph, quantise, write_graph
from .retriever import Retriever

LEVELS = 3.5  # of 256, that a pixel may differ: other code for resizing rounds otherwise
_PICTURES = ((320, 240), (231, 347), (96, 96))  # widths and heights that are prepared both ways, beside `_odd`
TEXTS = (
    "Two dogs play in the snow.",
    "A girl's T-shirt, no. 12: red & blue (very bright)!",
    "a café, ÉCOLE no. 5 — “quoted”, 3.5 km² 汉字 hello_world",
    " ".join(["a man with an umbrella walks along the street"] * 60),
)
_CARD = """\
---
library_name: onnx
pipeline_tag: feature-extraction
tags:
- image-text-retrieval
- xret
---

# {run}: image–text retrieval as ONNX graphs

The recipe `{recipe}` of xret on `{image}` and `{text}`. A picture or text is a {kind}. What compares them is {measure};
larger is closer.

| graph | inputs | outputs |
|---|---|---|
{graphs}

```
pip install numpy onnxruntime pillow tokenizers
python search.py "two dogs in the snow" pictures/*.jpg
```

`preprocessor_config.json` says how Pillow resizes a picture and how its pixels are normalised, `tokenizer.json` how a
text becomes ids, the prompt in `about.json` included. {compares}
"""


@dataclass(frozen=True)
class Exportable:
    """A run with one encoder a side, and what others prepare pictures and texts by; compared with what it does itself.

    Attributes:
        name: of the run, for errors.
        how: the content of preprocessor_config.json.
        images, texts: example inputs, `pixel_values [B,3,H,W]`, and `input_ids` and `attention_mask [B,N]`.
    """

    name: str
    recipe: Recipe
    model: Model
    image: Any
    text: Any
    how: dict[str, Any]
    tokenizer: Any
    images: dict[str, Tensor]
    texts: dict[str, Tensor]

    def modules(self) -> dict[str, nn.Module]:
        """Return what makes embeddings of each side's example inputs."""
        compare = self.model.compare
        return {
            "image": ImageGraph(self.image, self.model.image, compare),
            "text": TextGraph(self.text, self.model.text, compare),
        }

    def write(
        self, path: Path, side: str, module: nn.Module, inputs: dict[str, Tensor], outputs: list[str]
    ) -> tuple[dict[str, Any], tuple[Tensor, ...]]:
        """Write the graph of ``image`` or ``text`` by `write_graph`; batches vary, and a text's length if it may."""
        axes = {0: "batch"} if side == "image" or self.tokenizer.padding["length"] else {0: "batch", 1: "tokens"}
        aggregator = self.recipe.aggregator[side]["name"]
        what = f"{self.name}: its {side} side ({getattr(self, side).name}, aggregator.{side} '{aggregator}')"
        return write_graph(path, module, {key: (tensor, axes) for key, tensor in inputs.items()}, outputs, what)


def exportable(retriever: Retriever, to: str = "onnx") -> Exportable:
    """Return what a run on the CPU exports; errors as of `export_onnx`, `to` names the option's value in them."""
    name = retriever.name
    retriever.require_uncorrected(f"an export to {to}")
    packages = {package: package for package in ("onnx", "onnxruntime", "onnxscript")}
    require_packages(f"`--to {to}` needs", packages, "onnx")
    from .onnx_search import pixels as prepared

    if retriever.run is None:
        raise RunError(f"{name} is no run; `--to {to}` takes one that xret trained")
    if retriever.model.compare.embedding == "joint":
        raise RunError(NO_VECTOR)
    recipe = retriever.run.recipe
    for side, block in recipe.aggregator.items():
        if block["name"] == "rows":
            raise RunError(f"{name} compares all rows of a picture with all words: aggregator.{side} gives no vectors")
    for encoders in (retriever.image_encoders, retriever.text_encoders):
        if len(encoders) > 1:
            raise RunError(f"{name} reads {len(encoders)} feature sets of a side; `--to {to}` takes one of each")
    (image, _), (text, _) = *retriever.image_encoders, *retriever.text_encoders
    if not hasattr(image, "features"):
        raise RunError(f"{name} reads {image.kind} features of {image.name}; `--to {to}` takes grids of pictures")
    how = _preprocessing(image, example_picture(*_PICTURES[0]))
    pictures = [example_picture(*size) for size in (*_PICTURES, *_odd(how))]
    pixels = torch.from_numpy(np.stack([prepared(picture, how) for picture in pictures]))
    _require_pixels(image, how, pictures, pixels)
    tokenizer: Any = text.portable_tokenizer()
    _require_ids(text, tokenizer)
    encoded = tokenizer.encode_batch(list(TEXTS[:3]))
    ids, mask = (torch.tensor([getattr(encoding, key) for encoding in encoded]) for key in ("ids", "attention_mask"))
    texts = {"input_ids": ids, "attention_mask": mask}
    model = retriever.model.requires_grad_(False)
    return Exportable(name, recipe, model, image, text, how, tokenizer, {"pixel_values": pixels}, texts)


def export_onnx(retriever: Retriever, out: str | Path, *, dtype: str = "float32") -> dict[str, Any]:
    """Write a run as ONNX graphs with all that their user needs into a new folder; whole, or not at all.

    Args:
        retriever: the run, on the CPU.
        out: the folder.
        dtype: ``int8``: the weights of matrix products and embeddings take a byte a number, and the products are
            computed in bytes; convolutions, which that makes slower and far worse, stay as they are.

    Returns:
        What `about.json` says, and `out` and the `bytes` of all.

    Raises:
        OutputError: `out` exists already.
        EncoderError: the weights of an encoder are not found, or are others; or its tokenizer cannot be written.
        RunError: packages are missing; the run reads regions, videos or several feature sets of a side; something in it
            cannot be exported; or graphs, ids or pixels differ from the run's.
    """
    out = Path(out)
    require_new(out, folder=True)
    run = exportable(retriever)
    recipe, compare = run.recipe, run.model.compare
    about: dict[str, Any] = {
        "format": "xret-onnx",
        "version": 1,
        "run": Path(run.name).resolve().name,
        "recipe": retriever.title,
        "kind": compare.embedding,
        "similarity": dict(recipe.similarity),
        "measure": f"{recipe.similarity['name']}: {compare.score}",
        "dot_product": compare.dot_product,
        "unit": compare.of_cosines,  # whether vectors, elements or means have unit length
        "prompt": run.text.spec.prompt or "{}",
        "dtype": dtype,
        "image": run.image.identity,
        "text": run.text.identity,
    }
    with making(out, RunError, "choose another --out") as folder, torch.no_grad():
        graphs, embeddings, least = dict[str, Any](), dict[str, Tensor](), dict[str, float]()
        names = ["embedding"] if compare.embedding != "gaussian" else [*Gaussian._fields]
        for side, module in run.modules().items():
            tensors = run.images if side == "image" else run.texts
            outputs, path = [f"{side}_{part}" for part in names], folder / f"{side}.onnx"
            graphs[side], values = run.write(path, side, module, tensors, outputs)
            embeddings |= dict(zip(outputs, values, strict=True))
            if dtype == "int8":
                least[side] = quantise(path, tensors, values[0])
        if not compare.dot_product:
            compared = {key: (value, {0: f"{key.partition('_')[0]}s"}) for key, value in embeddings.items()}
            what, path = f"{run.name}: its similarity '{recipe.similarity['name']}'", folder / "similarity.onnx"
            graphs["similarity"], _ = write_graph(path, ScoreGraph(compare, names), compared, ["scores"], what)
        about |= {"graphs": graphs} | ({"least_cosine": least} if least else {})
        write_tokenizer(run.tokenizer, folder)
        for file, content in (("preprocessor_config", run.how), ("about", about)):
            (folder / f"{file}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        shutil.copyfile(Path(__file__).with_name("onnx_search.py"), folder / "search.py")
        (folder / "README.md").write_text(_card(about, run.image.name, run.text.name), encoding="utf-8")
    return about | {"out": str(out), "bytes": sum(file.stat().st_size for file in out.iterdir())}


def write_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write tokenizer.json and what transformers reads beside it."""
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=tokenizer.padding["pad_token"])
    fast.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))  # with its settings for cutting and padding


def _preprocessing(encoder: Any, picture: Image.Image) -> dict[str, Any]:
    """Return a preprocessor_config.json for what an encoder does to pictures; RunError where it does otherwise."""
    height, width = encoder.prepare(picture).shape[1:]
    settings = encoder.identity["preprocessing"]
    if "pad" in settings or not {"resize", "stretch"} & settings.keys():
        raise RunError(f"{encoder.name} pads pictures or does not resize them, which `--to onnx` cannot write")
    resample = settings.get("resample")
    if resample is None:
        resample = Image.Resampling[settings["interpolation"].upper()]
    side = settings.get("stretch")
    mean, std = (settings.get(key, settings.get(f"image_{key}")) for key in ("mean", "std"))
    if not settings.get("do_normalize", True):
        mean, std = [0.0] * 3, [1.0] * 3
    return {
        "image_processor_type": "CLIPImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"shortest_edge": settings["resize"]} if side is None else {"height": side, "width": side},
        "resample": int(resample),
        "do_center_crop": True,
        "crop_size": {"height": height, "width": width},
        "crop_offset": "round" if settings.get("processor", "timm") in ("timm", "open_clip") else "floor",
        "do_rescale": True,
        "rescale_factor": settings.get("rescale_factor", 1 / 255),
        "do_normalize": True,
        "image_mean": mean,
        "image_std": std,
    }


def _odd(how: dict[str, Any]) -> list[tuple[int, int]]:
    """Return widths and heights of which, resized, an odd number of pixels is cut off: half a pixel at a side."""
    if "shortest_edge" not in how["size"]:
        return []
    shorter, crop = how["size"]["shortest_edge"], how["crop_size"]
    longer = [side + 4 * ((shorter - side) // 4 + 2) + 3 for side in (crop["width"], crop["height"])]
    return [(longer[0], shorter), (shorter, longer[1])]


def example_picture(width: int, height: int) -> Image.Image:
    """Return a picture with edges and gradients."""
    across, down = np.arange(width) / width, np.arange(height)[:, None] / height
    channels = (
        across + 0 * down,
        (np.sin(40 * across * down) + 1) / 2,
        ((8 * across).round() + (8 * down).round()) % 2,
    )
    return Image.fromarray((255 * np.stack(channels, 2)).astype(np.uint8))


def _require_pixels(encoder: Any, how: dict[str, Any], pictures: list[Image.Image], pixels: Tensor) -> None:
    mean, std = (torch.tensor(how[f"image_{key}"])[:, None, None] for key in ("mean", "std"))
    for picture, given in zip(pictures, pixels, strict=True):
        expected = encoder.prepare(picture)
        if expected.dtype == torch.uint8:
            expected = (expected / 255 - mean) / std
        levels = ((given - expected) * std).abs() * 255 if expected.shape == given.shape else torch.tensor(torch.inf)
        if not (levels.max() <= LEVELS and levels.mean() <= LEVELS / 10):
            raise RunError(
                f"{encoder.name} prepares pictures in a way that no preprocessor_config.json says (pixels differ by up"
                f" to {levels.max():.0f} of 255); take features of another image encoder"
            )


def _require_ids(encoder: TextEncoder, tokenizer: Any) -> None:
    for text, ids in zip(TEXTS, encoder.tokenize(TEXTS), strict=True):
        encoded = tokenizer.encode((encoder.spec.prompt or "{}").replace("{}", text))
        if [id_ for id_, mask in zip(encoded.ids, encoded.attention_mask, strict=True) if mask] != ids:
            raise RunError(
                f"{encoder.name} takes '{text[:60]}' apart in a way that no tokenizer.json says; take features of"
                " another text encoder"
            )


def _card(about: dict[str, Any], image: str, text: str) -> str:
    def shapes(puts: dict[str, list[Any]]) -> str:
        return ", ".join(f"`{key}` [{', '.join(map(str, shape))}]" for key, shape in puts.items())

    rows = [
        f"| `{key}.onnx` | {shapes(of['inputs'])} | {shapes(of['outputs'])} |" for key, of in about["graphs"].items()
    ]
    compares = "Vectors have unit length. " if about["unit"] and about["dot_product"] else ""
    compares += (
        "Scores are dot products." if about["dot_product"] else "`similarity.onnx` compares what the others give."
    )
    return _CARD.format(**about | {"graphs": "\n".join(rows), "image": image, "text": text}, compares=compares)
