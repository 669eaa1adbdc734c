"""Search by an index against exact search: recall of the exact top 10 and speed, on generated embeddings in one run.

    python tests/benchmarks/search.py --sets 1000000 --dim 128
    python tests/benchmarks/search.py --vectors 10000000 --dim 256

Sets are drawn from a mixture of as many centres as a hundredth of the sets (10,000 for 1 M): every element of a set
is the unit centre plus Gaussian noise, normalised. The noise is such that the sets have the circular variance of a
`setdiv` run trained on RSICD (natural logarithm, as `xret eval` prints it).
Queries are other sets of the same mixture, one at a time, compared by smooth-Chamfer. Vectors, compared by their
cosines, are clusters of clusters in 32 dimensions, a hundred of them in each, with a little noise in all dimensions.

Exact search is timed in two ways: `exact` by the run's similarity, `product` the bare matrix
product of its elements, a bound that no exact search gets below. Indexed search is timed whole, re-ranking included,
from mapped files. All have one thread; on a machine with other work look at the time of the processors (`cpu`), which
is the clock's where nothing else runs. Prints a JSON line a step.
"""

import math
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
import torch
from sizes import say, small
from torch import Tensor
from torch.nn import functional

from xret.heads.evaluation.metrics import log_circular_variance
from xret.heads.retrieval.index import Index, Items, build, search_exactly
from xret.similarities import Cosine, SmoothChamfer

K, ALPHA = 10, 16.0
SIZE, LOG_VARIANCE = 4, -1.71  # of a set; as a `setdiv` run trained on RSICD has it
INNER = 32  # dimensions of the clusters of vectors
PART = 10_000  # embeddings generated in one go


class Mixture:
    """Sets of unit elements around so many random centres."""

    def __init__(self, centres: int, dim: int) -> None:
        draw = torch.Generator().manual_seed(0)
        self.centres = functional.normalize(torch.randn(centres, dim, generator=draw), dim=1)
        # The mean of n unit elements with cosines c to each other has the squared length (1 + (n - 1) c) / n.
        cosine = (SIZE * (1 - math.exp(LOG_VARIANCE)) ** 2 - 1) / (SIZE - 1)
        self.noise = math.sqrt((1 / cosine - 1) / dim)

    def draw(self, count: int, seed: int) -> Tensor:
        """Return sets, `[count, size, dim]`."""
        draw = torch.Generator().manual_seed(seed)
        own = self.centres[torch.randint(len(self.centres), (count,), generator=draw)][:, None]
        noise = torch.randn(count, SIZE, own.shape[-1], generator=draw)
        return functional.normalize(own + self.noise * noise, dim=-1)


class Nested:
    """Unit vectors of clusters, whose centres are in larger clusters."""

    def __init__(self, centres: int, dim: int) -> None:
        draw = torch.Generator().manual_seed(0)
        outer = torch.randn(100, INNER, generator=draw)[torch.randint(100, (centres,), generator=draw)]
        self.centres = outer + 0.7 * torch.randn(centres, INNER, generator=draw)
        self.turn = torch.randn(INNER, dim, generator=draw) / math.sqrt(INNER)

    def draw(self, count: int, seed: int) -> Tensor:
        """Return vectors, `[count, dim]`."""
        draw = torch.Generator().manual_seed(seed)
        own = self.centres[torch.randint(len(self.centres), (count,), generator=draw)]
        inner = own + 0.5 * torch.randn(count, INNER, generator=draw)
        return functional.normalize(inner @ self.turn + 0.1 * torch.randn(count, len(self.turn[0]), generator=draw))


def gallery(of: Mixture | Nested, count: int) -> Iterator[Tensor]:
    """Yield so many embeddings, part by part."""
    for seed, first in enumerate(range(0, count, PART), 1000):
        yield of.draw(min(PART, count - first), seed)


class Milliseconds(NamedTuple):
    """What a query takes, the median of several: by the clock, and of processors (all threads together)."""

    clock: float
    cpu: float

    def times(self, other: "Milliseconds") -> dict[str, float]:
        """Return how many times as long this is as `other`, both ways."""
        return {"clock": round(self.clock / other.clock, 1), "cpu": round(self.cpu / other.cpu, 1)}


def timed(work: Callable[[Tensor], Any], queries: Tensor) -> tuple[Milliseconds, list[Any]]:
    """Return what a query takes and what `work` gave for each."""
    took, found = [], []
    for query in queries.split(1):
        clock, cpu = time.perf_counter(), time.process_time()
        found.append(work(query))
        took.append((time.perf_counter() - clock, time.process_time() - cpu))
    return Milliseconds(*(1e3 * np.median(took, axis=0)).round(3).tolist()), found


def product(elements: Tensor, query: Tensor) -> None:
    """Multiply all elements with those of a query, in blocks that stay in the cache."""
    for block in elements.split(1 << 14):
        block @ query.reshape(-1, block.shape[1]).T


@click.command()
@click.option("--sets", default=100_000, show_default=True, type=click.IntRange(min=1000))
@click.option("--vectors", type=click.IntRange(min=1000), help="So many vectors in the place of sets.")
@click.option("--dim", default=128, show_default=True, help="Of vectors, or of the elements, of which a set has four.")
@click.option("--factory", help="For FAISS; by default what `xret index` takes.")
@small(sets=1000, dim=16, queries=4, few=1)
def main(sets: int, vectors: int | None, dim: int, factory: str | None, queries: int = 200, few: int = 5) -> None:
    """Build an index, then search with and without it; exact search is timed with a few queries."""
    import faiss

    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    count = vectors or sets
    mixture = (Nested if vectors else Mixture)(max(10, count // 100), dim)
    asked, similarity = mixture.draw(queries, 1), Cosine() if vectors else SmoothChamfer(ALPHA)
    if vectors:
        say(what="data", vectors=vectors, dim=dim)
    else:
        say(what="data", sets=sets, size=SIZE, dim=dim, log_circular_variance=log_circular_variance(asked))

    def compare(left: Tensor, right: Tensor) -> Tensor:
        return similarity(right, left).T

    with tempfile.TemporaryDirectory() as scratch:
        path, begin, cpu = Path(scratch), time.perf_counter(), time.process_time()
        written = Items.write(path, gallery(mixture, count))
        facts = build(path, written, mixture.draw(400, 2), compare, similarity, factory=factory, recall=0.99)
        seconds = {"seconds": time.perf_counter() - begin, "cpu_seconds": time.process_time() - cpu}
        megabytes = sum(file.stat().st_size for file in path.iterdir()) / 1e6
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        say(what="build", **seconds, **facts, megabytes=megabytes, peak_mb=peak)
        index, some = Index(path, facts, similarity), asked[:few]
        truth = [set(rows.tolist()) for rows, _ in search_exactly(asked, index.items, compare, K)]
        exact, _ = timed(lambda query: search_exactly(query, index.items, compare, K), some)
        elements = index.items[:].reshape(-1, dim)
        bare, _ = timed(lambda query: product(elements, query), some)
        say(what="exact", milliseconds=exact._asdict(), product_milliseconds=bare._asdict())
        for effort in dict.fromkeys((facts["effort"], 1, 2, 4, 8, 16)):
            index.set_effort(effort, facts["depth"] if effort == facts["effort"] else None)
            timed(lambda query: index.search(query, K, compare), some)  # warm
            took, found = timed(lambda query: index.search(query, K, compare), asked)
            hits = sum(len(own & set(rows.tolist())) for (rows, _), own in zip(found, truth, strict=True))
            say(
                what="indexed" if effort == facts["effort"] else "other effort",
                effort=effort,
                recall_at_10=hits / (K * queries),
                milliseconds=took._asdict(),
                compared=float(np.mean([len(index.candidates(query, K)) for query in asked[:20].split(1)])),
                exact_over_this=exact.times(took),
                product_over_this=bare.times(took),
            )


if __name__ == "__main__":
    main()
