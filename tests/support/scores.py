"""How a run, or frozen encoders, compare all of a split."""

from pathlib import Path

import torch

from xret.heads.evaluation.scoring import Scored, embed_split, is_store, open_frozen, open_run


def score(
    path: str | Path, *, store: str | None = None, split: str = "test", views: int = 1, device: str = "cpu"
) -> Scored:
    """Return the scores of a run folder, or of a store's frozen encoders, over so many views."""
    ranker = open_frozen(str(path)) if is_store(path) else open_run(path, store)
    return embed_split(ranker, split, torch.device(device), views)
