"""Several runs on the same queries: where they agree, and where one finds what another misses."""

from collections.abc import Sequence as Several
from dataclasses import replace

import numpy as np

from ..figures import Table, number
from ..pictures import Pictures
from ..views import Direction, View
from .examples import Example, drawn, example

EXAMPLES = 3  # queries of each direction that the runs disagree on


def agreement_table(views: Several[View]) -> Table:
    """Return how often each run finds what every other one misses, in percent of the queries of both directions."""
    hits = [np.concatenate([way.hits[way.queries] for way in view.ways.values()]) for view in views]
    rows = [
        [view.name, *("–" if i == j else number(100 * float(np.mean(mine & ~theirs))) for j, theirs in enumerate(hits))]
        for i, (view, mine) in enumerate(zip(views, hits, strict=True))
    ]
    both = number(100 * float(np.mean(np.all(hits, axis=0))))
    none = number(100 * float(np.mean(~np.any(hits, axis=0))))
    caption = (
        "Queries (%) of both directions whose first result is right with the run of the row and wrong with that of the "
        f"column; of equal scores the store's first counts. All runs are right on {both} %, none on {none} %."
    )
    return Table(caption, ["right", *(f"{view.name} wrong" for view in views)], rows)


def disagreements(views: Several[View], pictures: Pictures, direction: Direction, seed: int) -> list[Example]:
    """Return a few random queries that some runs answer rightly and others wrongly.

    What is found is the first result of each run, with its name, its score and where it has the right one.
    """
    ways = [view.ways[direction] for view in views]
    asked = ways[0].queries
    right = np.sum([way.hits[asked] for way in ways], axis=0)
    split = asked[(right > 0) & (right < len(views))]
    return [_first_results(views, pictures, direction, query) for query in drawn(split, EXAMPLES, seed)]


def _first_results(views: Several[View], pictures: Pictures, direction: Direction, query: int) -> Example:
    firsts = [
        example(view, pictures, direction, query, [int(view.ways[direction].found[query])], [view.name])
        for view in views
    ]
    found = [
        replace(item, note=f"{item.note}, the right one at {one.missed.note}") if one.missed else item
        for one in firsts
        for item in one.found
    ]
    return Example(firsts[0].query, found)
