"""Losses of image-text retrieval: `torch.nn.Module`s, called as ``loss(similarity, positives, images, captions)``.

    >>> similarity = torch.tensor([[0.9, 0.2, 0.8], [0.1, 0.7, 0.6]])  # [I, C]
    >>> positives = torch.tensor([[True, False, False], [False, True, True]])
    >>> Triplet(margin=0.2)(similarity, positives)
    tensor(0.1667)

The last two are what the aggregators gave, `xret.nn.Aggregated`: losses on the embeddings themselves read them
(`Diversity`, `MMD` and others), those on the similarity alone do without.
"""

from typing import TYPE_CHECKING, Any

from .heads.modules.losses import LOSSES
from .heads.modules.losses.caption_generation import CaptionGeneration
from .heads.modules.losses.common import Loss
from .heads.modules.losses.distillation import Distillation
from .heads.modules.losses.diversity import Diversity
from .heads.modules.losses.embedding_graph import EmbeddingGraph
from .heads.modules.losses.gaussians import InformationBottleneck, Uniformity
from .heads.modules.losses.infonce import InfoNCE
from .heads.modules.losses.matching import MatchingBCE, SoftContrastive
from .heads.modules.losses.mmd import MMD
from .heads.modules.losses.set_regularisers import GlobalDiscriminative, IntraSetDivergence
from .heads.modules.losses.sigmoid import Sigmoid
from .heads.modules.losses.triplet import Triplet

__all__ = [
    "MMD",
    "CaptionGeneration",
    "Distillation",
    "Diversity",
    "EmbeddingGraph",
    "GlobalDiscriminative",
    "InfoNCE",
    "InformationBottleneck",
    "IntraSetDivergence",
    "Loss",
    "MatchingBCE",
    "Sigmoid",
    "SoftContrastive",
    "Triplet",
    "Uniformity",
]

if not TYPE_CHECKING:  # an editor completes what stands above

    def __getattr__(name: str) -> Any:
        """Return a bundled part that does not stand above."""
        return LOSSES.class_of(name, __name__)
