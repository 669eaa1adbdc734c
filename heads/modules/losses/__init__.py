"""Training losses: each gives a scalar from the similarity matrix, the positives and both sides' embeddings.

One file an idea. Weights are the recipe's: nothing is weighted in here. What a mean runs over follows the papers'
public code, as the recorded reference values do. A loss without anything to compare is zero and still attached to the
graph, as long as one of its inputs is.

Every loss is called as `loss(similarity [I, C], positives [I, C], images, captions)`. A pair that is no positive and
whose similarity is -inf is no negative either. That is how a caption with a positive's own text is kept
out (`same_text: excluded`), in one place, for every loss: `similarity.masked_fill(ignored, -torch.inf)`.

Attributes:
    LOSSES: the loss of each name that a recipe may use.
"""

from .caption_generation import CaptionGeneration
from .common import Loss
from .diversity import Diversity
from .gaussians import InformationBottleneck, Uniformity
from .infonce import InfoNCE
from .matching import MatchingBCE, SoftContrastive
from .mmd import MMD
from .set_regularisers import GlobalDiscriminative, IntraSetDivergence
from .sigmoid import Sigmoid
from .triplet import Triplet

LOSSES: dict[str, type[Loss]] = {
    "triplet": Triplet,
    "mmd": MMD,
    "diversity": Diversity,
    "global-discriminative": GlobalDiscriminative,
    "intra-set-divergence": IntraSetDivergence,
    "infonce": InfoNCE,
    "sigmoid": Sigmoid,
    "soft-contrastive": SoftContrastive,
    "matching-bce": MatchingBCE,
    "information-bottleneck": InformationBottleneck,
    "uniformity": Uniformity,
    "caption-generation": CaptionGeneration,
}

__all__ = ["LOSSES", "Diversity", "Triplet"]
