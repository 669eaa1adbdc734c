"""How a run, or frozen encoders, compare all of a split."""

from pathlib import Path

from xret.heads.evaluation.scoring import Scores
from xret.heads.evaluation.subjects import open_subjects
from xret.pipeline.device import pick_device


def score(path: str | Path, *, store: str | None = None, split: str = "test", device: str = "auto") -> Scores:
    """Return the scores of a run folder, or of a store's frozen encoders."""
    (subject,) = open_subjects([path], store)
    return subject.score(split, pick_device(device))
