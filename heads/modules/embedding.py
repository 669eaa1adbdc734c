"""What a sample is embedded as: a vector `[B, D]`, a set `[B, K, D]`, a Gaussian, a sequence, or several of these.

Vectors and sets are plain tensors; Gaussians and sequences are named tuples of tensors.
"""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Several
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class Gaussian(NamedTuple):
    """Diagonal Gaussians of B samples.

    Attributes:
        mean: `[B, D]`.
        log_variance: natural logarithm of the variance of each dimension, `[B, D]`.
    """

    mean: Tensor
    log_variance: Tensor

    def log_determinant(self) -> Tensor:
        """Return the logarithm of the determinant of each covariance, float64 `[B]`.

        This is what xret calls uncertainty, as *Uncertainty-based Cross-Modal Retrieval* does (section 3.3). It grows
        with D.
        """
        return self.log_variance.double().sum(1)


class Sequence(NamedTuple):
    """The rows of B samples, padded to the longest.

    Attributes:
        rows: `[B, N, D]`, or token ids `[B, N]`; values after a sample's length mean nothing.
        length: valid rows of each sample, `[B]`.
    """

    rows: Tensor
    length: Tensor


class Joint(tuple[Any, ...]):
    """Embeddings of the same B samples by several heads, whose scores are averaged."""


Embedding = Tensor | Gaussian | Sequence | Joint


def kind_of(embedding: Embedding) -> str:
    """Return ``vector``, ``set``, ``gaussian``, ``sequence`` or ``joint``."""
    if isinstance(embedding, Joint):
        return "joint"
    if isinstance(embedding, Gaussian):
        return "gaussian"
    if isinstance(embedding, Sequence):
        return "sequence"
    return "vector" if embedding.ndim == 2 else "set"


def each(change: Callable[[Tensor], Tensor], embedding: Embedding) -> Embedding:
    """Apply `change` to the tensors of an embedding, whose first axis is the samples."""
    if isinstance(embedding, Tensor):
        return change(embedding)
    if isinstance(embedding, Joint):
        return Joint(each(change, part) for part in embedding)
    return type(embedding)(*map(change, embedding))


def shape_of(embedding: Embedding) -> list[int]:
    """Return the shape of vectors or sets, of Gaussians' means, or of sequences' rows; of a `Joint`, the first's."""
    return list(embedding.shape) if isinstance(embedding, Tensor) else shape_of(embedding[0])


def tensors_of(embedding: Embedding) -> dict[str, Tensor]:
    """Return the tensors of an embedding by their names; of a vector or a set there is one, ``embedding``."""
    if isinstance(embedding, Joint):
        return {f"{at}.{name}": t for at, part in enumerate(embedding) for name, t in tensors_of(part).items()}
    return {"embedding": embedding} if isinstance(embedding, Tensor) else embedding._asdict()


def embedding_of(tensors: Mapping[str, Tensor]) -> Embedding:
    """Return the embedding of which `tensors_of` gave these; others may stand beside them."""
    parts: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        at, _, own = name.partition(".")
        if own:
            parts.setdefault(int(at), {})[own] = tensor
    if parts:
        return Joint(embedding_of(parts[at]) for at in sorted(parts))
    for kind in (Gaussian, Sequence):
        if set(kind._fields) <= set(tensors):
            return kind(**{name: tensors[name] for name in kind._fields})
    return tensors["embedding"]


def concatenate(embeddings: Several[Embedding]) -> Embedding:
    """Join batches of embeddings of one kind; sequences are padded with zeros to the longest of all."""
    first = embeddings[0]
    if isinstance(first, Tensor):
        return torch.cat(list(embeddings))  # type: ignore[arg-type]
    if isinstance(first, Joint):
        return Joint(map(concatenate, zip(*embeddings, strict=True)))
    if isinstance(first, Sequence):
        longest = max(part.rows.shape[1] for part in embeddings)  # type: ignore[union-attr]
        rows = [functional.pad(part.rows, (0, 0, 0, longest - part.rows.shape[1])) for part in embeddings]  # type: ignore[union-attr]
        return Sequence(torch.cat(rows), torch.cat([part.length for part in embeddings]))  # type: ignore[union-attr]
    return Gaussian(*map(torch.cat, zip(*embeddings, strict=True)))
