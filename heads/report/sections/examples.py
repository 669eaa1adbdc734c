"""Queries and what was found for them: by whole embeddings, and by each element alone.

Figures 5-7 of *Maximal Matching Matters* (MaxMatch) show the best result of each element in both directions, and
failures.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Several
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ..figures import number
from ..pictures import Pictures
from ..views import Direction, View

ASKED = 200  # queries of which the elements' results are counted


@dataclass(frozen=True)
class Item:
    """An image or a caption on the page.

    Attributes:
        text: the caption, or the first caption of the image.
        name: the image's id; empty for a caption.
        picture: SVG of the image; None for a caption, or where the file is missing.
        right: whether it belongs to the query; None for the query itself.
        note: what else is said of it.
    """

    text: str
    name: str = ""
    picture: str | None = None
    right: bool | None = None
    note: str = ""


@dataclass(frozen=True)
class Example:
    """A query and what was found for it, the best first, or one for each element.

    Attributes:
        query: what asks.
        found: with their scores.
        missed: the best right item, with its rank and score, where it is not among them or the query fails.
    """

    query: Item
    found: list[Item]
    missed: Item | None = None


def image_item(view: View, pictures: Pictures, row: int) -> Item:
    """Return an image as the page shows it."""
    text, name = view.first_caption(row), view.scores.ids[row]
    return Item(text, name, pictures.show(view.scores.file_names[row], described(name, text)))


def described(name: str, caption: str) -> str:
    """Return an image in words: what its first caption says of it."""
    return f"Image {name}: {caption}" if caption else f"Image {name}"


def example(
    view: View, pictures: Pictures, direction: Direction, query: int, found: Iterable[int], notes: Several[str] = ()
) -> Example:
    """Return a query with the items that were found for it, each with its score, after its note where there are."""
    way, found = view.ways[direction], list(found)
    query_is_image = direction == "image_to_text"

    def item(row: int, note: str) -> Item:
        made = Item(view.scores.texts[row]) if query_is_image else image_item(view, pictures, row)
        own = bool(way.item_image[row] == way.query_image[query])
        return replace(made, right=own, note=note + number(float(way.similarity[query, row])))

    items = [
        item(row, f"{note}: " if note else "") for row, note in zip(found, notes or [""] * len(found), strict=True)
    ]
    best, rank = way.right(query)
    missed = rank > 1 and (best not in found or len(notes) > 0)
    asked = image_item(view, pictures, query) if query_is_image else Item(view.scores.texts[query])
    return Example(asked, items, item(best, f"rank {rank:,}: ") if missed else None)


def gallery(view: View, pictures: Pictures, direction: Direction, count: int, top: int, seed: int) -> list[Example]:
    """Return `count` random queries with the `top` results by the run's own similarity; ties in the store's order."""
    way = view.ways[direction]
    best = {
        query: way.similarity[query].sort(descending=True, stable=True).indices[:top].tolist()
        for query in drawn(way.queries, count, seed)
    }
    return [example(view, pictures, direction, query, found) for query, found in best.items()]


def by_element(view: View, pictures: Pictures, direction: Direction, count: int, seed: int) -> dict[str, list[Example]]:
    """Return the best result of each element of `count` queries.

    Returns:
        ``{"successes", "failures"}``: queries whose whole set finds a right item first, and others, both random.
    """
    way = view.ways[direction]
    hits, cases = way.hits[way.queries], {}
    for name, which in (("successes", way.queries[hits]), ("failures", way.queries[~hits])):
        chosen = drawn(which, count, seed)
        found = nearest(way.query_elements[chosen], way.item_elements)
        notes = [f"element {k}" for k in range(1, found.shape[1] + 1)]
        cases[name] = [
            example(view, pictures, direction, query, rows, notes)
            for query, rows in zip(chosen, found.tolist(), strict=True)
        ]
    return cases


def different_results(view: View, direction: Direction, seed: int) -> float:
    """Return how many different items the elements of a query find first, on average over some random queries."""
    way = view.ways[direction]
    asked = drawn(np.arange(len(way.query_elements)), ASKED, seed)
    found = nearest(way.query_elements[asked], way.item_elements)
    return float(np.mean([len(set(rows)) for rows in found.tolist()]))


@torch.no_grad()
def nearest(queries: Tensor, items: Tensor) -> Tensor:
    """Return the item nearest to each element of each query, by the cosine with the nearest of the item's elements.

    Args:
        queries: unit elements ``[Q, K1, D]``.
        items: unit elements ``[M, K2, D]``.

    Returns:
        int64 ``[Q, K1]``, on the CPU.
    """
    flat = items.flatten(0, 1).T
    found = [(one @ flat).unflatten(1, items.shape[:2]).amax(2).argmax(1) for one in queries]
    return torch.stack(found).cpu() if found else torch.empty(queries.shape[:2], dtype=torch.int64)


def drawn(rows: np.ndarray, count: int, seed: int) -> list[int]:
    """Return at most so many of `rows`, drawn with the seed, in ascending order."""
    dice = np.random.default_rng(seed)
    return sorted(dice.choice(rows, min(count, len(rows)), replace=False).tolist())
