"""A batch larger than memory or than one device: embedded and compared in parts, with the gradients of the whole.

Source: Gao, Zhang, Han, Callan: *Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup* (RepL4NLP
2021): embeddings are computed part by part and nothing else is kept; the loss is that of the whole batch; going back,
each part is computed a second time and takes its embeddings' gradients on. This is what `torch.utils.checkpoint` does
to one part: it also puts back the random state, so that dropout and noise are those of the first pass. Where loss and
similarity allow it, `modules.losses.blocks` does the same to the similarities.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from ...pipeline.errors import RecipeError
from ...pipeline.reading.features import Features, set_by_set
from ..modules.aggregators import Aggregated
from ..modules.embedding import Sequence, concatenate
from ..modules.losses.blocks import BlockLoss, Pairs, joined
from ..modules.similarity import Cosine

_FIELDS = ("embedding", "slots", "gaussian", "rows", "global_")  # what losses read; attention is for figures


def embed_in_parts(embed: Callable[[Features], Aggregated], features: Features, parts: int = 1) -> Aggregated:
    """Return `embed(features)`, computed in so many parts.

    Args:
        embed: an embedding of a sample must depend on that sample alone; see `require_whole_batches`.
        features: of B samples.
        parts: how many.

    Returns:
        What losses read of `Aggregated`.
    """
    samples = len(features.length)
    size = -(-samples // parts)
    if size == samples:
        return embed(features)
    cuts = [_cut(features, begin, begin + size) for begin in range(0, samples, size)]
    # As a dictionary of tensors, among which checkpoint looks for the device whose random state it keeps.
    made = _join([checkpoint(lambda values: embed(Features(**values)), vars(cut), use_reentrant=False) for cut in cuts])
    words = features.words
    return made._replace(token=None if words is None or words.token is None else Sequence(words.token, words.length))


def require_whole_batches(model: nn.Module, why: str) -> None:
    """Raise RecipeError if a model cannot be embedded in parts, which `why` asks for.

    Batch normalisation makes an embedding depend on the other samples beside it.
    """
    names = [name for name, module in model.named_modules() if isinstance(module, _BatchNorm)]
    if names:
        raise RecipeError(
            f"{why} embeds a batch in parts, but the batch normalisation in {names[0]} needs it whole; do "
            "without it by adapter.KIND.batch_norm=false, aggregator.image.batch_norm=false or another aggregator"
        )


def goes_in_blocks(compare: nn.Module, losses: nn.ModuleDict) -> bool:
    """Return whether a batch's pairs can be compared block by block: cosines, and losses that are made for it."""
    return isinstance(compare, Cosine) and all(isinstance(loss, BlockLoss) for loss in losses.values())


def compared_pairs(caption_image: Tensor, text: Tensor | None, *, same_is_positive: bool) -> tuple[Pairs, Pairs]:
    """Return a batch's positives, and the pairs that take no part in a loss.

    As `Batch.positives` and `objective.same_text` give them, but listed: memory grows with their number.

    Args:
        caption_image: the image of each caption, `[C]`.
        text: the number of each caption's text, `[C]`; None: texts are not compared.
        same_is_positive: whether a caption with the text of an image's own is a positive; if not, it takes no part.
    """
    captions = torch.arange(len(caption_image), device=caption_image.device)
    own, none = Pairs(caption_image, captions), Pairs(captions[:0], captions[:0])
    if text is None:
        return own, none
    # Each text of an image, once, and all captions that have it, which stand side by side in `order`.
    number = text.to(captions.device).unique(return_inverse=True)[1]
    order, count = number.argsort(stable=True), number.bincount()
    mine = (caption_image * len(count) + number).unique()
    image, its_text = mine // len(count), mine % len(count)
    repeats = count[its_text]
    rows, begun = image.repeat_interleave(repeats), repeats.cumsum(0) - repeats
    first = (count.cumsum(0) - count)[its_text]
    columns = order[torch.arange(len(rows), device=rows.device) + (first - begun).repeat_interleave(repeats)]
    other = caption_image[columns] != rows
    same = Pairs(rows[other], columns[other])
    if same_is_positive:
        return joined(own, same), none
    return own, same


def _cut(features: Features, first: int, last: int) -> Features:
    """Return some samples; their padding stays, so that parts can be put together again."""

    def cut(part: Features) -> Features:
        values = {name: value[first:last] if isinstance(value, Tensor) else value for name, value in vars(part).items()}
        return Features(**values)  # type: ignore[arg-type]

    return set_by_set(cut, features)


def _join(parts: list[Aggregated]) -> Aggregated:
    joined = {
        name: None if getattr(parts[0], name) is None else concatenate([getattr(part, name) for part in parts])
        for name in _FIELDS
    }
    return Aggregated(**joined)  # type: ignore[arg-type]
