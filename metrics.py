"""Metrics of retrieval from a similarity matrix ``[images, captions]``, with a stated rule for ties.

    table = recalls(similarity, caption_image)   # caption_image [C]: the image that each caption belongs to
    table.rsum, table.text_to_image["R@1"]

Where a query has other right items than its own, as in ECCV Caption, `map_at_r`, `r_precision` and `best_ranks` take
which are right, bool ``[queries, gallery]``; `relevance` makes that of ids. `inverted_softmax` holds back items that
answer too many queries, by the scores of a bank of training queries; `skewness` measures how unevenly they do. A class
that derives from `Protocol` is what `xret eval --protocol module:Class` measures by.
"""

from .heads.evaluation.hubness import inverted_softmax as inverted_softmax
from .heads.evaluation.hubness import skewness as skewness
from .heads.evaluation.metrics import Ranks as Ranks
from .heads.evaluation.metrics import Recalls as Recalls
from .heads.evaluation.metrics import Table as Table
from .heads.evaluation.metrics import Ties as Ties
from .heads.evaluation.metrics import chance as chance
from .heads.evaluation.metrics import log_circular_variance as log_circular_variance
from .heads.evaluation.metrics import median_rank as median_rank
from .heads.evaluation.metrics import ranks as ranks
from .heads.evaluation.metrics import recall as recall
from .heads.evaluation.metrics import recalls as recalls
from .heads.evaluation.precision import best_ranks as best_ranks
from .heads.evaluation.precision import map_at_r as map_at_r
from .heads.evaluation.precision import plausible_matches as plausible_matches
from .heads.evaluation.precision import r_precision as r_precision
from .heads.evaluation.protocols import Protocol as Protocol
from .heads.evaluation.protocols import relevance as relevance
