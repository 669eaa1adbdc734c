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
import logging
import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedTokenizerFast

from ...pipeline.encoders.base import TextEncoder
from ...pipeline.errors import RunError, require_packages
from ...pipeline.files import making, require_new
from ...pipeline.reading.features import Features
from ...pipeline.wording import raised
from ..model import Branch, Model
from ..modules.embedding import Gaussian, embedding_of, tensors_of
from ..modules.similarity import Similarity
from ..recipes.blocks import Recipe
from .retriever import Retriever

CLOSE = 1e-4  # of an embedding's numbers to the run's, relative to the largest
LEVELS = 3.5  # of 256, that a pixel may differ: other code for resizing rounds otherwise
_LARGE = 1_800_000_000  # bytes of weights: a file of ONNX holds 2 GB, and more lies beside it
_PICTURES = ((320, 240), (231, 347), (96, 96))  # widths and heights that are prepared both ways, beside `_odd`
_IN_BYTES = ["MatMul", "Gemm", "Gather"]
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


class _Images(nn.Module):
    """From pixels to what a branch embeds them as; encoders are no modules, and hidden from torch in a tuple."""

    def __init__(self, encoder: Any, branch: Branch, compare: Similarity) -> None:
        super().__init__()
        self.network, self.branch, self.compare, self._encoder = encoder.network, branch, compare, (encoder,)

    def forward(self, pixel_values: Tensor) -> tuple[Tensor, ...]:
        (encoder,) = self._encoder
        local, global_ = encoder.features(pixel_values)
        length = torch.full((local.shape[0],), encoder.rows)
        return _embedded(self.branch, self.compare, Features(length, local, global_, grid=encoder.grid))


class _Texts(nn.Module):
    """From token ids likewise; words have no network."""

    def __init__(self, encoder: Any, branch: Branch, compare: Similarity) -> None:
        super().__init__()
        self.network, self.branch = getattr(encoder, "network", None), branch
        self.compare, self._encoder = compare, (encoder,)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
        (encoder,), length = self._encoder, attention_mask.sum(1)
        local, global_ = (None, None) if self.network is None else encoder.features(input_ids, length)
        return _embedded(self.branch, self.compare, Features(length, local, global_, input_ids))


class _Scores(nn.Module):
    """From the tensors of images and texts, which have the same `names`, to scores."""

    def __init__(self, compare: Similarity, names: Sequence[str]) -> None:
        super().__init__()
        self.compare, self.names = compare, names

    def forward(self, *tensors: Tensor) -> tuple[Tensor]:
        count = len(self.names)
        sides = (dict(zip(self.names, some, strict=True)) for some in (tensors[:count], tensors[count:]))
        return (self.compare(*map(embedding_of, sides)),)


def _embedded(branch: Branch, compare: Similarity, features: Features) -> tuple[Tensor, ...]:
    return tuple(tensors_of(compare.normalised(branch(features).embedding)).values())


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
            "image": _Images(self.image, self.model.image, compare),
            "text": _Texts(self.text, self.model.text, compare),
        }

    def what(self, side: str) -> str:
        """Name a side in errors."""
        aggregator = self.recipe.aggregator[side]["name"]
        return f"{self.name}: its {side} side ({getattr(self, side).name}, aggregator.{side} '{aggregator}')"


def exportable(retriever: Retriever, to: str = "onnx") -> Exportable:
    """Return what a run on the CPU exports; errors as of `export_onnx`, `to` names the option's value in them."""
    name = retriever.name
    packages = {package: package for package in ("onnx", "onnxruntime", "onnxscript")}
    require_packages(f"--to {to} needs", packages, "onnx")
    from .onnx_search import pixels as prepared

    if retriever.run is None:
        raise RunError(f"{name} is no run; --to {to} takes one that xret trained")
    recipe = retriever.run.recipe
    for side, block in recipe.aggregator.items():
        if block["name"] == "rows":
            raise RunError(f"{name} compares all rows of a picture with all words: aggregator.{side} gives no vectors")
    for encoders in (retriever.image_encoders, retriever.text_encoders):
        if len(encoders) > 1:
            raise RunError(f"{name} reads {len(encoders)} feature sets of a side; --to {to} takes one of each")
    (image, _), (text, _) = *retriever.image_encoders, *retriever.text_encoders
    if not hasattr(image, "features"):
        raise RunError(f"{name} reads {image.kind} features of {image.name}; --to {to} takes grids of pictures")
    how = _preprocessing(image, example_picture(*_PICTURES[0]))
    pictures = [example_picture(*size) for size in (*_PICTURES, *_odd(how))]
    pixels = torch.from_numpy(np.stack([prepared(picture, how) for picture in pictures]))
    _require_pixels(image, how, pictures, pixels)
    tokenizer: Any = text.portable_tokenizer()
    _require_ids(text, tokenizer)
    encoded = tokenizer.encode_batch(list(TEXTS[:3]))
    ids, mask = (torch.tensor([getattr(one, key) for one in encoded]) for key in ("ids", "attention_mask"))
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
        batch = {0: "batch"}
        tokens = batch if run.tokenizer.padding["length"] else {0: "batch", 1: "tokens"}
        graphs, made, least = dict[str, Any](), dict[str, Tensor](), dict[str, float]()
        names = ["embedding"] if compare.embedding != "gaussian" else [*Gaussian._fields]
        for side, module in run.modules().items():
            tensors = run.images if side == "image" else run.texts
            inputs = {key: (tensor, batch if side == "image" else tokens) for key, tensor in tensors.items()}
            outputs, path = [f"{side}_{part}" for part in names], folder / f"{side}.onnx"
            graphs[side], values = write_graph(path, module, inputs, outputs, run.what(side))
            made |= dict(zip(outputs, values, strict=True))
            if dtype == "int8":
                least[side] = _quantise(path, tensors, values[0])
        if not compare.dot_product:
            compared = {key: (value, {0: f"{key.partition('_')[0]}s"}) for key, value in made.items()}
            what = f"{run.name}: its similarity '{recipe.similarity['name']}'"
            graphs["similarity"], _ = write_graph(
                folder / "similarity.onnx", _Scores(compare, names), compared, ["scores"], what
            )
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


def _quantise(path: Path, inputs: dict[str, Tensor], expected: Tensor) -> float:
    """Let a graph compute in bytes, and return the least cosine of what it gives with what is expected."""
    import onnxruntime
    from onnxruntime.quantization import quantize_dynamic

    whole = [path, *path.parent.glob(f"{path.name}.data")]
    large, out = len(whole) > 1, path.with_suffix(".int8")
    with _quiet():
        quantize_dynamic(path, out, per_channel=True, op_types_to_quantize=_IN_BYTES, use_external_data_format=large)
    for file in whole:
        file.unlink()
    out.rename(path)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    found = torch.from_numpy(session.run(None, {key: tensor.numpy() for key, tensor in inputs.items()})[0])
    return float(functional.cosine_similarity(found, expected, dim=-1).min())


def write_graph(
    path: Path, module: nn.Module, inputs: dict[str, tuple[Tensor, dict[int, str]]], outputs: list[str], what: str
) -> tuple[dict[str, Any], tuple[Tensor, ...]]:
    """Write a graph, and compare its outputs with the module's, also for a smaller batch.

    Each of `inputs` is an example and the names of the axes that vary. Return the shapes of inputs and outputs by name,
    and the module's outputs.
    """
    import onnxruntime
    from onnxscript import opset18

    def log_sigmoid(x: Any) -> Any:  # torch's own translation is -inf below -88
        return opset18.Neg(opset18.Softplus(opset18.Neg(x)))

    tensors = {key: tensor for key, (tensor, _) in inputs.items()}
    made: tuple[Tensor, ...] = module.eval()(*tensors.values())
    axes: tuple[Any, ...] = tuple(names for _, names in inputs.values())
    if isinstance(module, _Scores):
        axes = (axes,)
    size = sum(value.nbytes for value in module.state_dict().values())
    smaller = {  # a single sample, with a token less
        key: tensor[:1, :-1] if 1 in inputs[key][1] else tensor[:1] for key, tensor in tensors.items()
    }
    try:
        with _quiet():
            program = torch.onnx.export(
                module,
                tuple(tensors.values()),
                input_names=list(tensors),
                output_names=outputs,
                dynamic_shapes=axes,
                custom_translation_table={torch.ops.aten.log_sigmoid.default: log_sigmoid},
                dynamo=True,
                verbose=False,
            )
            assert program is not None
            program.save(path, external_data=size > _LARGE)
            session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        feeds = ({key: tensor.numpy() for key, tensor in some.items()} for some in (tensors, smaller))
        ran = [session.run(outputs, feed) for feed in feeds]
    except Exception as error:  # both libraries raise all kinds
        raise RunError(f"{what} cannot be written as ONNX ({_cause(error)}); take another head") from error
    for found, expected in zip(ran, (made, module(*smaller.values())), strict=True):
        for array, tensor in zip(found, expected, strict=True):
            furthest = float((torch.from_numpy(array) - tensor).abs().max() / tensor.abs().max().clamp(min=1e-12))
            if array.shape != tensor.shape or not furthest <= CLOSE:
                raise RunError(
                    f"{what} gives other numbers as ONNX, by {furthest:.2g} of the largest; take another head"
                )
    shapes = {put.name: list(put.shape) for put in (*session.get_inputs(), *session.get_outputs())}
    return {"inputs": {key: shapes[key] for key in tensors}, "outputs": {key: shapes[key] for key in outputs}}, made


def _cause(error: BaseException) -> str:
    """Return the first line of the first error in a chain: what torch could not do, without its advice."""
    while error.__cause__ is not None:
        error = error.__cause__
    return raised(error)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep from a user what exporters say of their own code and progress."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _preprocessing(encoder: Any, picture: Image.Image) -> dict[str, Any]:
    """Return a preprocessor_config.json for what an encoder does to pictures; RunError where it does otherwise."""
    height, width = encoder.prepare(picture).shape[1:]
    settings = encoder.identity["preprocessing"]
    if "pad" in settings or not {"resize", "stretch"} & settings.keys():
        raise RunError(f"{encoder.name} pads pictures or does not resize them, which --to onnx cannot write")
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
    """Raise RunError where `search.py` prepares pictures otherwise than the encoder."""
    mean, std = (torch.tensor(how[f"image_{key}"])[:, None, None] for key in ("mean", "std"))
    for picture, found in zip(pictures, pixels, strict=True):
        expected = encoder.prepare(picture)
        if expected.dtype == torch.uint8:
            expected = (expected / 255 - mean) / std
        levels = ((found - expected) * std).abs() * 255 if expected.shape == found.shape else torch.tensor(torch.inf)
        if not (levels.max() <= LEVELS and levels.mean() <= LEVELS / 10):
            raise RunError(
                f"{encoder.name} prepares pictures in a way that no preprocessor_config.json says (pixels differ by up"
                f" to {levels.max():.0f} of 255); take features of another image encoder"
            )


def _require_ids(encoder: TextEncoder, tokenizer: Any) -> None:
    """Raise RunError where a tokenizer.json gives other ids than the encoder."""
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
