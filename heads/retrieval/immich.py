"""A run as a model for smart search in immich, in the place of one that immich knows by name.

    visual/model.onnx       image, float32 [1,3,S,S], to image_embedding
    visual/preprocess_cfg.json
    textual/model.onnx      input_ids and attention_mask, int32 [1,N], to text_embedding
    textual/tokenizer.json, tokenizer_config.json
    config.json, README.md

Source: immich's machine-learning/immich_ml/models/clip and server/src/constants.ts of 2026. It asks the name for the
number of dimensions, so that vectors are filled up with zeros, which changes no cosine. It resizes and cuts pictures to
one size; what the run cuts off besides, the graph does.
"""

import json
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

from ...pipeline.errors import RunError
from ...pipeline.files import making, require_new
from .onnx import Exportable, exportable, write_tokenizer
from .retriever import Retriever

# By dimensions the models that immich feeds with ids and a mask.
NAMES = {512: "XLM-Roberta-Large-Vit-B-32", 640: "XLM-Roberta-Large-Vit-B-16Plus", 768: "XLM-Roberta-Large-Vit-L-14"}
LONGEST = 77  # tokens of a query: immich pads each to so many
_CARD = """\
# {run} for immich

Put this folder as `clip/{name}` into the model cache of immich's machine learning, in the place of what may be there,
and choose `{name}` as the model of smart search; then let immich search all pictures again. Queries are cut at
{tokens} tokens.
"""


class _Side(nn.Module):
    """A side with immich's inputs: ids as int32, or pictures of which a margin is cut off; and its width."""

    def __init__(self, module: nn.Module, width: int, cut: tuple[int, int] | None = None) -> None:
        super().__init__()
        self.module, self.width, self.cut = module, width, cut

    def forward(self, first: Tensor, mask: Tensor | None = None) -> tuple[Tensor]:
        if mask is not None:
            (vectors,) = self.module(first.long(), mask.long())
        else:
            high, wide = self.cut or first.shape[2:]
            top, left = (first.shape[2] - high) // 2, (first.shape[3] - wide) // 2
            (vectors,) = self.module(first[:, :, top : top + high, left : left + wide])
        return (functional.pad(vectors, (0, self.width - vectors.shape[1])),)


def export_immich(retriever: Retriever, out: str | Path) -> dict[str, Any]:
    """Write a run, on the CPU, as a model of immich into a new folder; whole, or not at all.

    Returns:
        `out`, the `name` that immich has to know the model by, and the `bytes` of all.

    Raises:
        OutputError, EncoderError, RunError: as of `export_onnx`; and where immich cannot use the run: it gives no
            vectors that are compared by cosine, or too wide ones, or puts a prompt around texts.
    """
    out = Path(out)
    require_new(out, folder=True)
    run = exportable(retriever, "immich")
    width = _width(run)
    crop = run.how["crop_size"]["height"], run.how["crop_size"]["width"]
    edge = run.how["size"].get("shortest_edge") or run.how["size"]["height"]
    tokens = run.tokenizer.padding["length"] or min(LONGEST, run.tokenizer.truncation["max_length"])
    preprocess = {
        "size": [edge, edge],
        "mode": "RGB",
        "mean": run.how["image_mean"],
        "std": run.how["image_std"],
        "interpolation": Image.Resampling(run.how["resample"]).name.lower(),
        "resize_mode": "shortest" if "shortest_edge" in run.how["size"] else "squash",
    }
    config = {"embed_dim": width, "vision_cfg": {"image_size": edge}, "text_cfg": {"context_length": tokens}}
    modules = run.modules()
    high, wide = edge - crop[0], edge - crop[1]  # what a square picture has beside its crop
    margins = wide // 2, wide - wide // 2, high // 2, high - high // 2
    grown = functional.pad(run.images["pixel_values"], margins)
    ids = {name: tensor.int() for name, tensor in run.texts.items()}
    with making(out, RunError, "choose another --out") as folder, torch.no_grad():
        for name, content in (("visual/preprocess_cfg", preprocess), ("config", config)):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        (folder / "textual").mkdir()
        for part, side, inputs, cut in (("visual", "image", {"image": grown}, crop), ("textual", "text", ids, None)):
            module = _Side(modules[side], width, cut)
            run.write(folder / part / "model.onnx", side, module, inputs, [f"{side}_embedding"])
        write_tokenizer(run.tokenizer, folder / "textual")
        card = _CARD.format(run=Path(run.name).resolve().name, name=NAMES[width], tokens=tokens)
        (folder / "README.md").write_text(card, encoding="utf-8")
    files = [file for file in out.rglob("*") if file.is_file()]
    return {"out": str(out), "name": NAMES[width], "bytes": sum(file.stat().st_size for file in files)}


def _width(run: Exportable) -> int:
    """Return how wide the vectors have to be made; RunError where immich cannot use the run."""
    if not (run.model.compare.dot_product and run.model.compare.of_cosines):
        raise RunError(f"{run.name} does not compare vectors by cosine, as immich does; take linear, mlp or cca")
    if run.text.spec.prompt not in (None, "{}"):
        raise RunError(f"{run.name} puts '{run.text.spec.prompt}' around texts, and immich cannot; extract without")
    with torch.no_grad():
        dim = run.modules()["image"](*run.images.values())[0].shape[1]
    for width in NAMES:
        if width >= dim:
            return width
    raise RunError(f"{run.name} has vectors of {dim} numbers, and immich takes {max(NAMES)}; set model.dim to that")
