"""From a batch to its loss, also of batches larger than memory: embedded and compared in parts.

Source: Gao, Zhang, Han, Callan: *Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup* (RepL4NLP
2021): embeddings are computed part by part and nothing else is kept; the loss is that of the whole batch; going back,
each part is computed a second time and takes its embeddings' gradients on. This is what `torch.utils.checkpoint` does
to one part: it also puts back the random state, so that dropout and noise are those of the first pass.
"""

from collections.abc import Callable, Hashable, Iterable
from collections.abc import Sequence as Several
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from ...pipeline.device import on_host, send
from ...pipeline.errors import RecipeError
from ...pipeline.reading.batches import Batch, Batches
from ...pipeline.reading.features import Features, set_by_set
from ..model import Model, losses_of, words_of
from ..modules.aggregators import Aggregated
from ..modules.embedding import Sequence, concatenate
from ..modules.losses.blocks import BlockLoss, Pairs, compared_masks, compared_pairs, in_blocks
from ..modules.similarity import Similarity
from ..recipes.blocks import Recipe
from .augmentation import averaged, blend, drop_rows, in_steps, mask_words
from .optimisation import autocast_dtype

_FIELDS = ("embedding", "slots", "gaussian", "rows", "global_")  # what losses read; local rows, too, where they do


class Prepared(NamedTuple):
    """A batch as its loss takes it: augmented, on the device, and its pairs either as a mask or listed on the host."""

    images: Features
    captions: Features
    words: Sequence | None  # of the captions, whole
    phases: tuple[Hashable, ...]  # of each term, see `Loss.begin`
    positives: Tensor | None = None  # bool [I, C]
    pairs: Pairs | None = None  # the positives, listed; None on a CPU, which finds them itself
    ignored: Tensor | None = None  # pairs that take no part, bool [I, C]; None: all do
    taught: Tensor | None = None  # a teacher's similarities [I, C]
    blocks: tuple[Pairs, Pairs] | None = None  # positives and ignored pairs where they are compared in blocks


class Objective:
    """The loss of a recipe: the weighted sum of its terms over a batch, augmented as it says.

    The `split` says which captions have equal texts, how many words there are, and where it is computed; None: no texts
    are equal, words are masked by the id that `mask` is set to, and it is in float32. A `teacher` may be set, which
    scores a batch.
    """

    static = True  # whether the operations of a step follow from the shapes of its batch
    generators: Several[torch.Generator] = ()  # from which a step draws beside the device's own

    def __init__(self, recipe: Recipe, model: Model, losses: nn.ModuleDict, split: Batches | None = None) -> None:
        self.recipe, self.model, self.losses = recipe, model, losses
        self.text_number: Callable[[Tensor], Tensor] | None = None  # of captions of the split
        self.precision: torch.dtype | None = None
        self.mask = 0
        self.teacher: Callable[[Batch], Tensor] | None = None
        self.weights = torch.tensor([block["weight"] for block in recipe.terms.values()])
        if split is not None:
            self.weights = send(self.weights, split.device)
            self.precision = autocast_dtype(recipe.runtime.precision, split.device)
            self.mask = len(split.caption_set.vocabulary or ())  # the id of `<mask>`, which follows those of the words
            if recipe.loss["same_text"] != "negative":
                self.text_number = lambda captions: torch.from_numpy(split.text_hashes(captions.numpy()))

    def __call__(self, batch: Batch, now: float) -> Tensor:
        """Return the loss of a batch followed by its terms, unweighted, ``[1 + T]``, after `now` epochs."""
        return self.loss(self.prepare(batch, now))

    def prepare(self, batch: Batch, now: float) -> Prepared:
        """Do what needs the host: draw the augmentation, and find out which pairs belong together."""
        phases = tuple(term.begin(now) for term in losses_of(self.losses))
        augment, images, captions = self.recipe.augment, batch.images, batch.captions
        if augment.mix:
            vectors = averaged(images, self.model.image.averages), averaged(captions, self.model.text.averages)
            images, captions = blend(*vectors, batch.caption_image, augment.mix)
        if augment.mask_words:
            captions = mask_words(captions, augment.mask_words, self.mask)
        images = in_steps(drop_rows(images, augment.image, augment.image_varies))
        captions = in_steps(drop_rows(captions, augment.text))
        text = None if self.text_number is None else self.text_number(batch.caption_index)
        same_is_positive = self.recipe.loss["same_text"] == "positive"
        owner, device = on_host(batch.caption_image), batch.caption_image.device
        listed = partial(compared_pairs, owner, text, same_is_positive=same_is_positive)
        if self.recipe.data.chunk is not None and goes_in_blocks(self.model.compare, self.losses):
            return Prepared(images, captions, words_of(batch.captions), phases, blocks=listed())
        positives, ignored = compared_masks(len(images.length), owner, text, same_is_positive=same_is_positive)
        pairs = None if device.type == "cpu" else Pairs(*send(torch.stack(listed()[0]), device))
        taught = None if self.teacher is None else self.teacher(batch)
        masks = send(positives, device), pairs, None if ignored is None else send(ignored, device)
        return Prepared(images, captions, words_of(batch.captions), phases, *masks, taught)

    def loss(self, given: Prepared) -> Tensor:
        """Compute the loss of a prepared batch without synchronising with the host."""
        device, parts = given.images.length.device, self._parts(given)
        with torch.autocast(device.type, self.precision, enabled=self.precision is not None):
            fields = (*_FIELDS, "local") if any(term.uses_local for term in losses_of(self.losses)) else _FIELDS
            images = embed_in_parts(self.model.embed_images, given.images, parts, fields)
            captions = embed_in_parts(self.model.embed_captions, given.captions, parts, fields)
        if given.words is not None:  # a loss that writes captions writes them whole
            captions = captions._replace(token=given.words)
        # Similarity and losses stay in float32: differences of a margin's size drown in 8 bits.
        terms = self._terms(given, images, captions)
        self.weights = self.weights.to(terms)  # the first time
        return torch.cat([(terms @ self.weights)[None], terms])

    def _terms(self, given: Prepared, images: Aggregated, captions: Aggregated) -> Tensor:
        if given.blocks is not None:
            losses: Any = self.losses.values()
            left, right = (self.model.compare.normalised(side.embedding) for side in (images, captions))
            return torch.stack([in_blocks(loss, left, right, *given.blocks) for loss in losses])
        assert given.positives is not None, "either blocks or a mask"
        similarity = self.model.similarity(images.embedding, captions.embedding)
        if given.ignored is not None:
            similarity = similarity.masked_fill(given.ignored, -torch.inf)
        terms = []
        for term in losses_of(self.losses):
            more: dict[str, Any] = {"pairs": given.pairs} if term.uses_pairs else {}
            more |= {"taught": given.taught} if term.uses_teacher else {}
            terms.append(term(similarity, given.positives, images, captions, **more))
        return torch.stack(terms)

    def _parts(self, given: Prepared) -> int:
        chunk = self.recipe.data.chunk
        units = given.images if self.recipe.data.unit == "image" else given.captions
        return 1 if chunk is None else -(-len(units.length) // chunk)


def embed_in_parts(
    embed: Callable[[Features], Aggregated], features: Features, parts: int = 1, fields: Iterable[str] = _FIELDS
) -> Aggregated:
    """Return these fields of `embed(features)`, computed in so many parts.

    An embedding of a sample must depend on that sample alone; see `require_whole_batches`.
    """
    samples = len(features.length)
    size = -(-samples // parts)
    if size == samples:
        return embed(features)
    cuts = [_cut(features, begin, begin + size) for begin in range(0, samples, size)]
    # As a dictionary of tensors, among which checkpoint looks for the device whose random state it keeps.
    made = [checkpoint(lambda values: embed(Features(**values)), vars(cut), use_reentrant=False) for cut in cuts]
    return _join(made, fields)._replace(token=words_of(features))


def require_whole_batches(model: nn.Module, why: str) -> None:
    """Raise RecipeError if `why` embeds a model in parts that has batch normalisation, which looks at whole batches."""
    names = [name for name, module in model.named_modules() if isinstance(module, _BatchNorm)]
    if names:
        raise RecipeError(
            f"{why} embeds a batch in parts, but the batch normalisation in {names[0]} needs it whole; do without it by"
            " adapter.KIND.batch_norm=false or another aggregator"
        )


def goes_in_blocks(compare: Similarity, losses: nn.ModuleDict) -> bool:
    """Return whether a batch's pairs can be compared block by block: dot products, and losses that are made for it."""
    return compare.dot_product and all(isinstance(loss, BlockLoss) for loss in losses.values())


def _cut(features: Features, first: int, last: int) -> Features:
    """Return some samples; their padding stays, so that parts can be put together again."""

    def cut(part: Features) -> Features:
        values = {name: value[first:last] if isinstance(value, Tensor) else value for name, value in vars(part).items()}
        values["length"] = send(on_host(part.length)[first:last], part.length.device)
        return Features(**values)  # type: ignore[arg-type]

    return set_by_set(cut, features)


def _join(parts: list[Aggregated], fields: Iterable[str]) -> Aggregated:
    joined = {
        name: None if getattr(parts[0], name) is None else concatenate([getattr(part, name) for part in parts])
        for name in fields
    }
    return Aggregated(**joined)  # type: ignore[arg-type]
