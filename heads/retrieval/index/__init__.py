"""An index over a gallery: candidates by FAISS over all set elements, then the run's own similarity on just these."""

from .build import IndexOptions, IndexReport, build_index, write_candidates, write_items
from .candidates import KINDS, Effort, Kind
from .exact import Compare, RunCompare, best, search_exactly
from .items import Items
from .search import Index
from .vectors import form_of

__all__ = [
    "KINDS",
    "Compare",
    "Effort",
    "Index",
    "IndexOptions",
    "IndexReport",
    "Items",
    "Kind",
    "RunCompare",
    "best",
    "build_index",
    "form_of",
    "search_exactly",
    "write_candidates",
    "write_items",
]
