"""What an index compares in the place of a similarity: plain vectors, by inner product or by Euclidean distance.

Every sample becomes one vector or, of sets and sequences, one a member. Near vectors make a sample a candidate, no
more: the answers are ranked by the similarity itself. Of single Gaussians the distances below are exact, but for
`means`, where a divergence has no such form.
"""

from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ...modules.embedding import Embedding, Gaussian, Sequence
from ...modules.padding import valid_rows
from ...modules.similarity import MonteCarloMatch, SampledDistance, Wasserstein

Form = Literal["cosines", "samples", "means", "deviations", "variances", "spread"]
LANES = 8  # vectors are filled up with zeros to a multiple of this, for SIMD and product quantisation


def form_of(similarity: Any) -> Form:
    """Return which vectors stand for the embeddings that a similarity of `heads.modules.similarity` compares.

    ``cosines``: unit elements; ``samples``: elements as they are; of Gaussians ``means``, mean and standard
    ``deviations`` or ``variances`` (2-Wasserstein), unit mean and ``spread`` (the expected distance of PCME++).
    """
    if isinstance(similarity, Wasserstein):
        return "deviations" if similarity.form == "closed" else "variances"
    if isinstance(similarity, SampledDistance):
        return "spread"
    if isinstance(similarity, MonteCarloMatch):
        return "samples"
    return "means" if similarity.embedding == "gaussian" else "cosines"


def vectors(form: Form, embedding: Embedding, *, query: bool = False) -> np.ndarray:
    """Return the vectors of samples one after the other, float32 ``[T, W]``: all elements of the first, and so on.

    Args:
        form: by `form_of`.
        embedding: of B samples; of sequences only the rows within their lengths count.
        query: whether they search or are searched; it matters for ``spread`` alone, where the distance of [unit
            mean, root of the summed variances] from [unit mean, 0] is PCME++'s, up to the query's own variance.
    """
    rows = _rows(form, embedding, query).detach().cpu().float()
    return functional.pad(rows, (0, -rows.shape[1] % LANES)).numpy()


def _rows(form: Form, embedding: Embedding, query: bool) -> Tensor:
    if isinstance(embedding, Gaussian):
        mean, log_variance = embedding
        if form == "means":
            return mean
        if form == "spread":
            root = log_variance.exp().sum(1, keepdim=True).sqrt()
            return torch.cat([functional.normalize(mean, dim=1), 0 * root if query else root], 1)
        return torch.cat([mean, ((0.5 if form == "deviations" else 1.0) * log_variance).exp()], 1)
    rows = embedding.rows[valid_rows(*embedding)] if isinstance(embedding, Sequence) else embedding.flatten(0, -2)
    return functional.normalize(rows, dim=-1) if form == "cosines" else rows
