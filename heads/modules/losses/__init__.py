"""Training losses: each gives a scalar from the similarity matrix, the positives and both sides' embeddings.

One file an idea. Weights are the recipe's: nothing is weighted in here. What a mean runs over follows the papers'
public code, as the recorded reference values do. A loss without anything to compare is zero and still attached to the
graph, as long as one of its inputs is.

Every loss is called as `loss(similarity [I, C], positives [I, C], images, captions)`. A pair whose similarity is
-inf takes no part: it is neither a positive nor a negative. That is how a caption with a positive's own text is kept
out, in one place, for every loss: `similarity.masked_fill(ignored, -torch.inf)`.

Attributes:
    LOSSES: the loss of each name that a recipe may use.
"""

from torch import nn

from .caption_generation import CaptionGeneration
from .diversity import Diversity, diversity, gram_diversity
from .gaussians import InformationBottleneck, Uniformity, information_bottleneck, uniformity
from .infonce import InfoNce, infonce
from .matching import MatchingBce, SoftContrastive, matching_bce, soft_contrastive
from .mmd import Mmd, mmd
from .set_regularisers import GlobalDiscriminative, IntraSetDivergence, global_discriminative, intra_set_divergence
from .triplet import Triplet, triplet

LOSSES: dict[str, type[nn.Module]] = {
    "triplet": Triplet,
    "mmd": Mmd,
    "diversity": Diversity,
    "global-discriminative": GlobalDiscriminative,
    "intra-set-divergence": IntraSetDivergence,
    "infonce": InfoNce,
    "soft-contrastive": SoftContrastive,
    "matching-bce": MatchingBce,
    "information-bottleneck": InformationBottleneck,
    "uniformity": Uniformity,
    "caption-generation": CaptionGeneration,
}

__all__ = [
    "LOSSES",
    "CaptionGeneration",
    "Diversity",
    "GlobalDiscriminative",
    "InfoNce",
    "InformationBottleneck",
    "IntraSetDivergence",
    "MatchingBce",
    "Mmd",
    "SoftContrastive",
    "Triplet",
    "Uniformity",
    "diversity",
    "global_discriminative",
    "gram_diversity",
    "infonce",
    "information_bottleneck",
    "intra_set_divergence",
    "matching_bce",
    "mmd",
    "soft_contrastive",
    "triplet",
    "uniformity",
]
