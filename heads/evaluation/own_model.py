"""A user-defined model as a ranker: anything that embeds the images and captions of a store, and compares them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from ...pipeline.device import pick_device
from ...pipeline.errors import RunError
from ...pipeline.reading.dataset import fields_there
from ...pipeline.reading.features import Features
from ...pipeline.store import FeatureCache
from ..modules.aggregators import Aggregated
from ..modules.embedding import Embedding, shape_of
from ..runs.features import sets_named
from .scoring import Ranker

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


class OwnModel(Ranker):
    """A user-defined model, which reads all fields of an image and a caption set.

    `features` is how the names of the sets begin, ``IMAGE,TEXT``; ``auto``: the only ones there. A `device` of ``auto``
    is that of the model's weights. RunError where the model lacks a method, or there is no `store`.
    """

    def __init__(self, model: Embedder, store: str | Path | None, features: str = "auto", device: str = "auto") -> None:
        name = type(model).__name__
        if missing := [method for method in METHODS if not callable(getattr(model, method, None))]:
            raise RunError(f"{name} is no run, no store and no model: it has no {' and no '.join(missing)}")
        if store is None:
            raise RunError(f"{name} is a model and needs store=…, whose features it embeds")
        weights = [*model.parameters()] if isinstance(model, nn.Module) else []
        self.device = weights[0].device if weights and device == "auto" else pick_device(device)
        self.run, self.name, self.cache = None, name, FeatureCache.open(store)
        image, _, text = features.partition(",")
        self.sets = sets_named(self.cache, image.strip(), text.strip() or "auto")
        checked: Any = _Checked(model, *fields_there(*self.sets))
        self.model = checked


class _Checked:
    """A user-defined model called as a head is: in evaluation mode, and what it returns has the right shape."""

    def __init__(self, model: Embedder, image_fields: tuple[set[str], ...], text_fields: tuple[set[str], ...]) -> None:
        self._model, self.image_fields, self.caption_fields = model, image_fields, text_fields

    def embed_images(self, features: Features) -> Aggregated:
        return self._embed("embed_images", features)

    def embed_captions(self, features: Features) -> Aggregated:
        return self._embed("embed_captions", features)

    def similarity(self, images: Embedding, captions: Embedding) -> Tensor:
        with _evaluating(self._model):
            found = self._model.similarity(images, captions)
        wanted = [shape_of(images)[0], shape_of(captions)[0]]
        if list(found.shape) != wanted:
            raise RunError(f"similarity gives {list(found.shape)} in the place of {wanted}, images by captions")
        return found

    def _embed(self, method: str, features: Features) -> Aggregated:
        with _evaluating(self._model):
            made = getattr(self._model, method)(features)
        made = made if isinstance(made, Aggregated) else Aggregated(made)
        count, one = len(features.rows), made.embedding
        if not isinstance(one, Embedding) or shape_of(one)[0] != count or (isinstance(one, Tensor) and one.ndim < 2):
            given = list(one.shape) if isinstance(one, Tensor) else type(one).__name__
            raise RunError(f"{method} gives {given} for {count} samples; return [{count}, D] or [{count}, K, D]")
        return made


@contextmanager
def _evaluating(model: Embedder) -> Iterator[None]:
    """Put a module into evaluation mode, and each of its parts back as it was."""
    modes = {part: part.training for part in model.modules()} if isinstance(model, nn.Module) else {}
    for part in modes:
        part.training = False
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode
