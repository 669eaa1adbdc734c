"""Training losses: each gives a scalar from the similarity matrix, the positives and both sides' embeddings.

One file a family. Weights are the recipe's: nothing is weighted in here. What a mean runs over follows the papers'
public code, as the recorded reference values do. A loss without anything to compare is zero and still attached to the
graph, as long as one of its inputs is.

Every loss is called as `loss(similarity [I, C], positives [I, C], images, captions)`. A pair that is no positive and
whose similarity is -inf is no negative either. That is how a caption with a positive's own text is kept
out (`same_text: excluded`), in one place, for every loss: `similarity.masked_fill(ignored, -torch.inf)`.

Attributes:
    LOSSES: the loss of each name that a recipe may use.
"""

from ..parts import import_all
from .common import LOSSES, Loss

import_all(__name__, __path__)

__all__ = ["LOSSES", "Loss"]
