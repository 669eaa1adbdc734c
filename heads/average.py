"""The average of several heads as one model: its scores are the weighted mean of theirs."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..pipeline.errors import QueryError
from ..pipeline.reading.features import Features, side_by_side
from .model import Model
from .modules.aggregators import Aggregated
from .modules.embedding import Embedding, Joint
from .modules.similarity import SIMILARITIES, Similarity

NO_VECTOR = (
    "this average has no single vector of a sample, since not all of its runs compare vectors by cosine; take an"
    " average of runs that do, or one run"
)
Reads = tuple[Sequence[int], Sequence[int]]  # which of all image sets a head reads, and which of all caption sets


class AveragedScores(Similarity):
    """The weighted mean of several similarities, each of its own embeddings."""

    embedding = "joint"
    score = "the weighted mean of the scores of several runs"

    def __init__(self, parts: Sequence[nn.Module], weights: Sequence[float]) -> None:
        super().__init__()
        self.parts, self.weights = nn.ModuleList(parts), tuple(weights)

    def points(self, embedding: Embedding, *, query: bool) -> Tensor:
        """Raise QueryError: no points are near to each other as all of the runs have it."""
        raise QueryError(NO_VECTOR)

    def forward(self, images: Joint, captions: Joint) -> Tensor:
        """Compare I images with C captions: `[I, C]`."""
        each = zip(self.weights, self.parts, images, captions, strict=True)
        total: Tensor = sum((weight * part(*both) for weight, part, *both in each), torch.zeros(()))
        return total


class AveragedBranch(nn.Module):
    """One side of several heads, which read some of all feature sets each.

    With `weights` the embedding is one vector: the heads' unit vectors times the roots of the weights, whose cosine is
    the weighted mean of the heads' cosines. Without it is a `Joint`.
    """

    residual = None

    def __init__(
        self, branches: Sequence[nn.Module], reads: Sequence[Sequence[int]], weights: Sequence[float] | None
    ) -> None:
        super().__init__()
        self.branches, self.reads = nn.ModuleList(branches), reads
        self.weights = None if weights is None else tuple(weights)

    @property
    def fields(self) -> set[str] | tuple[set[str], ...]:
        """What must be read of each feature set."""
        of_sets = [set[str]() for _ in range(1 + max(max(sets) for sets in self.reads))]
        for branch, sets in zip(self.branches, self.reads, strict=True):
            fields: Any = branch.fields
            for number, of_set in zip(sets, fields if isinstance(fields, tuple) else (fields,), strict=True):
                of_sets[number] |= of_set
        return of_sets[0] if len(of_sets) == 1 else tuple(of_sets)

    def forward(self, features: Features) -> Aggregated:
        """Return the embeddings of B samples."""
        embeddings = [
            branch(side_by_side([features.parts[number] for number in sets])).embedding
            for branch, sets in zip(self.branches, self.reads, strict=True)
        ]
        if self.weights is None:
            return Aggregated(Joint(embeddings))
        cosine = SIMILARITIES["cosine"]()
        roots = (weight**0.5 for weight in self.weights)
        units = (root * cosine.normalised(vectors) for root, vectors in zip(roots, embeddings, strict=True))
        return Aggregated(torch.cat([*units], 1))


def average_of(models: Sequence[Model], reads: Sequence[Reads], weights: Sequence[float]) -> Model:
    """Return the average of models; a vector embeds each sample where all of them compare vectors by cosine."""
    vectors = all(model.compare.of_cosines and model.compare.dot_product for model in models)
    branches: Any = (
        AveragedBranch([getattr(model, side) for model in models], sets, weights if vectors else None)
        for side, sets in zip(("image", "text"), zip(*reads, strict=True), strict=True)
    )
    compare = SIMILARITIES["cosine"]() if vectors else AveragedScores([model.compare for model in models], weights)
    image, text = branches
    return Model(image, text, compare).eval()
