"""Aggregators and adapters of heads, for a model of your own: `torch.nn.Module`s that need no store, recipe or run.

    >>> local, length, global_ = torch.randn(2, 5, 512), torch.tensor([5, 3]), torch.randn(2, 256)
    >>> ElementSlots(local_dim=512, dim=256, slots=4)(local, length, global_).embedding.shape
    torch.Size([2, 4, 256])

Rows after the first `length[b]` of sample b are padding, whatever they hold. An adapter makes both inputs of cached
features, an aggregator makes a vector, a set, a `Gaussian` or a `Sequence` of them, and `xret.similarities` compares
those.
"""

from typing import TYPE_CHECKING, Any

from .heads.modules.adapters import Adapted, Adapter, RowsAdapter, WordsAdapter
from .heads.modules.aggregators import AGGREGATORS, Aggregated
from .heads.modules.aggregators.aggregated import Aggregator
from .heads.modules.aggregators.element_slots import ElementSlots
from .heads.modules.aggregators.fspool import FSPool
from .heads.modules.aggregators.gaussian import TwinBranches
from .heads.modules.aggregators.gem import GeM
from .heads.modules.aggregators.gpo import GPO
from .heads.modules.aggregators.pcme import PCME, PCMEPlusPlus
from .heads.modules.aggregators.pie_net import PIENet
from .heads.modules.aggregators.pooling import Average, First, Global, KMax, Last, Max, Rows
from .heads.modules.aggregators.region_graph import RegionGraph
from .heads.modules.aggregators.row_transformer import RowTransformer
from .heads.modules.aggregators.sequence_pooling import SelfAttention, Seq2Seq
from .heads.modules.embedding import Embedding, Gaussian, Sequence
from .heads.modules.joined_adapter import JoinedAdapter
from .heads.modules.padding import valid_rows
from .heads.modules.projections import projection

__all__ = [
    "GPO",
    "PCME",
    "Adapted",
    "Adapter",
    "Aggregated",
    "Aggregator",
    "Average",
    "ElementSlots",
    "Embedding",
    "FSPool",
    "First",
    "Gaussian",
    "GeM",
    "Global",
    "JoinedAdapter",
    "KMax",
    "Last",
    "Max",
    "PCMEPlusPlus",
    "PIENet",
    "RegionGraph",
    "RowTransformer",
    "Rows",
    "RowsAdapter",
    "SelfAttention",
    "Seq2Seq",
    "Sequence",
    "TwinBranches",
    "WordsAdapter",
    "projection",
    "valid_rows",
]

if not TYPE_CHECKING:  # an editor completes what stands above

    def __getattr__(name: str) -> Any:
        """Return a bundled part that does not stand above."""
        return AGGREGATORS.class_of(name, __name__)
