"""xret: cache frozen features once, train image-text retrieval heads in minutes.

    import xret

    retriever = xret.load("RUN")

gives what a trained run can do: embed texts and images, compare them, and search. Nothing heavy is imported before.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .heads.retriever import Retriever

__all__ = ["load"]


def load(run: str, **options: Any) -> "Retriever":
    """Open a run, ready to embed and to search; see `heads.retriever.Retriever` for the options and the errors."""
    from .heads.retriever import Retriever

    return Retriever(run, **options)
