"""How a run, or frozen encoders, compare all of a split."""

from pathlib import Path

from xret.heads.evaluation.rankers import open_rankers
from xret.heads.evaluation.scoring import Scores
from xret.pipeline.device import pick_device


def score(path: str | Path, *, store: str | None = None, split: str = "test", device: str = "auto") -> Scores:
    """Return the scores of a run folder, or of a store's frozen encoders."""
    (ranker,) = open_rankers([path], store)
    return ranker.score(split, pick_device(device))
