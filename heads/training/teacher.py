"""The run that a head learns from, beside its captions: its scores of the samples of a training split."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ...pipeline.device import on_host
from ...pipeline.errors import RecipeError, RunError
from ...pipeline.reading.batches import Batch, Batches
from ...pipeline.wording import counted
from ..evaluation.scoring import Ranker, embed
from ..modules.embedding import Embedding, each
from ..recipes.blocks import Recipe
from ..recipes.recipe import changed

_TERM = "distillation"


class Teacher:
    """A run's embeddings of a training split, in their order there; images in their first view.

    RunError where the run embeds fewer samples than there are.
    """

    def __init__(self, run: str | Path, split: Batches, device: torch.device, trust: bool) -> None:
        ranker = Ranker(run, store=split.image_set.cache.url, device=str(device), trust=trust)
        batches = ranker.batches("train")
        self.compare = ranker.model.similarity
        images, captions = embed(ranker.model, batches)
        self.images = _in_order(images, batches.image_rows, split.image_rows, f"{run} has no embedding of", "image")
        self.captions = _in_order(
            captions, batches.caption_rows, split.caption_rows, f"{run} has no embedding of", "caption"
        )
        self._owner = torch.from_numpy(split.caption_image)

    @torch.no_grad()
    def scores(self, batch: Batch) -> Tensor:
        """Return the similarities of a batch's images and captions, ``[I, C]``."""
        captions = batch.caption_index
        images = captions.new_zeros(len(batch.images.length))
        images[on_host(batch.caption_image)] = self._owner[captions]
        return self.compare(_some(self.images, images), _some(self.captions, captions))


def taught(recipe: Recipe, distil: str | Path | None) -> Recipe:
    """Return the recipe with a term for what is taught; RecipeError where it lacks its teacher, or blends pairs."""
    if distil is not None and recipe.augment.mix:
        raise RecipeError("a teacher scores samples and no blends of them: set augment.mix=0, or leave --distil out")
    if distil is not None and _TERM not in recipe.terms:
        return changed(recipe, {f"loss.{_TERM}.weight": 1.0})
    if distil is None and _TERM in recipe.terms:
        raise RecipeError(f"loss.{_TERM} needs a teacher: name a run by --distil, or set loss.{_TERM}.weight=0")
    return recipe


def _in_order(embedding: Embedding, there: np.ndarray, wanted: np.ndarray, fault: str, what: str) -> Embedding:
    places = np.searchsorted(there, wanted).clip(max=len(there) - 1)
    if missing := int((there[places] != wanted).sum()):
        raise RunError(f"{fault} {counted(missing, what)} of train, whose features it could not read; take another run")
    return _some(embedding, torch.from_numpy(places))


def _some(embedding: Embedding, rows: Tensor) -> Embedding:
    return each(lambda values: values[rows.to(values.device)], embedding)
