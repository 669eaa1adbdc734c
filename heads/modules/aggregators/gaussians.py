"""Probabilistic embeddings: Gaussians by twin branches, PCME's and PCME++'s.

Sources: *Uncertainty-based Cross-Modal Retrieval with Probabilistic Representations*, eq. 1 and 2 and section 4.2:
probabilistic VSE++ is `of` `global` or `average` over images and `seq2seq` over word embeddings (its twin GRUs),
probabilistic VSRN `region-graph` over regions and `seq2seq`. Means are the unit vectors that the official code of both
systems gives ("we can use the point-based embeddings from each modality as our mean outputs", section 3.1).
Chun et al., *Probabilistic Embeddings for Cross-Modal Retrieval* (PCME, CVPR 2021), section 3.3; Chun, *Improved
Probabilistic Image-Text Representations* (PCME++, ICLR 2024), section 3.2; the rest as in their public code.
"""

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from ..adapters import Adapted
from ..embedding import Gaussian
from ..padding import softmax, valid_rows, zero_padding
from ..parts import Few
from ..recurrence import run_packed
from ..similarity.shared import unit
from .aggregated import AGGREGATORS, Aggregated, Aggregator
from .gpo import GPO
from .relations import Normalise
from .sets import PIENet

Of = Literal["global", "average", "max", "gpo", "seq2seq", "region-graph"]
LOWEST, HIGHEST = 0.1, 10.0  # bounds of every variance of twin branches (section 4.2); at a bound it has no gradient
LOG_VARIANCE = -4.0  # what PCME++'s log variance begins near

Shape = Literal["ellipsoidal", "spherical-average", "spherical-one-value"]
Summary = Literal["linear", "gru"]


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
        """Return the Gaussian, mean and log variance `[B, D]`, with the rows of the mean's branch where it has some.

        `twin` is what the variance's branch reads in the place of the others.
        """
        mean = self.mean(local, length, global_)
        own = (local, length, global_) if twin is None else (twin.local, twin.length, twin.global_)
        log_variance = self.head(normalize(self.log_variance(*own).embedding, dim=1))
        log_variance = log_variance.clamp(math.log(LOWEST), math.log(HIGHEST))
        if self.shape == "spherical-average":
            log_variance = log_variance.logsumexp(1, keepdim=True) - math.log(log_variance.shape[1])
        vector = normalize(mean.embedding, dim=1)
        return Aggregated(Gaussian(vector, log_variance.expand_as(vector)), rows=mean.rows)


@AGGREGATORS.register("pcme", "a Gaussian and samples of it")
class PCME(Aggregator):
    """A Gaussian by two attentions over the local rows, and samples drawn from it.

    The mean is a PIE-Net's single element, normalised. The logarithm of the standard deviation is a linear layer over
    the rows' own attention pooling plus one of a summary of the sample. In training samples are drawn anew; in
    evaluation mode every sample of a modality gets the same noise, which was drawn with the weights and is stored
    with them, so that scores repeat.

    Args:
        samples: number K of samples.
        summary: what the deviation sees beside the attention: `linear`: a layer over the global feature (the public
            code's images); `gru`: the last states of a bi-GRU of its own over the local rows (its captions).
    """

    uses_global = draws = True
    embedding = "set"
    noise: Tensor

    def __init__(self, local_dim: int, dim: int, *, samples: Few = 7, summary: Summary = "linear") -> None:
        super().__init__(local_dim, dim)
        if summary == "gru" and dim % 2:
            raise ValueError(f"PCME: dim is {dim}, but must be even where summary is 'gru': it joins two directions")
        self.samples = samples
        self.mean = PIENet(local_dim, dim, slots=1)
        hidden = max(local_dim // 2, 1)
        attend, score = nn.Linear(local_dim, hidden, bias=False), nn.Linear(hidden, 1, bias=False)
        self.attention = nn.Sequential(attend, nn.Tanh(), score)
        self.deviation = nn.Linear(local_dim, dim)
        self.summary: nn.GRU | nn.Linear
        if summary == "gru":
            self.summary = nn.GRU(local_dim, dim // 2, batch_first=True, bidirectional=True)
        else:
            self.summary = nn.Linear(dim, dim)
        for layer in (attend, score, self.deviation):
            nn.init.xavier_uniform_(layer.weight)
        nn.init.zeros_(self.deviation.bias)
        self.register_buffer("noise", torch.randn(samples, dim))

    def forward(self, local: Tensor, length: Tensor, global_: Tensor) -> Aggregated:
        """Return the samples `[B, K, D]`, not normalised, and the Gaussian of a unit mean that they come from."""
        mean = unit(self.mean(local, length, global_).embedding[:, 0])
        log_deviation = self.log_deviation(local, length, global_).to(mean.dtype)
        if self.training:
            noise = torch.randn(len(mean), self.samples, mean.shape[1], device=mean.device, dtype=mean.dtype)
        else:
            noise = self.noise.to(mean.dtype)
        samples = mean[:, None] + log_deviation.exp()[:, None] * noise
        return Aggregated(samples, gaussian=Gaussian(mean, 2 * log_deviation))

    def log_deviation(self, local: Tensor, length: Tensor, global_: Tensor) -> Tensor:
        """Return the logarithm of the standard deviation, `[B, D]`."""
        rows = zero_padding(local, length)
        weights = softmax(self.attention(rows)[..., 0], valid_rows(local, length), 1)
        attended = (weights.to(rows.dtype)[:, None] @ rows)[:, 0]
        if isinstance(self.summary, nn.Linear):
            summary = self.summary(global_)
        else:
            summary = torch.cat(run_packed(self.summary, rows, length)[1].unbind(0), 1)
        return self.deviation(attended) + summary


@AGGREGATORS.register("pcmepp", "a Gaussian in closed form")
class PCMEPlusPlus(Aggregator):
    """A Gaussian by two GPOs: of the local rows for the mean, of a projection of them for the log variance."""

    embedding = "gaussian"

    def __init__(self, local_dim: int, dim: int) -> None:
        super().__init__(local_dim, dim)
        self.mean = GPO(local_dim, dim)
        self.project = nn.Linear(local_dim, dim)
        nn.init.xavier_uniform_(self.project.weight)
        nn.init.constant_(self.project.bias, LOG_VARIANCE)
        self.log_variance = GPO(dim, dim)

    def forward(self, local: Tensor, length: Tensor, global_: Tensor) -> Aggregated:
        """Return the Gaussian: the normalised mean and the log variance, `[B, D]`."""
        mean = unit(self.mean.pool(local, length))
        spread = self.project(zero_padding(local, length))
        return Aggregated(Gaussian(mean, self.log_variance.pool(spread, length)))
