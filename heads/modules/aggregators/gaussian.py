"""Gaussian embeddings by twin branches: one gives the mean, its twin the logarithm of the variance.

Source: *Uncertainty-based Cross-Modal Retrieval with Probabilistic Representations*, eq. 1 and 2 and section 4.2.
Probabilistic VSE++ is `of` `global` or `average` over images and `seq2seq` over word embeddings (its twin GRUs),
probabilistic VSRN `region-graph` over regions and `seq2seq`. Means are the unit vectors that the official code of both
systems gives ("we can use the point-based embeddings from each modality as our mean outputs", section 3.1).
"""

import math
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn.functional import normalize

from ..adapters import Adapted
from ..embedding import Gaussian
from .aggregated import AGGREGATORS, Aggregated, Aggregator
from .relations import Normalise

Of = Literal["global", "average", "max", "gpo", "seq2seq", "region-graph"]
LOWEST, HIGHEST = 0.1, 10.0  # bounds of every variance (section 4.2); at a bound it has no gradient

Shape = Literal["ellipsoidal", "spherical-average", "spherical-one-value"]


@AGGREGATORS.register("gaussian", "mean and variance by twin branches of another aggregator")
class TwinBranches(Aggregator):
    """Two aggregators of one kind, without common weights; each gives a unit vector.

    Where the kind has no weights, what is learnt is the adapter's: the variance then has a `twin` of the adapter, which
    reads the cached features themselves (eq. 1).

    The paper leaves open whether the branch of the variance ends in a unit vector, too. Here all of the branch is
    duplicated, with its last step: on small data that is far better than a log variance of free scale.

    Args:
        of: the kind of both branches, with its default parameters.
        normalise: of `region-graph`, see there.
        shape: `ellipsoidal`: a variance for each dimension. `spherical-average`: their average for all.
            `spherical-one-value`: a linear layer makes one value of the second branch (section 6.2).
    """

    embedding = "gaussian"

    def __init__(
        self,
        local_dim: int,
        dim: int,
        *,
        of: Of = "global",
        shape: Shape = "ellipsoidal",
        normalise: Normalise = "rows",
    ) -> None:
        super().__init__(local_dim, dim)
        branch = AGGREGATORS[of]
        how: dict[str, Any] = {"normalise": normalise} if of == "region-graph" else {}
        self.uses_local = branch.uses_local
        self.uses_global = branch.uses_global
        self.shape = shape
        self.mean = branch(local_dim, dim, **how)
        self.log_variance = branch(local_dim, dim, **how)
        self.uses_twin = not any(True for _ in self.mean.parameters())
        self.head = nn.Linear(dim, 1) if shape == "spherical-one-value" else nn.Identity()

    def forward(self, local: Tensor, length: Tensor, global_: Tensor, twin: Adapted | None = None) -> Aggregated:
        """Aggregate `local [B, N, C]`, of which the first `length[b]` rows count, and `global_ [B, D]`.

        Args:
            twin: what the variance's branch reads instead of them.

        Returns:
            The Gaussian, mean and log variance `[B, D]`, with the rows of the mean's branch where it has some.
        """
        mean = self.mean(local, length, global_)
        own = (local, length, global_) if twin is None else (twin.local, twin.length, twin.global_)
        log_variance = self.head(normalize(self.log_variance(*own).embedding, dim=1))
        log_variance = log_variance.clamp(math.log(LOWEST), math.log(HIGHEST))
        if self.shape == "spherical-average":
            log_variance = log_variance.logsumexp(1, keepdim=True) - math.log(log_variance.shape[1])
        unit = normalize(mean.embedding, dim=1)
        return Aggregated(Gaussian(unit, log_variance.expand_as(unit)), rows=mean.rows)
