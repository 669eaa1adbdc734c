"""How a run, or frozen encoders, compare all of a split."""

from pathlib import Path

from xret.heads.evaluation.scoring import Ranker, Scored, embed_split, is_store, open_frozen


def score(
    path: str | Path, *, store: str | None = None, split: str = "test", views: int = 1, device: str = "cpu"
) -> Scored:
    """Return the scores of a run folder, or of a store's frozen encoders, over so many views."""
    ranker = open_frozen(str(path), device) if is_store(path) else Ranker(path, store=store, device=device)
    ranker.views = views
    return embed_split(ranker, split)
