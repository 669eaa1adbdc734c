"""From local and global features to an embedding: one file a mechanism.

Every one is an `Aggregator`, made as `Class(local_dim, dim, **parameters)`.

Attributes:
    AGGREGATORS: the aggregator of each name that a recipe may use.
"""

from .aggregated import Aggregated, Aggregator
from .element_slots import ElementSlots
from .fspool import FSPool
from .gaussian import TwinBranches
from .gem import GeM
from .gpo import GPO
from .pcme import PCME, PCMEPlusPlus
from .pie_net import PIENet
from .pooling import Average, First, Global, KMax, Last, Max, Rows
from .region_graph import RegionGraph
from .sequence_pooling import SelfAttention, Seq2Seq

AGGREGATORS: dict[str, type[Aggregator]] = {
    "global": Global,
    "average": Average,
    "max": Max,
    "k-max": KMax,
    "gem": GeM,
    "fspool": FSPool,
    "cls": First,
    "last": Last,
    "self-attention": SelfAttention,
    "seq2seq": Seq2Seq,
    "gpo": GPO,
    "pie-net": PIENet,
    "element-slots": ElementSlots,
    "region-graph": RegionGraph,
    "gaussian": TwinBranches,
    "pcme": PCME,
    "pcmepp": PCMEPlusPlus,
    "rows": Rows,
}

__all__ = ["AGGREGATORS", "Aggregated", "Average", "ElementSlots", "Global", "Max"]
