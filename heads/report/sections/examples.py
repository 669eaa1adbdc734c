"""Queries and what was found for them: by whole embeddings, and by each element alone.

Figures 5-7 of *Maximal Matching Matters* (MaxMatch) show the best result of each element in both directions, and
failures.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ..pictures import Pictures
from ..views import View

Direction = Literal["image_to_text", "text_to_image"]

QUERIES, TOP = 5, 5  # of a gallery, in each direction
CASES = 3  # successes, and as many failures, whose elements are looked at
ASKED = 200  # queries of which the elements' results are counted


@dataclass(frozen=True)
class Item:
    """An image or a caption on the page.

    Attributes:
        text: the caption, or the first caption of the image.
        name: the image's id; empty for a caption.
        picture: SVG of the image; None for a caption, or where the file is not there.
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
    """A query and what was found for it, the best first, or one for each element."""

    query: Item
    found: list[Item]


def image_item(view: View, pictures: Pictures, row: int) -> Item:
    """Return an image as the page shows it."""
    text, name = view.first_caption(row), view.embedded.ids[row]
    return Item(text, name, pictures.show(view.embedded.file_names[row], described(name, text)))


def described(name: str, caption: str) -> str:
    """Return an image in words: what its first caption says of it."""
    return f"Image {name}: {caption}" if caption else f"Image {name}"


def gallery(view: View, pictures: Pictures, direction: Direction, seed: int) -> list[Example]:
    """Return a few random queries with their best results by the run's own similarity; ties in the store's order."""
    side = _side(view, pictures, direction)
    examples = []
    for query in drawn(side.queries, QUERIES, seed):
        scores = view.similarity[query] if direction == "image_to_text" else view.similarity[:, query]
        best = scores.sort(descending=True, stable=True).indices[:TOP].tolist()
        found = [replace(side.item(row), right=side.right(query, row)) for row in best]
        examples.append(Example(side.query(query), found))
    return examples


def by_element(view: View, pictures: Pictures, direction: Direction, seed: int) -> dict[str, list[Example]]:
    """Return the best result of each element of a few queries.

    Returns:
        ``{"successes", "failures"}``: queries whose whole set finds a right item first, and others, both random.
    """
    side = _side(view, pictures, direction)
    hits = (view.image_hits if direction == "image_to_text" else view.caption_hits).numpy()
    cases = {}
    for name, which in (
        ("successes", side.queries[hits[side.queries]]),
        ("failures", side.queries[~hits[side.queries]]),
    ):
        chosen = drawn(which, CASES, seed)
        cases[name] = [
            Example(
                side.query(query),
                [
                    replace(side.item(row), right=side.right(query, row), note=f"element {k}")
                    for k, row in enumerate(rows, 1)
                ],
            )
            for query, rows in zip(chosen, nearest(*_both(view, direction, chosen)).tolist(), strict=True)
        ]
    return cases


def different_results(view: View, direction: Direction, seed: int) -> float:
    """Return how many different items the elements of a query find first, on average over some random queries."""
    side = view.image_elements if direction == "image_to_text" else view.caption_elements
    asked = drawn(np.arange(len(side)), ASKED, seed)
    return float(np.mean([len(set(rows)) for rows in nearest(*_both(view, direction, asked)).tolist()]))


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


@dataclass(frozen=True)
class _Side:
    queries: np.ndarray
    query: Callable[[int], Item]
    item: Callable[[int], Item]
    right: Callable[[int, int], bool]


def _side(view: View, pictures: Pictures, direction: Direction) -> _Side:
    """Return what a direction asks and finds; images without a caption ask nothing."""
    owner = view.embedded.caption_image.numpy()

    def image(row: int) -> Item:
        return image_item(view, pictures, row)

    def caption(row: int) -> Item:
        return Item(view.embedded.texts[row])

    if direction == "image_to_text":
        return _Side(np.unique(owner), image, caption, lambda query, row: bool(owner[row] == query))
    return _Side(np.arange(len(owner)), caption, image, lambda query, row: bool(owner[query] == row))


def _both(view: View, direction: Direction, rows: Iterable[int]) -> tuple[Tensor, Tensor]:
    """Return the elements of some queries, and of all items."""
    chosen = list(rows)
    if direction == "image_to_text":
        return view.image_elements[chosen], view.caption_elements
    return view.caption_elements[chosen], view.image_elements
