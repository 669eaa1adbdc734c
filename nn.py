"""Aggregators and adapters of heads, for a model of your own: `torch.nn.Module`s that need no store, recipe or run.

    >>> local, length, global_ = torch.randn(2, 5, 512), torch.tensor([5, 3]), torch.randn(2, 256)
    >>> ElementSlots(local_dim=512, dim=256, slots=4)(local, length, global_).embedding.shape
    torch.Size([2, 4, 256])

Rows after the first `length[b]` of sample b are padding, whatever they hold. An adapter makes both inputs of cached
features, an aggregator makes a vector, a set, a `Gaussian` or a `Sequence` of them, and `xret.similarities` compares
those.
"""

from .heads.modules.adapters import Adapted as Adapted
from .heads.modules.adapters import Adapter as Adapter
from .heads.modules.adapters import RowsAdapter as RowsAdapter
from .heads.modules.adapters import WordsAdapter as WordsAdapter
from .heads.modules.aggregators import AGGREGATORS as _PARTS
from .heads.modules.aggregators import Aggregated as Aggregated
from .heads.modules.aggregators.aggregated import Aggregator as Aggregator
from .heads.modules.aggregators.gaussians import PCME as PCME
from .heads.modules.aggregators.gaussians import PCMEPlusPlus as PCMEPlusPlus
from .heads.modules.aggregators.gaussians import TwinBranches as TwinBranches
from .heads.modules.aggregators.gpo import GPO as GPO
from .heads.modules.aggregators.pooling import Average as Average
from .heads.modules.aggregators.pooling import First as First
from .heads.modules.aggregators.pooling import FSPool as FSPool
from .heads.modules.aggregators.pooling import GeM as GeM
from .heads.modules.aggregators.pooling import Global as Global
from .heads.modules.aggregators.pooling import KMax as KMax
from .heads.modules.aggregators.pooling import Last as Last
from .heads.modules.aggregators.pooling import Max as Max
from .heads.modules.aggregators.pooling import Rows as Rows
from .heads.modules.aggregators.relations import RegionGraph as RegionGraph
from .heads.modules.aggregators.relations import RowTransformer as RowTransformer
from .heads.modules.aggregators.relations import SelfAttention as SelfAttention
from .heads.modules.aggregators.relations import Seq2Seq as Seq2Seq
from .heads.modules.aggregators.sets import ElementSlots as ElementSlots
from .heads.modules.aggregators.sets import PIENet as PIENet
from .heads.modules.embedding import Embedding as Embedding
from .heads.modules.embedding import Gaussian as Gaussian
from .heads.modules.embedding import Sequence as Sequence
from .heads.modules.joined_adapter import JoinedAdapter as JoinedAdapter
from .heads.modules.padding import valid_rows as valid_rows
from .heads.modules.projections import projection as projection

# Bundled parts that do not stand above; out of sight of type checkers, which would take any name for one.
globals()["__getattr__"] = lambda name: _PARTS.class_of(name, __name__)
