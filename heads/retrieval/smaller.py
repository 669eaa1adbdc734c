"""Embeddings in fewer dimensions and in bytes, for cosines of vectors and of the elements of sets.

The rotation is that of a principal component analysis without a mean, of unit elements of the training split: of all
of so many dimensions it keeps most of the squared products.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ...pipeline.errors import RunError
from ..evaluation.hubness import LEARN
from ..evaluation.metrics import block_ranks, recall_table
from ..evaluation.pairs import Pairs, Part
from ..evaluation.scoring import BATCH, Ranker, embed_all, representatives
from ..modules.embedding import Embedding
from .gallery import Gallery


@torch.no_grad()
def rotation(ranker: Ranker, dims: int) -> Tensor:
    """Return the rotation to so many dimensions, float32 `[D, dims]`, fitted on images and captions of training.

    RunError where the embeddings have fewer dimensions, or `dims` is below 1.
    """
    model, batches = ranker.model, ranker.batches(LEARN)
    moment = torch.zeros(())
    for embed, parts in (
        (model.embed_images, batches.image_features(BATCH)),
        (model.embed_captions, batches.caption_features(BATCH)),
    ):
        of_side = torch.zeros(())
        for part in parts:
            rows = _unit(embed_all(embed, [part])).flatten(0, -2).double()
            of_side = rows.T @ rows + of_side.to(rows)
        moment = moment.to(of_side) + of_side / of_side.trace().clamp(min=1)  # both sides weigh the same
    if not 0 < dims <= len(moment):
        raise RunError(f"the embeddings of {ranker.name} have {len(moment)} dimensions; take --dims from 1 to that")
    axes: Tensor = torch.linalg.eigh(moment).eigenvectors[:, -dims:].flip(1).float()
    return axes.contiguous()  # safetensors writes arrays of numpy as they lie in memory


def made_smaller(
    embedding: Embedding, turn: Tensor | None, dtype: str = "float32", largest: Tensor | None = None
) -> Tensor:
    """Return unit vectors or elements, rotated by `turn`; 127 as ``int8`` is the `largest`, by default of all."""
    rows = _unit(embedding)
    if turn is not None:
        rows = functional.normalize(rows @ turn.to(rows.device), dim=-1)
    if dtype == "int8":
        largest = rows.abs().max() if largest is None else largest
        rows = (rows * (127 / largest.clamp(min=1e-12))).round().to(torch.int8)  # 0 in a collapsed run
    return rows


def mean_recall(gallery: Gallery, images: Any, captions: Any, biases: tuple[Tensor, Tensor] | None = None) -> float:
    """Return the mean of the six recalls (%) of the last split of a gallery, by the run's similarity of embeddings.

    `images` and `captions` give embeddings when they are sliced; `biases` are added to their scores.
    """
    ranker, device = gallery.ranker, gallery.ranker.device
    first, last = gallery.rows_of_splits()[gallery.splits[-1]]
    begin, end = np.searchsorted(gallery.caption_image, (first, last))
    if biases is not None:
        biases = biases[0][first:last].to(device), biases[1][begin:end].to(device)
    images, captions = images[first:last].to(device), captions[begin:end].to(device)
    owner = torch.from_numpy(gallery.caption_image[begin:end] - first).to(device)
    same = representatives(captions, gallery.texts[begin:end])
    pairs = Pairs((Part(ranker.model, (images,), captions),), owner, same, biases)
    return recall_table(*block_ranks(pairs.blocks, last - first, owner)).rsum / 6


def require_smaller(ranker: Ranker, dtype: str) -> None:
    """Raise RunError where embeddings cannot be made smaller: no cosines compare them, or the dtype is wrong."""
    if dtype not in ("float32", "int8"):
        raise RunError(f"dtype is '{dtype}', but must be float32 or int8")
    compare = ranker.model.compare
    if not (compare.of_cosines and compare.embedding in ("vector", "set")):
        raise RunError(
            f"{ranker.name} compares by {type(compare).__name__}, and only what cosines compare"
            " (vectors, sets) can be made smaller; leave --dims and --dtype out"
        )


def _unit(embedding: Embedding) -> Tensor:
    assert isinstance(embedding, Tensor), "cosines are of vectors and sets"
    return functional.normalize(embedding, dim=-1)
