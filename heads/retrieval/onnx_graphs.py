"""The graphs of ONNX that an export is made of: modules whose inputs and outputs are tensors, written and compared."""

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from ...pipeline.errors import RunError
from ...pipeline.reading.features import Features
from ...pipeline.wording import raised
from ..model import Branch
from ..modules.embedding import embedding_of, tensors_of
from ..modules.similarity import Similarity

CLOSE = 1e-4  # of an embedding's numbers to the run's, relative to the largest
_LARGE = 1_800_000_000  # bytes of weights: a file of ONNX holds 2 GB, and more lies beside it
_IN_BYTES = ["MatMul", "Gemm", "Gather"]


class ImageGraph(nn.Module):
    """From pixels to what a branch embeds them as; encoders are no modules, and hidden from torch in a tuple."""

    def __init__(self, encoder: Any, branch: Branch, compare: Similarity) -> None:
        super().__init__()
        self.network, self.branch, self.compare, self._encoder = encoder.network, branch, compare, (encoder,)

    def forward(self, pixel_values: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors of the embeddings."""
        (encoder,) = self._encoder
        local, global_ = encoder.features(pixel_values)
        length = torch.full((local.shape[0],), encoder.rows)
        return _embedded(self.branch, self.compare, Features(length, local, global_, grid=encoder.grid))


class TextGraph(nn.Module):
    """From token ids likewise; words have no network."""

    def __init__(self, encoder: Any, branch: Branch, compare: Similarity) -> None:
        super().__init__()
        self.network, self.branch = getattr(encoder, "network", None), branch
        self.compare, self._encoder = compare, (encoder,)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors of the embeddings."""
        (encoder,), length = self._encoder, attention_mask.sum(1)
        local, global_ = (None, None) if self.network is None else encoder.features(input_ids, length)
        return _embedded(self.branch, self.compare, Features(length, local, global_, input_ids))


class ScoreGraph(nn.Module):
    """From the tensors of images and texts, which have the same `names`, to scores."""

    def __init__(self, compare: Similarity, names: Sequence[str]) -> None:
        super().__init__()
        self.compare, self.names = compare, names

    def forward(self, *tensors: Tensor) -> tuple[Tensor]:
        """Return the scores."""
        count = len(self.names)
        sides = (dict(zip(self.names, some, strict=True)) for some in (tensors[:count], tensors[count:]))
        return (self.compare(*map(embedding_of, sides)),)


def _embedded(branch: Branch, compare: Similarity, features: Features) -> tuple[Tensor, ...]:
    return tuple(tensors_of(compare.normalised(branch(features).embedding)).values())


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
    expected: tuple[Tensor, ...] = module.eval()(*tensors.values())
    axes: tuple[Any, ...] = tuple(names for _, names in inputs.values())
    if isinstance(module, ScoreGraph):
        axes = (axes,)
    size = sum(value.nbytes for value in module.state_dict().values())
    # A single sample, with a token less.
    smaller = {key: tensor[:1, :-1] if 1 in varied else tensor[:1] for key, (tensor, varied) in inputs.items()}
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
        ran = [_run(session, some, outputs) for some in (tensors, smaller)]
    except Exception as error:  # both libraries raise all kinds
        raise RunError(f"{what} cannot be written as ONNX ({_cause(error)}); take another head") from error
    for array, tensor in zip(chain(*ran), (*expected, *module(*smaller.values())), strict=True):
        furthest = float((torch.from_numpy(array) - tensor).abs().max() / tensor.abs().max().clamp(min=1e-12))
        if array.shape != tensor.shape or not furthest <= CLOSE:
            raise RunError(f"{what} gives other numbers as ONNX, by {furthest:.2g} of the largest; take another head")
    puts = {"inputs": session.get_inputs(), "outputs": session.get_outputs()}
    return {key: {put.name: list(put.shape) for put in some} for key, some in puts.items()}, expected


def quantise(path: Path, inputs: dict[str, Tensor], expected: Tensor) -> float:
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
    outputs = torch.from_numpy(_run(session, inputs)[0])
    return float(functional.cosine_similarity(outputs, expected, dim=-1).min())


def _run(session: Any, inputs: dict[str, Tensor], outputs: list[str] | None = None) -> list[np.ndarray]:
    arrays: list[np.ndarray] = session.run(outputs, {key: tensor.numpy() for key, tensor in inputs.items()})
    return arrays


def _cause(error: BaseException) -> str:
    """Return the first line of the first error in a chain: what torch could not do, without its advice."""
    while error.__cause__ is not None:
        error = error.__cause__
    return raised(error)


@contextmanager
def _quiet() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
