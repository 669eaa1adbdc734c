"""From local and global features to an embedding: one file a family.

Every one is an `Aggregator`, made as `Class(local_dim, dim, **parameters)`.

Attributes:
    AGGREGATORS: the aggregator of each name that a recipe may use.
"""

from ..parts import import_all
from .aggregated import AGGREGATORS, Aggregated, Aggregator

import_all(__name__, __path__)

__all__ = ["AGGREGATORS", "Aggregated", "Aggregator"]
