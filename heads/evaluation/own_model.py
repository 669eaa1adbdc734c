"""A user-defined model in the place of a head: anything that embeds the images and captions of a store."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ...pipeline.errors import RunError
from ...pipeline.reading.features import Features
from ..modules.aggregators import Aggregated
from ..modules.embedding import Embedding, shape_of
from ..modules.similarity import Similarity

METHODS = ("embed_images", "embed_captions", "similarity")


class Embedder(Protocol):
    """What a user-defined model must have; an `nn.Module` is called in evaluation mode.

    `features` are those of B samples, as in a batch of `xret.batches`.
    """

    def embed_images(self, features: Features) -> Any:
        """Return embeddings, ``[B, D]`` or sets ``[B, K, D]``."""

    def embed_captions(self, features: Features) -> Any:
        """Return embeddings, ``[B, D]`` or sets ``[B, K, D]``."""

    def similarity(self, images: Any, captions: Any) -> Tensor:
        """Return the similarity ``[I, C]`` of I and C embeddings; larger is closer."""


def require_methods(model: object) -> None:
    """Raise RunError where something is no `Embedder`."""
    if missing := [method for method in METHODS if not callable(getattr(model, method, None))]:
        name = type(model).__name__
        raise RunError(f"{name} is no run, no store and no model: it has no {' and no '.join(missing)}")


def digest_of(model: object) -> str:
    """Return the SHA-256 of a model's class and weights, of another object's attributes, in hexadecimal."""
    digest = sha256(type(model).__qualname__.encode())
    for held in [model] if isinstance(model, nn.Module) else tree_leaves(getattr(model, "__dict__", {})):
        for value in tree_leaves(held.state_dict() if isinstance(held, nn.Module) else held):
            if isinstance(value, Tensor):
                value = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
            if isinstance(value, np.ndarray | int | float | str):
                digest.update(value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode())
    return digest.hexdigest()


class CheckedModel:
    """A user-defined model called as a head is: in evaluation mode, and what it returns has the right shape.

    Attributes:
        compare: its similarity, asked as those of heads are; where it is one of xret's, that one.
    """

    def __init__(self, model: Embedder, image_fields: tuple[set[str], ...], text_fields: tuple[set[str], ...]) -> None:
        self._model, self.image_fields, self.caption_fields = model, image_fields, text_fields
        given = model.similarity
        self.compare = given if isinstance(given, Similarity) else _Compare(given)

    def embed_images(self, features: Features) -> Aggregated:
        """Return the embeddings of I images."""
        return self._embed("embed_images", features)

    def embed_captions(self, features: Features) -> Aggregated:
        """Return the embeddings of C captions."""
        return self._embed("embed_captions", features)

    def similarity(self, images: Embedding, captions: Embedding) -> Tensor:
        """Return their similarity ``[I, C]``."""
        given = [list(shape_of(side)) for side in (images, captions)]
        with _evaluating(self._model, f"similarity, of images {given[0]} and captions {given[1]}"):
            scores: object = self.compare(images, captions)
        wanted = [given[0][0], given[1][0]]
        if not isinstance(scores, Tensor) or list(scores.shape) != wanted:
            raise RunError(f"similarity gives {_shape(scores)} in the place of {wanted}, images by captions")
        return scores

    def _embed(self, method: str, features: Features) -> Aggregated:
        kept = {"local": features.local, "global_": features.global_}
        shown = [f"{name} {list(t.shape)} in {t.dtype}" for name, t in kept.items() if t is not None]
        with _evaluating(self._model, f"{method}, of features as the store has them: {' and '.join(shown) or 'ids'}"):
            aggregated = getattr(self._model, method)(features)
        aggregated = aggregated if isinstance(aggregated, Aggregated) else Aggregated(aggregated)
        n, rows = len(features.rows), aggregated.embedding
        if not isinstance(rows, Embedding) or shape_of(rows)[0] != n or (isinstance(rows, Tensor) and rows.ndim < 2):
            raise RunError(f"{method} gives {_shape(rows)} for {n} samples; return [{n}, D] or [{n}, K, D]")
        return aggregated


class _Compare(Similarity):
    """Any function of images and captions as a similarity of which nothing more is known."""

    def __init__(self, compare: Callable[[Any, Any], Tensor]) -> None:
        super().__init__()
        self._compare = compare

    def forward(self, images: Any, captions: Any) -> Tensor:
        return self._compare(images, captions)


def _shape(given: object) -> object:
    return list(given.shape) if isinstance(given, Tensor) else type(given).__name__


@contextmanager
def _evaluating(model: Embedder, call: str) -> Iterator[None]:
    """Put a module into evaluation mode, and each of its parts back as it was; name the call in what it raises."""
    modes = {part: part.training for part in model.modules()} if isinstance(model, nn.Module) else {}
    for part in modes:
        part.training = False
    try:
        yield
    except Exception as error:
        error.add_note(f"raised by {type(model).__name__}.{call}")
        raise
    finally:
        for part, mode in modes.items():
            part.training = mode
