"""Queries and what was found for them: by whole embeddings, by each element alone, and by several runs.

Figures 5-7 of *Maximal Matching Matters* (MaxMatch) show the best result of each element in both directions, and
failures.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Several
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ..evaluation.number_table import NumberTable, shown
from ..evaluation.scoring import Embedded
from .pictures import Pictures

Direction = Literal["image_to_text", "text_to_image"]
DIRECTIONS: dict[Direction, str] = {"image_to_text": "image to text", "text_to_image": "text to image"}


@dataclass(frozen=True)
class Item:
    """An image or a caption on the page.

    Attributes:
        text: the caption, or the first caption of the image.
        name: the image's id; empty for a caption.
        picture: SVG of the image; None for a caption, or if the file is missing.
        right: whether it belongs to the query; None for the query itself.
        note: what else the page says about it.
    """

    text: str
    name: str = ""
    picture: str | None = None
    right: bool | None = None
    note: str = ""


@dataclass(frozen=True)
class Example:
    """A query, what was found for it with scores, and the best right item if that is not first (rank and score)."""

    query: Item
    found: list[Item]
    missed: Item | None = None


@dataclass(frozen=True)
class Way:
    """One direction of retrieval: Q samples ask, M samples are found.

    Attributes:
        similarity: ``[Q, M]``; larger is closer.
        query_image: the image that each query is or describes, int64 ``[Q]``.
        item_image: likewise of each item, int64 ``[M]``; an item of the query's image is right.
        query_elements, item_elements: unit elements, ``[Q, K, D]`` and ``[M, K, D]``.
    """

    similarity: Tensor
    query_image: np.ndarray
    item_image: np.ndarray
    query_elements: Tensor
    item_elements: Tensor

    @cached_property
    def queries(self) -> np.ndarray:
        """The queries that ask; images without a caption ask nothing."""
        return np.flatnonzero(np.isin(self.query_image, self.item_image))

    @cached_property
    def found(self) -> np.ndarray:
        """The best item of each query, int64 ``[Q]``."""
        return self.similarity.argmax(1).cpu().numpy()

    @cached_property
    def hits(self) -> np.ndarray:
        """Whether the best item of each query is right, bool ``[Q]``."""
        right: np.ndarray = self.query_image == self.item_image[self.found]
        return right

    def right(self, query: int) -> tuple[int, int]:
        """Return the best right item of a query, and its rank from 1, equal scores in the order of the store."""
        scores = self.similarity[query].cpu().numpy()
        own = np.flatnonzero(self.item_image == self.query_image[query])
        best = int(own[scores[own].argmax()])
        return best, 1 + int((scores > scores[best]).sum() + (scores[:best] == scores[best]).sum())


@dataclass(frozen=True)
class PageRun:
    """A run on the page: its name there, the run on its split, and the pictures as its feature set saw them."""

    name: str
    seen: Embedded
    pictures: Pictures

    @cached_property
    def ways(self) -> dict[Direction, Way]:
        """Both directions."""
        owner, scores = self.seen.scores.caption_image.numpy(), self.seen.scores.similarity
        images, left, right = np.arange(len(scores)), self.seen.image.elements, self.seen.text.elements
        return {
            "image_to_text": Way(scores, images, owner, left, right),
            "text_to_image": Way(scores.T, owner, images, right, left),
        }

    def first_caption(self, image: int) -> str:
        """Return the first caption of an image; an empty text if it has none."""
        own = (self.seen.scores.caption_image == image).nonzero()[:, 0]
        return self.seen.scores.texts[int(own[0])] if len(own) else ""

    def image_item(self, row: int) -> Item:
        """Return an image as the page shows it."""
        text, name = self.first_caption(row), self.seen.scores.ids[row]
        return Item(text, name, self.pictures.show(self.seen.scores.file_names[row], described(name, text)))


def described(name: str, caption: str) -> str:
    """Return an image in words: what its first caption says of it."""
    return f"Image {name}: {caption}" if caption else f"Image {name}"


def example(run: PageRun, direction: Direction, query: int, found: Iterable[int], notes: Several[str] = ()) -> Example:
    """Return a query with the items that were found for it, each with its score, after its note if there are notes."""
    way, found = run.ways[direction], list(found)
    query_is_image, texts = direction == "image_to_text", run.seen.scores.texts

    def item(row: int, note: str) -> Item:
        made = Item(texts[row]) if query_is_image else run.image_item(row)
        own = bool(way.item_image[row] == way.query_image[query])
        return replace(made, right=own, note=note + shown(float(way.similarity[query, row])))

    items = [item(row, f"{note}: ") for row, note in zip(found, notes, strict=True)] if notes else [
        item(row, "") for row in found
    ]  # fmt: skip
    best, rank = way.right(query)
    missed = rank > 1 and (best not in found or len(notes) > 0)
    asked = run.image_item(query) if query_is_image else Item(texts[query])
    return Example(asked, items, item(best, f"rank {rank:,}: ") if missed else None)


def gallery(run: PageRun, direction: Direction, count: int, top: int, seed: int) -> list[Example]:
    """Return `count` random queries with the `top` results by the run's own similarity; ties in the store's order."""
    way = run.ways[direction]
    best = {
        query: way.similarity[query].sort(descending=True, stable=True).indices[:top].tolist()
        for query in drawn(way.queries, count, seed)
    }
    return [example(run, direction, query, found) for query, found in best.items()]


def by_element(run: PageRun, direction: Direction, count: int, seed: int) -> dict[bool, list[Example]]:
    """Return the best result of each element of `count` random queries whose whole set is right, and of as many others.

    Returns:
        By whether the first result of the whole set is right.
    """
    way, cases = run.ways[direction], {}
    hits = way.hits[way.queries]
    for right in (True, False):
        chosen = drawn(way.queries[hits == right], count, seed)
        found = nearest(way.query_elements[chosen], way.item_elements)
        notes = [f"element {k}" for k in range(1, found.shape[1] + 1)]
        cases[right] = [
            example(run, direction, query, rows, notes) for query, rows in zip(chosen, found.tolist(), strict=True)
        ]
    return cases


def agreement_table(runs: Several[PageRun]) -> NumberTable:
    """Return how often each run finds what every other one misses, in percent of the queries of both directions."""
    hits = [np.concatenate([way.hits[way.queries] for way in run.ways.values()]) for run in runs]
    rows = [
        [run.name, *(None if i == j else 100 * float(np.mean(mine & ~theirs)) for j, theirs in enumerate(hits))]
        for i, (run, mine) in enumerate(zip(runs, hits, strict=True))
    ]
    both, none = (100 * float(np.mean(which)) for which in (np.all(hits, axis=0), ~np.any(hits, axis=0)))
    caption = (
        "Queries (%) of both directions whose first result is right with the run of the row and wrong with that of the "
        f"column. All runs are right on {both:.2f} %, none on {none:.2f} %."
    )
    return NumberTable(caption, ["right", *(f"{run.name} wrong" for run in runs)], rows)


def disagreements(runs: Several[PageRun], direction: Direction, count: int, seed: int) -> list[Example]:
    """Return a few random queries that some runs answer rightly and others wrongly.

    What is found is the first result of each run, with its name, its score and the rank of the right one.
    """
    ways = [run.ways[direction] for run in runs]
    asked = ways[0].queries
    right = np.sum([way.hits[asked] for way in ways], axis=0)
    examples = []
    for query in drawn(asked[(right > 0) & (right < len(runs))], count, seed):
        firsts = [example(run, direction, query, [int(run.ways[direction].found[query])], [run.name]) for run in runs]
        found = [
            replace(item, note=f"{item.note}, the right one at {one.missed.note}") if one.missed else item
            for one in firsts
            for item in one.found
        ]
        examples.append(Example(firsts[0].query, found))
    return examples


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
    """Return at most `count` of `rows`, drawn with the seed, in ascending order."""
    dice = np.random.default_rng(seed)
    return sorted(dice.choice(rows, min(count, len(rows)), replace=False).tolist())
