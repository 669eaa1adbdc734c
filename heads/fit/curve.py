"""The learning curve: what a part of the training pictures reaches on `val`, and what twice as many would add.

Mean recall grows with the logarithm of the pictures, by less with each doubling. So what the next doubling adds is
expected to be `FALLS` times the mean of the last two, and its interval is the bootstrap's over the queries of `val`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..evaluation.comparison import DEPTHS, bootstrap
from ..evaluation.metrics import hits
from ..evaluation.scoring import Ranker, embed_split

SHARES = (0.25, 0.5)  # of the training pictures, beside all of them
FALLS = 0.85


@dataclass(frozen=True)
class Curve:
    """Mean recalls on `val`, and what twice the pictures are expected to add, in percent."""

    name: str  # of the candidate
    points: tuple[tuple[int, float], ...]  # training pictures, and the mean recall
    gain: float
    low: float  # of a 95% interval
    high: float

    def __str__(self) -> str:
        reached = ", ".join(f"{recall:.1f} from {images:,}" for images, recall in self.points)
        expected = f"{self.gain:+.1f} ({self.low:+.1f} to {self.high:+.1f})"
        return f"{self.name} by training pictures, val mR: {reached}; from twice as many expect {expected}"


def learning_curve(name: str, runs: Mapping[int, Path], device: str) -> Curve:
    """Compare runs of a candidate that learnt from so many pictures, a quarter, half and all, in this order."""
    found = [_hits(run, device) for run in runs.values()]
    images, captions = (np.stack([one[side] for one in found]) for side in (0, 1))
    count = found[0][2]
    recalls = 50 * (images.mean((1, 2)) + captions.sum((1, 2)) / (len(DEPTHS) * count.sum()))
    weights = np.array([-FALLS / 2, 0.0, FALLS / 2])
    low, high = bootstrap(np.tensordot(weights, images, 1), np.tensordot(weights, captions, 1), count)
    points = tuple(zip(runs, recalls.tolist(), strict=True))
    return Curve(name, points, float(weights @ recalls), float(low[-1]) / 6, float(high[-1]) / 6)


def _hits(run: Path, device: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the hits at each depth of each image of `val`, `[I, 3]`, and of its captions, summed, and their number."""
    scored = embed_split(Ranker(run, device=device), "val", whole=False)
    found = [np.stack([hits(one, k).cpu().numpy() for k in DEPTHS], 1).astype(float) for one in scored.ranks()]
    owner = scored.caption_image.numpy()
    captions = np.zeros((len(scored.ids), len(DEPTHS)))
    np.add.at(captions, owner, found[1])
    count = np.bincount(owner, minlength=len(captions))
    return found[0], captions[count > 0], count[count > 0]
