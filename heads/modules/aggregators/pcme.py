"""PCME's and PCME++'s probabilistic embeddings: heads for mean and variance.

Sources: Chun et al., *Probabilistic Embeddings for Cross-Modal Retrieval* (PCME, CVPR 2021), section 3.3; Chun,
*Improved Probabilistic Image-Text Representations* (PCME++, ICLR 2024), section 3.2; what the papers leave open is
their public code's.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from ..embedding import Gaussian
from ..padding import softmax, valid_rows, zero_padding
from ..parameters import Few
from ..recurrence import run_packed
from ..similarity.shared import unit
from .aggregated import AGGREGATORS, Aggregated, Aggregator
from .gpo import GPO
from .pie_net import PIENet

LOG_VARIANCE = -4.0  # what PCME++'s log variance begins near

Summary = Literal["linear", "gru"]


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
        """Aggregate `local [B, N, C]`, of which the first `length[b]` rows count, and `global_ [B, D]`.

        Returns:
            The samples `[B, K, D]`, not normalised, and the Gaussian whose unit mean and log variance they come from.
        """
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
        """Aggregate `local [B, N, D]`, of which the first `length[b]` rows count.

        Returns:
            The Gaussian: the normalised mean and the log variance, `[B, D]`.
        """
        mean = unit(self.mean.pool(local, length))
        spread = self.project(zero_padding(local, length))
        return Aggregated(Gaussian(mean, self.log_variance.pool(spread, length)))
