"""From a batch to its loss."""

from typing import Any, Self

import torch
from torch import Tensor, nn

from ...pipeline.reading.batches import Batch, Batches
from ..model import Model
from ..modules.aggregators import Aggregated
from ..modules.embedding import Sequence
from ..modules.losses.blocks import in_blocks
from ..recipes.blocks import Recipe
from .augmentation import averaged, blend, drop_rows, mask_words
from .large_batches import compared_pairs, embed_in_parts, goes_in_blocks
from .optimisation import autocast_dtype


class Objective:
    """The loss of a recipe.

    Args:
        recipe: says the weights of the terms, augmentation, and how much of a batch is embedded and compared at once.
        model: embeds and compares.
        losses: the terms.
        text_number: see `same_texts`; None: captions of equal text are negatives of each other like any.
        precision: see `optimisation.autocast_dtype`.
    """

    def __init__(
        self,
        recipe: Recipe,
        model: Model,
        losses: nn.ModuleDict,
        *,
        text_number: Tensor | None = None,
        precision: torch.dtype | None = None,
    ) -> None:
        self.recipe, self.model, self.losses = recipe, model, losses
        self.text_number, self.precision = text_number, precision
        self.weights = torch.tensor([block["weight"] for block in recipe.terms.values()])

    @classmethod
    def of(cls, recipe: Recipe, model: Model, losses: nn.ModuleDict, split: Batches) -> Self:
        """Return the objective of a training on `split`."""
        return cls(
            recipe,
            model,
            losses,
            text_number=None if recipe.loss["same_text"] == "negative" else same_texts(split),
            precision=autocast_dtype(recipe.runtime.precision, split.device),
        )

    def __call__(self, batch: Batch, now: float) -> Tensor:
        """Return the loss of a batch followed by its terms, unweighted, ``[1 + T]``, after `now` epochs."""
        device, augment = batch.caption_image.device, self.recipe.augment
        for term in self.losses.values():
            term.epoch = now  # type: ignore[assignment]
        images, captions = batch.images, batch.captions
        if augment.mix:
            vectors = averaged(images, self.model.image.averages), averaged(captions, self.model.text.averages)
            images, captions = blend(*vectors, batch.caption_image, augment.mix)
        if augment.mask_words:
            captions = mask_words(captions, augment.mask_words, self._mask)
        images = drop_rows(images, augment.image, augment.image_varies)
        captions = drop_rows(captions, augment.text)
        parts = self._parts(batch)
        with torch.autocast(device.type, self.precision, enabled=self.precision is not None):
            one = embed_in_parts(self.model.embed_images, images, parts)
            other = embed_in_parts(self.model.embed_captions, captions, parts)
        words = batch.captions.words
        if words is not None and words.token is not None:  # a loss that writes captions writes them whole
            other = other._replace(token=Sequence(words.token, words.length))
        # Similarity and losses stay in float32: differences of a margin's size drown in 8 bits.
        chunked = self.recipe.data.chunk is not None and goes_in_blocks(self.model.compare, self.losses)
        terms = (self._terms_in_blocks if chunked else self._terms)(batch, one, other)
        self.weights = self.weights.to(terms)  # the first time
        return torch.cat([(terms @ self.weights)[None], terms])

    def _terms(self, batch: Batch, images: Aggregated, captions: Aggregated) -> Tensor:
        """Return the terms of the whole similarity matrix."""
        similarity, positives = self.model.similarity(images.embedding, captions.embedding), batch.positives
        if self.text_number is not None:
            same = same_text(positives, self.text_number[batch.caption_index].to(positives.device))
            if self.recipe.loss["same_text"] == "positive":
                positives = positives | same
            else:
                similarity = similarity.masked_fill(same, -torch.inf)
        return torch.stack([term(similarity, positives, images, captions) for term in self.losses.values()])

    def _terms_in_blocks(self, batch: Batch, images: Aggregated, captions: Aggregated) -> Tensor:
        """Return the same terms without the matrix."""
        text = None if self.text_number is None else self.text_number[batch.caption_index]
        positives, ignored = compared_pairs(
            batch.caption_image, text, same_is_positive=self.recipe.loss["same_text"] == "positive"
        )
        sides: tuple[Any, Any] = (images.embedding, captions.embedding)
        losses: Any = self.losses.values()
        return torch.stack([in_blocks(loss, *sides, positives, ignored) for loss in losses])

    @property
    def _mask(self) -> int:
        """The id of `<mask>`: the last word that the adapter knows."""
        adapter = self.model.text.words
        assert adapter is not None, "the model takes words where they are masked"
        return adapter.vocabulary_size - 1

    def _parts(self, batch: Batch) -> int:
        """Return in how many parts a batch is embedded: `data.chunk` units at once."""
        chunk = self.recipe.data.chunk
        units = batch.images if self.recipe.data.unit == "image" else batch.captions
        return 1 if chunk is None else -(-len(units.length) // chunk)


def same_texts(batches: Batches) -> Tensor:
    """Return a number for each of a split's captions, equal where their texts are, int64 on the CPU."""
    numbers: dict[str, int] = {}
    return torch.tensor([numbers.setdefault(text, len(numbers)) for text in batches.texts()])


def same_text(positives: Tensor, text: Tensor) -> Tensor:
    """Return where a caption that is not the image's own has the text of one that is.

    Args:
        positives: bool ``[I, C]``.
        text: the number of each caption's text, ``[C]``.

    Returns:
        bool ``[I, C]``.
    """
    equal = (text[:, None] == text[None, :]).to(torch.float32)
    return (positives.to(torch.float32) @ equal > 0) & ~positives
