"""Losses of image-text retrieval: `torch.nn.Module`s, called as ``loss(similarity, positives, images, captions)``.

    >>> similarity = torch.tensor([[0.9, 0.2, 0.8], [0.1, 0.7, 0.6]])  # [I, C]
    >>> positives = torch.tensor([[True, False, False], [False, True, True]])
    >>> Triplet(margin=0.2)(similarity, positives)
    tensor(0.1667)

The last two are what the aggregators gave, `xret.nn.Aggregated`: losses on the embeddings themselves read them
(`Diversity`, `MMD` and others), those on the similarity alone do without.
"""

from .heads.modules.losses import LOSSES as _PARTS
from .heads.modules.losses.caption_generation import CaptionGeneration as CaptionGeneration
from .heads.modules.losses.common import Loss as Loss
from .heads.modules.losses.contrastive import Distillation as Distillation
from .heads.modules.losses.contrastive import InfoNCE as InfoNCE
from .heads.modules.losses.contrastive import MatchingBCE as MatchingBCE
from .heads.modules.losses.contrastive import Sigmoid as Sigmoid
from .heads.modules.losses.contrastive import SoftContrastive as SoftContrastive
from .heads.modules.losses.embedding_graph import EmbeddingGraph as EmbeddingGraph
from .heads.modules.losses.regularisers import MMD as MMD
from .heads.modules.losses.regularisers import Diversity as Diversity
from .heads.modules.losses.regularisers import GlobalDiscriminative as GlobalDiscriminative
from .heads.modules.losses.regularisers import InformationBottleneck as InformationBottleneck
from .heads.modules.losses.regularisers import IntraSetDivergence as IntraSetDivergence
from .heads.modules.losses.regularisers import Uniformity as Uniformity
from .heads.modules.losses.triplet import Triplet as Triplet

# Bundled parts that do not stand above; out of sight of type checkers, which would take any name for one.
globals()["__getattr__"] = lambda name: _PARTS.class_of(name, __name__)
