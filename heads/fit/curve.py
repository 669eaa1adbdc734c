"""The learning curve: what parts of the training pictures reach on the test split, and what twice as many would add.

The log-odds of a recall, log(y / (100 - y)), grow with each doubling of the pictures by a little less than with the one
before. So what the next one adds to them is expected to be `FALLS` times the mean of the last two. The interval is the
bootstrap's over the test pictures, with `FALLS` drawn from `RANGE` in each of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..evaluation.comparison import DEPTHS
from ..evaluation.metrics import hits
from ..evaluation.scoring import Ranker, embed_split

SHARES = (0.25, 0.5)  # of the training pictures, beside all of them
FEWEST = 6  # training pictures, a quarter of which are two, the least that have negatives
FALLS, RANGE = 0.85, (0.6, 1.1)
RESAMPLES = 1000


@dataclass(frozen=True)
class Curve:
    """Mean recalls on the test split, and what twice the pictures are expected to add, in percent."""

    name: str  # of the candidate
    points: tuple[tuple[int, float], ...]  # training pictures, and the mean recall
    gain: float
    low: float  # of a 95% interval
    high: float

    def __str__(self) -> str:
        reached = ", ".join(f"{recall:.1f} from {images:,}" for images, recall in self.points)
        expected = f"{self.gain:+.1f} (95%: {self.low:+.1f} to {self.high:+.1f})"
        return f"{self.name} by training pictures, test mR: {reached}; expect {expected} from twice as many"


def learning_curve(name: str, runs: Mapping[int, Path], device: str) -> Curve:
    """Compare runs of a candidate that learnt from so many pictures, a quarter, half and all, in this order."""
    found = [_hits(run, device) for run in runs.values()]
    images, captions = (np.stack([one[side] for one in found]) for side in (0, 1))
    count, total, rng = found[0][2], len(found[0][2]), np.random.default_rng(0)

    def recalls(weights: np.ndarray) -> np.ndarray:
        return np.asarray(50 * (images @ weights / total + captions @ weights / (count @ weights)))

    reached = recalls(np.ones(total))
    gains = []
    for _ in range(RESAMPLES):
        weights = np.bincount(rng.integers(0, total, total), minlength=total)
        gains.append(next_gain(recalls(weights), rng.uniform(*RANGE)))
    low, high = np.quantile(gains, [0.025, 0.975]).tolist()
    return Curve(name, tuple(zip(runs, reached.tolist(), strict=True)), next_gain(reached, FALLS), low, high)


def next_gain(recalls: np.ndarray, falls: float) -> float:
    """Return what is expected to be added to the last of three recalls in percent, each of twice the pictures."""
    share = (recalls / 100).clip(0.001, 0.999)
    odds = np.log(share / (1 - share))
    expected = odds[2] + falls * (odds[2] - odds[0]) / 2
    return float(100 / (1 + np.exp(-expected)) - 100 * share[2])


def _hits(run: Path, device: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the mean hits of each test image, of its captions, summed, and the number of these, each `[I]`."""
    scored = embed_split(Ranker(run, device=device), "test", whole=False)
    images, captions = (np.mean([hits(one, k).cpu().numpy() for k in DEPTHS], 0) for one in scored.ranks())
    owner = scored.caption_image.numpy()
    summed, count = np.bincount(owner, captions, len(scored.ids)), np.bincount(owner, minlength=len(scored.ids))
    return images, summed[count > 0], count[count > 0]
