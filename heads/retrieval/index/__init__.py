"""An index over a gallery: candidates by FAISS over all set elements, then the run's own similarity on just these."""

from .build import build_index, finish, write_items
from .candidates import KINDS, Effort, Kind
from .elements import form_of
from .exact import Compare, best, search_exactly
from .items import Items
from .search import Answer, Index

__all__ = [
    "KINDS",
    "Answer",
    "Compare",
    "Effort",
    "Index",
    "Items",
    "Kind",
    "best",
    "build_index",
    "finish",
    "form_of",
    "search_exactly",
    "write_items",
]
