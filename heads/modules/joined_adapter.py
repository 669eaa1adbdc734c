"""Several feature sets of the same samples as one: an adapter for each, and their rows one after the other."""

from collections.abc import Sequence

import torch
from torch import nn

from .adapters import Adapted, Adapter, Cached, CachedSets
from .padding import rows_of_all
from .projections import linear


class JoinedAdapter(Adapter):
    """An adapter with weights of its own for each feature set of a side.

    The valid rows of all sets follow each other, so that an aggregator sees one larger set. The global feature is the
    mean of the sets' own: for linear adapters that is a linear layer over the concatenated features, no set outweighs
    another by its number of rows, and the scale is that of a single set.

    Args:
        adapters: of the sets, in their order.
        dim: width D of the rows; those of another width (word embeddings) go through a linear layer of their own.
    """

    def __init__(self, adapters: Sequence[Adapter], dim: int) -> None:
        super().__init__()
        self.sets = nn.ModuleList(adapters)
        self.widen = nn.ModuleList(
            nn.Identity() if adapter.local_dim == dim else linear(adapter.local_dim, dim) for adapter in adapters
        )
        self.local_dim = dim

    def of_each_set(self) -> list[Adapter]:
        """Return the adapters."""
        return list(self.sets)  # type: ignore[arg-type]

    def adapt(self, features: CachedSets, *, uses_local: bool) -> Adapted:
        """Call it on the features of each set."""
        return self(features.parts, uses_local=uses_local)

    def forward(self, parts: Sequence[Cached], *, uses_local: bool = True) -> Adapted:
        """Adapt what each set has of B samples; rows that the aggregator does not use are left out."""
        made: list[Adapted] = [
            adapter(part.length, part.local, part.global_, part.token, uses_local=uses_local)
            for adapter, part in zip(self.sets, parts, strict=True)
        ]
        global_ = torch.stack([one.global_ for one in made]).mean(0)
        if not uses_local:
            return Adapted(None, torch.stack([one.length for one in made]).sum(0), global_)
        rows = [(layer(one.local), one.length) for layer, one in zip(self.widen, made, strict=True)]
        return Adapted(*rows_of_all(rows), global_)
