"""From cached features to the head: one adapter a kind of feature set.

An adapter projects the local features `[B, N, C]` to rows `[B, N, local_dim]` and gives a global feature
`[B, D]`. Cached features may be float16; an adapter casts them to its weights' dtype. Rows at or after `length`
are padding and change nothing.

Sources: VSE++ (one linear layer over the grid; word embedding and GRU), *Learning the Best Pooling Strategy
for Visual Semantic Embedding* (VSE-infinity: regions, bi-GRU, BERT) and SetDiv sections 3.1 and 4.2.
"""

from typing import Literal, NamedTuple, get_args

from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from .aggregators.pooling import max_rows, mean_rows

Pooling = Literal["cached", "mean", "max"]
WordRows = Literal["embedding", "gru"]
WordPooling = Literal["last", "mean", "max"]


class Adapted(NamedTuple):
    """Features as aggregators want them.

    Attributes:
        local: `[B, N, local_dim]`; None where the cached local features were not given.
        length: valid rows of each sample, `[B]`.
        global_: `[B, D]`.
    """

    local: Tensor | None
    length: Tensor
    global_: Tensor


class _Projection(nn.Module):
    """One layer over every local row, and over the cached global feature where that is wanted."""

    def __init__(self, layer: nn.Module, channels: int, global_channels: int, dim: int, global_: Pooling) -> None:
        super().__init__()
        _one_of("global", global_, get_args(Pooling))
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
        self,
        *,
        length: Tensor,
        local: Tensor | None = None,
        global_: Tensor | None = None,
        token: Tensor | None = None,
    ) -> Adapted:
        """Adapt `local [B, N, C]` with `length [B]`, and `global_ [B, C]` where the adapter reads it."""
        dtype = next(self.layer.parameters()).dtype
        rows = None if local is None else self.layer(local.to(dtype))
        if self.global_ == "cached":
            assert global_ is not None, "fields() asks for it"
            return Adapted(rows, length, self.layer(global_.to(dtype)))
        assert rows is not None, "fields() asks for them"
        return Adapted(rows, length, _pool(self.global_, rows, length))


class GridAdapter(_Projection):
    """A 1x1 convolution over a feature map: one linear layer shared by all places.

    Args:
        channels: width C of the cached local features.
        global_channels: width of the cached global feature.
        dim: width D.
        global_: `cached`: the layer over the cached global feature; `mean`, `max`: over the adapted rows.
    """

    def __init__(self, channels: int, global_channels: int, dim: int, *, global_: Pooling = "mean") -> None:
        super().__init__(_linear(channels, dim), channels, global_channels, dim, global_)


class TokensAdapter(_Projection):
    """One linear layer over the states of a text encoder's tokens; parameters as for `GridAdapter`."""

    def __init__(self, channels: int, global_channels: int, dim: int, *, global_: Pooling = "max") -> None:
        super().__init__(_linear(channels, dim), channels, global_channels, dim, global_)


class RoiAdapter(_Projection):
    """A linear layer plus a two-layer perceptron over region features; parameters as for `GridAdapter`."""

    def __init__(self, channels: int, global_channels: int, dim: int, *, global_: Pooling = "max") -> None:
        super().__init__(_ResidualMlp(channels, dim), channels, global_channels, dim, global_)


class WordsAdapter(nn.Module):
    """Trainable word embeddings and a GRU over them.

    Args:
        vocabulary_size: number of words, `<unk>` (id 0) included.
        dim: width D of the GRU's state. Two directions are averaged.
        word_dim: width of a word embedding.
        local: what the local rows are: the word embeddings (SetDiv) or the GRU's outputs (VSE-infinity).
        global_: `last`: the last valid state (backwards: the first); `mean`, `max`: over the GRU's outputs.
        bidirectional: run the GRU in both directions.
    """

    def __init__(
        self,
        vocabulary_size: int,
        dim: int,
        *,
        word_dim: int = 300,
        local: WordRows = "embedding",
        global_: WordPooling = "last",
        bidirectional: bool = True,
    ) -> None:
        super().__init__()
        _one_of("local", local, get_args(WordRows))
        _one_of("global", global_, get_args(WordPooling))
        self.local = local
        self.global_ = global_
        self.local_dim = word_dim if local == "embedding" else dim
        self.embedding = nn.Embedding(vocabulary_size, word_dim)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)  # as VSE++ does
        self.gru = nn.GRU(word_dim, dim, batch_first=True, bidirectional=bidirectional)

    def fields(self, uses_local: bool) -> set[str]:
        """Return which cached fields the adapter reads: the token ids, whatever the aggregator uses."""
        return {"token"}

    def forward(
        self,
        *,
        length: Tensor,
        local: Tensor | None = None,
        global_: Tensor | None = None,
        token: Tensor | None = None,
    ) -> Adapted:
        """Adapt the ids `token [B, N]`, of which the first `length[b]` (at least one) count."""
        words = self.embedding(token)
        # The lengths of a packed batch live on the CPU.
        packed = pack_padded_sequence(words, length.cpu(), batch_first=True, enforce_sorted=False)
        outputs, last = self.gru(packed)
        states, _ = pad_packed_sequence(outputs, batch_first=True, total_length=words.shape[1])
        states = states.unflatten(2, (len(last), -1)).mean(2)
        pooled = last.mean(0) if self.global_ == "last" else _pool(self.global_, states, length)
        return Adapted(words if self.local == "embedding" else states, length, pooled)


ADAPTERS: dict[str, type[nn.Module]] = {
    "grid": GridAdapter,
    "roi": RoiAdapter,
    "words": WordsAdapter,
    "tokens": TokensAdapter,
}


class _ResidualMlp(nn.Module):
    def __init__(self, channels: int, dim: int) -> None:
        super().__init__()
        self.linear = _linear(channels, dim)
        self.mlp = nn.Sequential(nn.Linear(channels, dim // 2), nn.ReLU(), nn.Linear(dim // 2, dim))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.mlp(x)


def _linear(channels: int, dim: int) -> nn.Linear:
    layer = nn.Linear(channels, dim)
    nn.init.xavier_uniform_(layer.weight)  # as VSE++ does
    nn.init.zeros_(layer.bias)
    return layer


def _pool(how: str, rows: Tensor, length: Tensor) -> Tensor:
    return mean_rows(rows, length) if how == "mean" else max_rows(rows, length)


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name} is '{value}', but must be one of {', '.join(known)}")
