"""A run as a model of sentence-transformers: encoders as that library runs them, and the head as its dense layers.

`SentenceTransformer(folder).encode` takes texts and, where the image encoder is of transformers, pictures. A linear
layer is a `Dense`; a residual perceptron is two, of which the first passes what it reads on as its positive and its
negative part.
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from ...pipeline.errors import RunError, require_packages
from ...pipeline.files import making, require_new
from ...pipeline.reading.features import Features
from ...pipeline.wording import raised
from ..model import Branch
from ..modules.adapters import RowsAdapter
from ..modules.projections import ResidualPerceptron
from ..modules.residual import ClosedForm
from .onnx import TEXTS, example_picture
from .retriever import Retriever

CLOSE = 1e-5  # of what the library gives to what the run does, without rounding of features


@torch.no_grad()
def export_sentences(retriever: Retriever, out: str | Path) -> dict[str, Any]:
    """Write a run, on the CPU, as a model of sentence-transformers into a new folder; whole, or not at all.

    Returns:
        `out`, and the `sides` that the model takes: ``text``, and ``image`` where the encoder is of transformers.

    Raises:
        OutputError: `out` exists already.
        RunError: sentence-transformers is missing; an encoder or the head is none that it can run; or it gives other
            vectors.
    """
    out, name = Path(out), retriever.name
    require_new(out, folder=True)
    retriever.require_uncorrected("a model of sentence-transformers")
    require_packages(
        "`--to sentence-transformers` needs", {"sentence-transformers": "sentence_transformers"}, "sentences"
    )
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Normalize, Router

    compare, is_head = retriever.model.compare, isinstance(getattr(retriever.model, "text", None), Branch)
    if not (is_head and compare.dot_product and compare.of_cosines):
        raise RunError(f"{name} is no head whose vectors are compared by cosine; take one of linear, mlp or cca")
    if len(retriever.text_encoders) > 1 or not hasattr(retriever.text_encoders[0][0], "save"):
        raise RunError(
            f"{name} reads no text encoder that sentence-transformers can load; extract with --text hf:MODEL"
        )
    (text, _), images = retriever.text_encoders[0], retriever.image_encoders
    image = images[0][0] if len(images) == 1 and images[0][0].identity["encoder"] == "hf" else None
    with making(out, RunError, "choose another --out") as folder, TemporaryDirectory() as work:
        branches = {"text": (text, retriever.model.text), "image": (image, retriever.model.image)}
        routes: dict[str, list[Any]] = {}
        try:
            for side, (encoder, branch) in branches.items():
                if encoder is None:
                    continue
                if image is not None and encoder.identity.get("global") == "projected":
                    # The library loads no model of both sides without the tokenizer and the image processor.
                    (text if encoder is image else image).save(Path(work, side))
                Path(work, side).mkdir(exist_ok=True)
                encoder.save(Path(work, side))
                before = (_text if side == "text" else _image)(name, encoder, branch, Path(work, side))
                routes[side] = [*before, *_head(name, branch), Normalize()]
            model = SentenceTransformer(modules=[Router(routes, default_route="text")], device="cpu")
            model.save(str(folder))
            model = SentenceTransformer(str(folder), device="cpu")
        except (OSError, ValueError, KeyError) as error:
            raise RunError(f"{name} cannot be loaded by sentence-transformers ({raised(error)})") from error
        _require_equal(retriever, model, text, image)
    return {"out": str(out), "sides": list(routes)}


def _require_equal(retriever: Retriever, model: Any, text: Any, image: Any) -> None:
    """Raise RunError where a model of the library gives other vectors than the run."""
    name, ids = retriever.name, [torch.tensor(ids) for ids in text.tokenize(TEXTS)]
    token, length = nn.utils.rnn.pad_sequence(ids, True), torch.tensor([*map(len, ids)])
    local, pooled = text.features(token, length)
    features = Features(length, local, pooled, token)
    _require_close(name, "text", model.encode(list(TEXTS)), retriever.model.embed_captions(features).embedding)
    if image is not None:
        picture = example_picture(320, 240)
        local, pooled = image.features(image.prepare(picture)[None])
        features = Features(torch.tensor([image.rows]), local, pooled, grid=image.grid)
        _require_close(name, "image", model.encode([picture]), retriever.model.embed_images(features).embedding)


def _require_close(name: str, side: str, theirs: Any, ours: Any) -> None:
    furthest = float((torch.as_tensor(theirs) - nn.functional.normalize(ours, dim=-1)).abs().max())
    if not furthest <= CLOSE:
        raise RunError(f"{name}: its {side} side gives other vectors in sentence-transformers, by {furthest:.2g}")


def _text(_name: str, encoder: Any, branch: Branch, folder: Path) -> list[Any]:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Dense
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    cached = branch.adapter.global_ == "cached"
    if cached and (folder / "modules.json").exists():
        model: Any = SentenceTransformer(str(folder), device="cpu")
        first, model.truncate_dim = model.truncate_dim, None  # which the library does after all modules
        width = model.get_embedding_dimension()
        cut = [] if first is None else [Dense(width, first, False, nn.Identity(), torch.eye(first, width))]
        return [*model, *cut]
    how: dict[str, Any] = {"max_seq_length": encoder.max_length}
    if encoder.identity.get("global") == "projected":
        if cached:
            return [Transformer(str(folder), **how)]
        states = {"method": "get_text_features", "method_output_name": "last_hidden_state"}
        how |= {"modality_config": {"text": states}, "module_output_name": "token_embeddings"}
    return [Transformer(str(folder), **how), Pooling(encoder.channels, "max" if cached else "mean")]


def _image(name: str, encoder: Any, branch: Branch, folder: Path) -> list[Any]:
    from sentence_transformers.sentence_transformer.modules import Transformer

    method = {"projected": "get_image_features", "pooler": "forward"}.get(encoder.identity["global"])
    if method is None or branch.adapter.global_ != "cached":
        raise RunError(f"{name} reads what {encoder.name} has no pooler for; take features of CLIP, SigLIP or DINOv2")
    modality: Any = {"image": {"method": method, "method_output_name": "pooler_output"}}
    return [Transformer(str(folder), modality_config=modality, module_output_name="sentence_embedding")]


def _head(name: str, branch: Branch) -> list[Any]:
    """Return a branch of global features as modules of the library."""
    from sentence_transformers.base.modules import Dense, Normalize

    def dense(weight: Tensor, bias: Tensor, activation: nn.Module) -> Any:
        return Dense(weight.shape[1], weight.shape[0], True, activation, weight.contiguous(), bias)

    residual, straight = branch.residual, nn.Identity()
    adapter: Any = branch.adapter
    if residual is not None and isinstance(residual.base, ClosedForm) and not residual.layer.weight.any():
        matrix = residual.base.matrix.T
        return [Normalize(), dense(matrix, -matrix @ residual.base.mean, straight)]
    layer: Any = getattr(adapter, "global_layer", None) or getattr(adapter, "layer", None)
    fits = isinstance(adapter, RowsAdapter) and adapter.global_ in ("cached", "pooled")
    if residual is not None or branch.aggregator.uses_local or not fits:
        layer = None
    linear = layer.linear if isinstance(layer, ResidualPerceptron) else layer
    if not isinstance(linear, nn.Linear):
        raise RunError(f"{name} has a head that is no linear layer or perceptron a side; take linear, mlp or cca")
    weight, bias = linear.weight, linear.bias
    read = adapter.global_input
    mean, scale = (read.mean, 1 / read.deviation) if read.standardize else (torch.zeros(()), torch.ones(()))

    def of_cached(weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        scaled = weight * scale
        return scaled, bias - (scaled * mean).sum(1)

    if layer is linear:
        return [dense(*of_cached(weight, bias), straight)]
    widen, norm, _, narrow = layer.mlp
    hidden, shift = widen.weight, widen.bias
    if layer.on_linear:
        hidden, shift = hidden @ weight, hidden @ bias + shift
    if not isinstance(norm, nn.Identity):
        raise RunError(f"{name} normalises batches in its perceptron; set adapter.*.batch_norm=false")
    through, moved = of_cached(weight, bias)
    first = dense(
        torch.cat([of_cached(hidden, shift)[0], through, -through]),
        torch.cat([of_cached(hidden, shift)[1], moved, -moved]),
        nn.ReLU(),
    )
    same = torch.eye(len(bias))
    return [first, dense(torch.cat([narrow.weight, same, -same], 1), narrow.bias, straight)]
