"""From cached features to the head: one adapter for each kind of feature set.

An adapter projects the local features `[B, N, C]` to rows `[B, N, local_dim]` and gives a global feature
`[B, D]`. Cached features may be float16; an adapter casts them to its weights' dtype. Rows at or after `length`
are padding and change nothing.

Sources: VSE++ (one linear layer over the grid; word embedding and GRU), *Learning the Best Pooling Strategy
for Visual Semantic Embedding* (VSE-infinity: regions, bi-GRU, BERT, frames of videos) and SetDiv sections 3.1 and 4.2.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from .padding import max_rows, mean_rows, on_valid_rows
from .parameters import Count, Part
from .recurrence import run_packed

Pooling = Literal["cached", "mean", "max"]
RoiLayers = Literal["linear", "mlp"]
WordRows = Literal["embedding", "gru"]
WordPooling = Literal["last", "mean", "max"]


class Adapted(NamedTuple):
    """Features as aggregators want them.

    Attributes:
        local: `[B, N, local_dim]`; None without cached local features.
        length: valid rows of each sample, `[B]`.
        global_: `[B, D]`.
    """

    local: Tensor | None
    length: Tensor
    global_: Tensor


class _Projection(Part):
    """One layer over every local row, and over the cached global feature where that is wanted."""

    def __init__(self, layer: nn.Module, channels: int, global_channels: int, dim: int, global_: Pooling) -> None:
        super().__init__()
        if global_ == "cached" and global_channels != channels:
            raise ValueError(
                f"global 'cached' needs a cached global feature as wide as the local ones, "
                f"but it has {global_channels} channels and they have {channels}: choose mean or max"
            )
        self.layer = layer
        self.local_dim = dim
        self.global_ = global_

    def fields(self, uses_local: bool) -> set[str]:
        """Return which cached fields the adapter reads, given whether the aggregator uses local rows."""
        if self.global_ == "cached":
            return {"global", "local"} if uses_local else {"global"}
        return {"local"}

    def forward(
        self, length: Tensor, local: Tensor | None = None, global_: Tensor | None = None, token: Tensor | None = None
    ) -> Adapted:
        """Adapt `local [B, N, C]` with `length [B]`, and `global_ [B, C]` where the adapter reads it."""
        dtype = next(self.layer.parameters()).dtype
        rows = None if local is None else self._rows(local.to(dtype), length)
        if self.global_ == "cached":
            assert global_ is not None, "fields() asks for it"
            return Adapted(rows, length, self.layer(global_.to(dtype)))
        assert rows is not None, "fields() asks for them"
        return Adapted(rows, length, _pool(self.global_, rows, length))

    def _rows(self, local: Tensor, length: Tensor) -> Tensor:
        return self.layer(local)


class LinearAdapter(_Projection):
    """One linear layer shared by all local rows.

    Over a feature map it is a 1x1 convolution. Frames take the place of the cells of an image (VSE-infinity, section
    5.1.2), and VSE++ averages them.

    Args:
        channels: width C of the cached local features.
        global_channels: width of the cached global feature.
        dim: width D.
        global_: `cached`: the layer over the cached global feature; `mean`, `max`: over the adapted rows.

    Raises:
        ValueError: the cached global feature is wanted, but is not as wide as the local features.
    """

    def __init__(self, channels: int, global_channels: int, dim: int, *, global_: Pooling = "mean") -> None:
        super().__init__(_linear(channels, dim), channels, global_channels, dim, global_)


class TokensAdapter(_Projection):
    """One linear layer over the states of a text encoder's tokens; parameters as for `LinearAdapter`."""

    def __init__(self, channels: int, global_channels: int, dim: int, *, global_: Pooling = "max") -> None:
        super().__init__(_linear(channels, dim), channels, global_channels, dim, global_)


class RoiAdapter(_Projection):
    """One linear layer over region features (SCAN, VSRN), or that plus a perceptron (VSE-infinity, SetDiv).

    Args:
        channels: width C of the cached local features.
        global_channels: width of the cached global feature.
        dim: width D.
        global_: as for `LinearAdapter`.
        layers: `linear`, or `mlp`: with two layers of a perceptron beside it, the hidden one of D / 2 normalised
            over the valid rows of a batch, as in VSE-infinity's public code.
    """

    def __init__(
        self, channels: int, global_channels: int, dim: int, *, global_: Pooling = "max", layers: RoiLayers = "mlp"
    ) -> None:
        layer = _ResidualMlp(channels, dim) if layers == "mlp" else _linear(channels, dim)
        super().__init__(layer, channels, global_channels, dim, global_)

    def _rows(self, local: Tensor, length: Tensor) -> Tensor:
        return on_valid_rows(self.layer, local, length)


class WordsAdapter(Part):
    """Trainable word embeddings and a GRU over them.

    Args:
        vocabulary_size: number of words, `<unk>` (id 0) included.
        dim: width D of the GRU's state. Two directions are averaged.
        word_dim: width of a word embedding.
        local: what the local rows are: the word embeddings (SetDiv) or the GRU's outputs (VSE-infinity).
        global_: `last`: the last valid state (backwards: the first); `mean`, `max`: over the GRU's outputs.
        bidirectional: run the GRU in both directions.
        vectors: a text file of word vectors that the embeddings begin with. The training reads it once and calls
            `load_vectors`; a trained model does not need the file any more.
        train_vectors: let the embeddings learn; if false, all of them stay as the file, or chance, made them.

    Raises:
        ValueError: a choice is unknown, or `train_vectors` is false without `vectors`.
    """

    def __init__(
        self,
        vocabulary_size: int,
        dim: int,
        *,
        word_dim: Count = 300,
        local: WordRows = "embedding",
        global_: WordPooling = "last",
        bidirectional: bool = True,
        vectors: str | None = None,
        train_vectors: bool = True,
    ) -> None:
        super().__init__()
        if vectors is None and not train_vectors:
            raise ValueError("train_vectors is false and the embeddings would stay random: name a file as vectors")
        self.vectors = vectors
        self.local = local
        self.global_ = global_
        self.local_dim = word_dim if local == "embedding" else dim
        self.embedding = nn.Embedding(vocabulary_size, word_dim)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)  # as VSE++ does
        self.embedding.weight.requires_grad_(train_vectors)
        self.gru = nn.GRU(word_dim, dim, batch_first=True, bidirectional=bidirectional)

    def fields(self, uses_local: bool) -> set[str]:
        """Return which cached fields the adapter reads: the token ids, whatever the aggregator uses."""
        return {"token"}

    @torch.no_grad()
    def load_vectors(self, vectors: Tensor, found: Tensor) -> None:
        """Let the embeddings be `vectors [V, word_dim]` where `found [V]` is true.

        The others stay random, scaled to the standard deviation of those found, so that no word outweighs the rest.

        Raises:
            ValueError: the vectors differ from the embeddings in width or number.
        """
        weight = self.embedding.weight
        if vectors.shape != weight.shape:
            theirs, ours = (" x ".join(map(str, matrix.shape)) for matrix in (vectors, weight))
            raise ValueError(f"the word vectors are {theirs} and the embeddings {ours}: set word_dim to their width")
        rows = vectors[found].to(weight)
        weight *= rows.std(correction=0) / weight.std(correction=0)
        weight[found.to(weight.device)] = rows

    def forward(
        self, length: Tensor, local: Tensor | None = None, global_: Tensor | None = None, token: Tensor | None = None
    ) -> Adapted:
        """Adapt the ids `token [B, N]`, of which the first `length[b]` (at least one) count."""
        words = self.embedding(token)
        states, last = run_packed(self.gru, words, length)
        states = states.unflatten(2, (len(last), -1)).mean(2)
        pooled = last.mean(0) if self.global_ == "last" else _pool(self.global_, states, length)
        return Adapted(words if self.local == "embedding" else states, length, pooled)


ADAPTERS: dict[str, type[nn.Module]] = {
    "grid": LinearAdapter,
    "roi": RoiAdapter,
    "frames": LinearAdapter,
    "words": WordsAdapter,
    "tokens": TokensAdapter,
}


class _ResidualMlp(nn.Module):
    def __init__(self, channels: int, dim: int) -> None:
        super().__init__()
        self.linear = _linear(channels, dim)
        self.mlp = nn.Sequential(
            nn.Linear(channels, dim // 2), nn.BatchNorm1d(dim // 2), nn.ReLU(), nn.Linear(dim // 2, dim)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.mlp(x)


def _linear(channels: int, dim: int) -> nn.Linear:
    layer = nn.Linear(channels, dim)
    nn.init.xavier_uniform_(layer.weight)  # as VSE++ does
    nn.init.zeros_(layer.bias)
    return layer


def _pool(how: str, rows: Tensor, length: Tensor) -> Tensor:
    return mean_rows(rows, length) if how == "mean" else max_rows(rows, length)
