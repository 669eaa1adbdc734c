"""From local and global features to an embedding: one file a mechanism.

Every aggregator is made by `Class(local_dim, dim, **parameters)`, says by `uses_local` whether it reads the
local features and by `embedding` whether it gives a `"vector"` or a `"set"`, and is called as
`aggregator(local [B, N, C], length [B], global_ [B, D])`.
"""

from typing import Any

from .aggregated import Aggregated
from .element_slots import ElementSlots
from .pooling import Average, Global, Max

AGGREGATORS: dict[str, type[Any]] = {
    "global": Global,
    "average": Average,
    "max": Max,
    "element-slots": ElementSlots,
}

__all__ = ["AGGREGATORS", "Aggregated", "Average", "ElementSlots", "Global", "Max"]
