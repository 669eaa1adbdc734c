"""From cached features to the head: one adapter for each kind of feature set.

An adapter projects the local features `[B, N, C]` to rows `[B, N, local_dim]` and gives a global feature
`[B, D]`. Cached features may be float16; an adapter casts them to its weights' dtype. Rows at or after `length`
are padding and change nothing.

Sources: VSE++ (one linear layer over the grid; word embedding and GRU), *Learning the Best Pooling Strategy
for Visual Semantic Embedding* (VSE-infinity: regions, bi-GRU, BERT, frames of videos) and SetDiv sections 3.1 and 4.2.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import ClassVar, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from .dropout import Dropout
from .padding import max_rows, mean_rows, valid_rows, with_ends
from .parts import Deep, Epochs, Part, Rate, Registry, Width
from .projections import USED_WITH, CachedInput, Layers, RowNorm, on_valid_rows, projection
from .recurrence import run_packed

Pooling = Literal["cached", "pooled", "mean", "max"]
WordEncoder = Literal["gru", "bag"]
WordRows = Literal["embedding", "gru"]

SETDIV_DROPOUT = 0.1  # of what `mlp-on-linear` gives, as in SetDiv's published code


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


class Cached(Protocol):
    """Cached features of B samples: `local [B, N, C]` with `length [B]`, `global_ [B, C]`, and ids `token [B, N]`."""

    length: Tensor
    local: Tensor | None
    global_: Tensor | None
    token: Tensor | None


class CachedSets(Cached, Protocol):
    """Cached features of B samples, and those of each feature set by itself."""

    @property
    def parts(self) -> Sequence[Cached]:
        """The features of each set."""


class Adapter(Part):
    """Base of adapters, made as `Class(channels, global_channels, dim, **parameters)`, or of words `Class(words, dim)`.

    Called as `adapter(length [B], local, global_, token, uses_local=…)`, it returns an `Adapted`; see `RowsAdapter`.

    Attributes:
        local_dim: width of the rows that it gives.
        global_: what its global feature is made of; `"pooled"` says: of the mean of the cached rows alone.
        ends: whether a caption gets a row before its words and one after them.
        vectors: a file of word vectors that a training reads once and hands to `load_vectors`; None: none.
    """

    local_dim: int
    global_: str = "cached"
    ends: bool = False
    vectors: str | None = None

    def fields(self, uses_local: bool) -> set[str]:
        """Return which cached fields it reads, of `local`, `global` and `token`, given what the aggregator reads."""
        return {"global", "local"} if uses_local else {"global"}

    def of_each_set(self) -> "list[Adapter]":
        """Return the adapter of each feature set that it reads."""
        return [self]

    def adapt(self, features: CachedSets, *, uses_local: bool) -> Adapted:
        """Call it on what it reads of cached features."""
        inputs = features.length, features.local, features.global_, features.token
        return self(*inputs, uses_local=uses_local)

    def measure(self, parts: Callable[[], Iterable[Cached]], uses_local: bool) -> None:
        """Take statistics of all samples of a training split before the first step; each call of `parts` reads it."""

    def load_vectors(self, vectors: Tensor, found: Tensor) -> None:
        """Take the vectors `[V, word_dim]` of the first V ids, where `found [V]`, before the first step."""

    def frozen(self) -> dict[Tensor, int]:
        """Return weights that do not learn in so many first epochs."""
        return {}


ADAPTERS: Registry[Adapter] = Registry("adapter", Adapter, "xret.nn")


@ADAPTERS.register("rows", "layers over the cached rows and the global feature")
class RowsAdapter(Adapter):
    """Layers shared by all local rows, for grids, regions, frames and the states of a text encoder's tokens.

    Over a feature map one linear layer is a 1x1 convolution. Frames take the place of the cells of an image
    (VSE-infinity, section 5.1.2), and VSE++ averages them.

    Args:
        channels: width C of the cached local features.
        global_channels: width of the cached global feature.
        dim: width D.
        global_: `cached`: the layers over the cached global feature; `pooled`: over the mean of the cached rows;
            `mean`, `max`: of the adapted rows.
            It goes through the layers of the rows; one of another width, as CLIP's, through layers of its own.
        layers, hidden, depth, batch_norm, hidden_dropout: see `projections.projection`. What `mlp-on-linear` gives is
            dropped as well, for the rows and for the global feature (or the rows that it is made of) by itself.
        standardize, dropout: of what is cached, see `projections.CachedInput`.
    """

    used_with: ClassVar = USED_WITH

    def __init__(
        self,
        channels: int,
        global_channels: int,
        dim: int,
        *,
        global_: Pooling = "mean",
        layers: Layers = "linear",
        hidden: Width | None = None,
        depth: Deep = 1,
        batch_norm: bool = True,
        hidden_dropout: Rate = 0.0,
        standardize: bool = False,
        dropout: Rate = 0.0,
    ) -> None:
        super().__init__()
        width = global_channels if global_ == "cached" else channels  # of what the global feature is made of
        make = partial(projection, layers, dim=dim, hidden=hidden, depth=depth)
        make = partial(make, batch_norm=batch_norm, dropout=hidden_dropout)
        self.layer = make(channels)
        self.global_layer = make(width) if width != channels else None
        self.local_dim = dim
        self.output_dropout = Dropout(SETDIV_DROPOUT if layers == "mlp-on-linear" else 0.0)
        self.global_ = global_
        # Rows and vectors that share a batch norm are normalised together: it has one mean and deviation in evaluation.
        has_norm = any(isinstance(module, RowNorm) for module in self.layer.modules())
        self.normed_together = has_norm and self.global_layer is None and self._reads_vector
        self.rows_input = CachedInput(channels, standardize=standardize, dropout=dropout)
        self.global_input = CachedInput(width, standardize=standardize and self._reads_vector, dropout=dropout)

    @property
    def _reads_vector(self) -> bool:
        """Whether the global feature is made of one vector a sample, and not of the adapted rows."""
        return self.global_ in ("cached", "pooled")

    def fields(self, uses_local: bool) -> set[str]:
        """Return which cached fields the adapter reads."""
        if self.global_ == "cached":
            return {"global", "local"} if uses_local else {"global"}
        return {"local"}

    def measure(self, parts: Callable[[], Iterable[Cached]], uses_local: bool) -> None:
        """Take the statistics of `standardize`."""
        if self.rows_input.standardize and self._adapts_rows(uses_local):
            rows = (part.local[valid_rows(part.local, part.length)] for part in parts() if part.local is not None)
            self.rows_input.measure(rows)
        if self.global_input.standardize:
            self.global_input.measure(self._vector(part.length, part.local, part.global_) for part in parts())

    def forward(
        self,
        length: Tensor,
        local: Tensor | None = None,
        global_: Tensor | None = None,
        token: Tensor | None = None,
        *,
        uses_local: bool = True,
    ) -> Adapted:
        """Adapt `local [B, N, C]` with `length [B]`, and `global_ [B, C]` where the adapter reads it.

        Where the aggregator does not use the rows, they are left out unless something else needs them.
        """
        dtype = next(self.layer.parameters()).dtype
        read = self.rows_input(local.to(dtype)) if local is not None and self._adapts_rows(uses_local) else None
        if read is not None and self.normed_together:
            vector = self.global_input(self._vector(length, local, global_).to(dtype))
            both = on_valid_rows(self.layer, torch.cat([vector[:, None], read], 1), length + 1)
            return Adapted(self.output_dropout(both[:, 1:]), length, self.output_dropout(both[:, 0]))
        if read is None:
            rows = None
        elif isinstance(self.layer, nn.Linear):
            rows = self.layer(read)
        else:  # padding stays out of the statistics of a batch norm
            rows = on_valid_rows(self.layer, read, length)
        if self._reads_vector:
            vector = self.global_input(self._vector(length, local, global_).to(dtype))
            layer = self.layer if self.global_layer is None else self.global_layer
            made = self.output_dropout(layer(vector))
        else:
            assert rows is not None, "fields() asks for them"
            made = (mean_rows if self.global_ == "mean" else max_rows)(self.output_dropout(rows), length)
        return Adapted(None if rows is None else self.output_dropout(rows), length, made)

    def _adapts_rows(self, uses_local: bool) -> bool:
        return uses_local or not self._reads_vector

    def _vector(self, length: Tensor, local: Tensor | None, global_: Tensor | None) -> Tensor:
        if self.global_ == "cached":
            assert global_ is not None, "fields() asks for it"
            return global_
        assert local is not None, "fields() asks for them"
        return mean_rows(local.float(), length)


@ADAPTERS.register("words", "word embeddings, and a GRU or a bag over them")
class WordsAdapter(Adapter):
    """Trainable word embeddings and what is made of them: a GRU's states, or a bag of words.

    Args:
        vocabulary_size: number of words, `<unk>` (id 0) and, where words are masked, `<mask>` (the last) included.
        dim: width D of the GRU's state. Two directions are averaged.
        encoder: what the global feature is: `gru`, its last valid state (backwards: the first), or `bag`, layers over
            the mean of the word embeddings, whatever their order.
        word_dim: width of a word embedding.
        local: what the local rows are: the word embeddings (SetDiv) or the GRU's outputs (VSE-infinity).
        bidirectional: run the GRU in both directions.
        ends: read `<start>` before and `<end>` after each caption; their ids follow those of the words.
        layers, hidden, depth, batch_norm, hidden_dropout: of a bag, see `projections.projection`.
        dropout: the share of a word embedding's values that is zero while training; of a bag, of the mean's.
        state_dropout: the same of the GRU's states.
        vectors: a text file of word vectors that the embeddings begin with. The training reads it once and calls
            `load_vectors`; a trained model does not need the file any more.
        train_vectors: let the embeddings learn; if false, all of them stay as the file, or chance, made them.
        vectors_frozen: the number of first epochs in which embeddings that begin with `vectors` do not learn.

    Raises:
        ValueError: a choice is unknown, or `train_vectors` is false without `vectors`.
    """

    used_with: ClassVar = {
        **USED_WITH,
        "layers": ("encoder", ("bag",)),
        **dict.fromkeys(("bidirectional", "state_dropout"), ("encoder", ("gru",))),
    }

    def __init__(
        self,
        vocabulary_size: int,
        dim: int,
        *,
        encoder: WordEncoder = "gru",
        word_dim: Width = 300,
        local: WordRows = "embedding",
        bidirectional: bool = True,
        ends: bool = False,
        layers: Layers = "linear",
        hidden: Width | None = None,
        depth: Deep = 1,
        batch_norm: bool = True,
        hidden_dropout: Rate = 0.0,
        dropout: Rate = 0.0,
        state_dropout: Rate = 0.0,
        vectors: str | None = None,
        train_vectors: bool = True,
        vectors_frozen: Epochs = 0,
    ) -> None:
        super().__init__()
        if encoder == "bag" and local != "embedding":
            raise ValueError("a bag of words has no states: with encoder bag, set local to embedding")
        if vectors is None and not train_vectors:
            raise ValueError("train_vectors is false and the embeddings would stay random: name a file as vectors")
        self.vectors, self.vectors_frozen = vectors, 0 if vectors is None else vectors_frozen
        self.local = local
        self.dropout, self.state_dropout = Dropout(dropout), Dropout(state_dropout)
        self.local_dim = word_dim if local == "embedding" else dim
        self.vocabulary_size, self.ends = vocabulary_size, ends
        self.embedding = nn.Embedding(vocabulary_size + (2 if ends else 0), word_dim)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)  # as VSE++ does
        self.embedding.weight.requires_grad_(train_vectors)
        self.bag: nn.Module | None = None
        if encoder == "bag":
            self.bag = projection(
                layers, word_dim, dim, hidden=hidden, depth=depth, batch_norm=batch_norm, dropout=hidden_dropout
            )
        else:
            self.gru = nn.GRU(word_dim, dim, batch_first=True, bidirectional=bidirectional)

    def fields(self, uses_local: bool) -> set[str]:
        """Return that it reads token ids, whatever the aggregator uses."""
        return {"token"}

    def frozen(self) -> dict[Tensor, int]:
        """Return the word embeddings with `vectors_frozen`."""
        return {self.embedding.weight: self.vectors_frozen}

    @torch.no_grad()
    def load_vectors(self, vectors: Tensor, found: Tensor) -> None:
        """Let the embeddings of the first V ids be `vectors [V, word_dim]` where `found [V]` is true.

        The others stay random, scaled to the standard deviation of those found, so that no word outweighs the rest.
        ValueError where the vectors differ from the embeddings in width, or are more.
        """
        weight = self.embedding.weight
        if vectors.shape[1] != weight.shape[1] or len(vectors) > self.vocabulary_size:
            theirs, ours = (" x ".join(map(str, matrix.shape)) for matrix in (vectors, weight))
            raise ValueError(f"the word vectors are {theirs} and the embeddings {ours}: set word_dim to their width")
        rows = vectors[found].to(weight)
        weight *= rows.std(correction=0) / weight.std(correction=0)
        weight[: len(found)][found.to(weight.device)] = rows

    def forward(
        self,
        length: Tensor,
        local: Tensor | None = None,
        global_: Tensor | None = None,
        token: Tensor | None = None,
        *,
        uses_local: bool = True,
    ) -> Adapted:
        """Adapt the ids `token [B, N]`, of which the first `length[b]` (at least one) count."""
        assert token is not None, "fields() asks for it"
        if self.ends:
            token, length = with_ends(token, length, self.vocabulary_size, self.vocabulary_size + 1)
        words = self.embedding(token)
        if self.bag is not None:
            pooled = self.bag(self.dropout(mean_rows(words, length)))
            return Adapted(self.dropout(words) if uses_local else words, length, pooled)
        words = self.dropout(words)
        states, last = run_packed(self.gru, words, length)
        if self.local == "gru" and uses_local:
            words = self.state_dropout(states().unflatten(2, (len(last), -1)).mean(2))
        return Adapted(words, length, self.state_dropout(last.mean(0)))


KINDS = {"grid": "rows", "roi": "rows", "frames": "rows", "words": "words", "tokens": "rows"}  # of feature sets
