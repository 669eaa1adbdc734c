"""Two runs side by side on the same queries: whether their difference is more than chance, and which queries change.

The bootstrap (Efron; paired, as in Sakai, *Evaluating Evaluation Metrics based on the Bootstrap*, SIGIR 2006) draws
images with replacement, each with its captions: captions of one image are no independent queries.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...pipeline.wording import counted
from .evaluation import in_order, open_rankers, take_views
from .metrics import WAYS, Ranks, Ties, expected_ranks, hits, require_ties
from .number_table import NumberTable, Rows
from .own_model import Embedder
from .scoring import embed_split

RESAMPLES, CHANGES = 10_000, 5
DEPTHS = (1, 5, 10)
CELLS = 1 << 22  # weights of images drawn in one go


@dataclass(frozen=True)
class Difference:
    """A metric of two runs, in percent, and the 95% interval of the second less the first."""

    name: str  # as ``image_to_text R@1``, or ``RSUM``
    first: float
    second: float
    low: float
    high: float


@dataclass(frozen=True)
class Change:
    """A query, an image's id or a caption's text, and the rank of its best right item in both runs."""

    way: str
    query: str
    first: float
    second: float


@dataclass(frozen=True)
class Comparison:
    """What `compare_runs` finds; ``str`` shows it as tables."""

    runs: tuple[str, str]
    split: str
    ties: Ties
    images: int
    captions: int
    differences: tuple[Difference, ...]
    changes: tuple[Change, ...]  # the largest ratios of ranks of each way

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return asdict(self)

    def __str__(self) -> str:
        first = (
            f"{self.runs[1]} against {self.runs[0]}, split {self.split}: {counted(self.images, 'image')}, "
            f"{counted(self.captions, 'caption')}, ties {self.ties}; 95% intervals of {RESAMPLES:,} resamples of images"
        )
        rows: Rows = [
            [d.name.replace("_", " "), d.first, d.second, d.second - d.first, d.low, d.high, sure(d)]
            for d in self.differences
        ]
        header = ["", "first", "second", "difference", "from", "to", ""]
        changes: Rows = [[c.query[:70], c.way.replace("_", " "), c.first, c.second] for c in self.changes]
        queries = ["query", "", "first", "second"]
        ranks = NumberTable("ranks that change most", queries, changes, 1) if changes else "no rank changes"
        return f"{NumberTable(first, header, rows)}\n{ranks}"


def sure(difference: Difference) -> str:
    """Return whether the second run is ``better`` or ``worse``; empty where the interval has 0 in it."""
    return "better" if difference.low > 0 else "worse" if difference.high < 0 else ""


def compare_runs(
    first: str | Path | Embedder,
    second: str | Path | Embedder,
    *,
    store: str | None = None,
    split: str = "test",
    ties: Ties = "pessimistic",
    views: bool = False,
    features: str = "auto",
    device: str = "auto",
    trust: bool = False,
) -> Comparison:
    """Compare two runs, stores or user-defined models by all images against all captions.

    Arguments are those of `evaluation.evaluate`. RunError if one of them cannot be used, or they do not see the same
    images and captions.
    """
    require_ties(ties)
    rankers = open_rankers((first, second), store, features, device, trust)
    if views:
        take_views(rankers)
    ours = embed_split(rankers[0], split, whole=False)
    both, owner = [ours.ranks()], ours.caption_image
    ours = replace(ours.without_embeddings(), similarity=torch.empty(0), pairs=None)  # room for the other run's
    theirs = embed_split(rankers[1], split, whole=False)
    rows, columns = map(np.array, in_order(ours, theirs, f"{rankers[1].name} and {rankers[0].name} cannot be compared"))
    count = torch.bincount(owner, minlength=len(ours.ids)).numpy()
    asked = np.flatnonzero(count)
    places = np.searchsorted(np.unique(theirs.caption_image), rows[asked]), columns  # of our queries among theirs
    of_ways = zip(theirs.ranks(), places, strict=True)
    to_text, to_image = (Ranks(*(counts.cpu()[place] for counts in way)) for way, place in of_ways)
    both.append((to_text, to_image))
    first_hits, second_hits = ([_hits(way, ties) for way in of_run] for of_run in both)
    captions = np.zeros((len(count), len(DEPTHS)))
    np.add.at(captions, owner.numpy(), second_hits[1] - first_hits[1])
    low, high = bootstrap(second_hits[0] - first_hits[0], captions[asked], count[asked])
    means = [100 * np.concatenate([way.mean(0) for way in of_run]) for of_run in (first_hits, second_hits)]
    values = *(np.append(mean, mean.sum()) for mean in means), low, high
    names = [*(f"{way} R@{k}" for way in WAYS for k in DEPTHS), "RSUM"]
    differences = tuple(map(Difference, names, *(column.tolist() for column in values)))
    queries = [ours.ids[row] for row in asked], ours.texts
    changes: list[Change] = []
    for way, asking, before, after in zip(WAYS, queries, *both, strict=True):
        changes += _changes(way, asking, before, after, ties)
    names_of = rankers[0].name, rankers[1].name
    return Comparison(names_of, split, ties, len(ours.ids), len(ours.texts), differences, tuple(changes))


def _hits(ranks: Ranks, ties: Ties) -> np.ndarray:
    """Return the hits of Q queries at each of `DEPTHS`, ``[Q, 3]``."""
    return np.stack([hits(ranks, k, ties).cpu().numpy() for k in DEPTHS], 1)


def _changes(way: str, queries: Sequence[str], first: Ranks, second: Ranks, ties: Ties) -> Iterator[Change]:
    """Yield the queries of a direction whose ranks change most."""
    before, after = (expected_ranks(ranks, ties).cpu().numpy() for ranks in (first, second))
    for row in np.argsort(-np.abs(np.log(after / before)), kind="stable")[:CHANGES]:
        if before[row] != after[row]:
            yield Change(way, queries[row], float(before[row]), float(after[row]))


def bootstrap(
    images: np.ndarray, captions: np.ndarray, count: np.ndarray, resamples: int = RESAMPLES
) -> tuple[np.ndarray, np.ndarray]:
    """Return the 2.5th and the 97.5th percentile of differences in percent, `[7]`: six recalls and their sum.

    Args:
        images: how the hits of I images, as queries, differ between two runs, `[I, 3]` at R@1, 5 and 10.
        captions: the same of captions, summed over those of each image, `[I, 3]`.
        count: how many captions each image has, `[I]`.
        resamples: how often I images are drawn.
    """
    rng, total, drawn = np.random.default_rng(0), len(images), []
    step = max(1, CELLS // total)
    for begin in range(0, resamples, step):
        size = min(step, resamples - begin)
        picked = rng.integers(0, total, (size, total)) + total * np.arange(size)[:, None]
        weights = np.bincount(picked.ravel(), minlength=size * total).reshape(size, total).astype(float)
        drawn.append(np.hstack([weights @ images / total, weights @ captions / (weights @ count)[:, None]]))
    values = 100 * np.concatenate(drawn)
    values = np.hstack([values, values.sum(1, keepdims=True)])
    low, high = np.quantile(values, [0.025, 0.975], axis=0)
    return low, high
