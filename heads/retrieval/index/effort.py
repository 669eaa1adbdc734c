"""How much effort a wanted recall takes: measured on a sample of queries when an index is built.

It has to be reached with two standard errors to spare: a query's answers are often found all or none, and an effort
that just reached it on the sample would, of several tried, likely be a lucky one.
"""

from dataclasses import dataclass

import numpy as np

from .candidates import Candidates, Effort
from .items import Items

K = 10  # answers that recall is measured on
MOST = 4096  # probes, and candidates of an element, at most


@dataclass(frozen=True)
class Measurement:
    """What an effort finds and costs.

    Attributes:
        probes, candidates: the `Effort`.
        recall: the mean of the queries' recalls.
        error: its standard error.
        work: by `Candidates.work`.
    """

    probes: int
    candidates: int
    recall: float
    error: float
    work: float

    @property
    def effort(self) -> Effort:
        """The effort."""
        return Effort(self.probes, self.candidates)

    def reaches(self, wanted: float) -> bool:
        """Return whether the recall is surely the wanted one."""
        return self.recall - 2 * self.error >= wanted


def measure(
    candidates: Candidates,
    items: Items,
    queries: list[np.ndarray],
    exact: list[np.ndarray],
    wanted: float,
    fixed: Effort | None = None,
) -> list[Measurement]:
    """Measure which share of the exact top 10 is among the candidates, for a grid of efforts or a `fixed` one.

    The answers are ranked exactly, so that this is the recall of the search.

    Args:
        candidates: the FAISS index.
        items: the gallery, for whose element is whose.
        queries: the vectors of each query, float32 ``[K, W]``.
        exact: rows of the exact top 10 of each query.
        wanted: the recall that is looked for; the grid ends where reaching it only costs more.
        fixed: the only effort to measure.

    Returns:
        Of every effort, by rising probes and candidates.
    """
    total = len(candidates)
    many = [1] if candidates.kind == "flat" else _doubling(1, min(candidates.most_probes, MOST))
    depths = _doubling(min(16, total), min(MOST, total))
    if fixed:
        many, depths = [fixed.probes], [min(fixed.candidates, total)]
    ends = np.cumsum([len(query) for query in queries])
    stacked = np.concatenate(queries)
    curve: list[Measurement] = []
    dearest = float("inf")
    for probes in many:
        if candidates.work(Effort(probes, depths[0])) > dearest:
            break
        found = items.owners(candidates.search(stacked, Effort(probes, depths[-1])))  # of -1: no row
        per_query = np.split(found, ends[:-1])
        for depth in depths:
            if candidates.kind == "hnsw" and depth > max(probes, depths[0]):
                break  # as many as are in sight
            shares = [
                len(np.intersect1d(f[:, :depth], rows)) / len(rows) for f, rows in zip(per_query, exact, strict=True)
            ]
            recall, error = float(np.mean(shares)), float(np.std(shares) / len(shares) ** 0.5)
            curve.append(Measurement(probes, depth, recall, error, candidates.work(Effort(probes, depth))))
            if curve[-1].reaches(wanted):
                dearest = min(dearest, curve[-1].work)
    return curve


def cheapest(curve: list[Measurement], wanted: float) -> Measurement:
    """Return the point of `curve` with the least work that surely reaches the wanted recall, or else the best one."""
    enough = [point for point in curve if point.reaches(wanted)]
    if enough:
        return min(enough, key=lambda point: (point.work, point.probes))
    return max(curve, key=lambda point: (point.recall, -point.work))


def _doubling(first: int, last: int) -> list[int]:
    """Return first, twice that, and so on, and `last` at the end."""
    numbers = []
    while first < last:
        numbers.append(first)
        first *= 2
    return [*numbers, last]
