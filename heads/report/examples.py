"""Queries and what was found for them: by whole embeddings, by each element alone, and by several runs.

Figures 5-7 of *Maximal Matching Matters* (MaxMatch) show the best result of each element in both directions, and
failures.
"""

from collections.abc import Callable
from collections.abc import Sequence as Several
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, zip_longest
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...pipeline.reading.joined_sets import are_upright
from ..evaluation.number_table import NumberTable, shown
from ..evaluation.scoring import Scored
from .pictures import Picture, Pictures

SEARCHED = 100  # random queries among which examples are looked for
NEAR = 10  # the last rank that is nearly right
DIRECTIONS = {"image_to_text": "image to text", "text_to_image": "text to image"}


class Item(NamedTuple):
    """An image or a caption on the page."""

    text: str  # the caption, or the first caption of the image
    name: str = ""  # the image's id
    picture: Picture | None = None  # of the image, if its file is there
    right: bool | None = None  # whether it belongs to the query; None for the query itself
    note: str = ""


class Example(NamedTuple):
    """A query, what was found for it with scores, and the best right item if that is not first (rank and score)."""

    query: Item
    found: list[Item]
    missed: Item | None = None


@dataclass(frozen=True)
class Way:
    """One direction of retrieval: Q samples ask, M samples are found. An item of the query's image is right."""

    similarity: Tensor  # [Q, M]; larger is closer
    query_image: np.ndarray  # the image that each query is or describes, int64 [Q]
    item_image: np.ndarray  # likewise of each item, int64 [M]
    query_elements: Tensor  # unit elements, [Q, K, D]
    item_elements: Tensor  # [M, K, D]
    query: Callable[[int], Item]  # shows one on the page
    item: Callable[[int], Item]

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
        """Whether the best item of each query that asks is right, bool."""
        right: np.ndarray = (self.query_image == self.item_image[self.found])[self.queries]
        return right

    def right(self, query: int) -> tuple[int, int]:
        """Return the best right item of a query, and its rank from 1, equal scores in the order of the store."""
        scores = self.similarity[query].cpu().numpy()
        right = np.flatnonzero(self.item_image == self.query_image[query])
        best = int(right[scores[right].argmax()])
        return best, 1 + int((scores > scores[best]).sum() + (scores[:best] == scores[best]).sum())

    def example(self, query: int, found: list[int], notes: Several[str] = ()) -> Example:
        """Return a query with what was found for it, best first: each item's note or rank if it is right, and score."""

        def item(row: int, note: str) -> Item:
            right, score = bool(self.item_image[row] == self.query_image[query]), float(self.similarity[query, row])
            said = f"{note}: " if notes or right else ""
            return self.item(row)._replace(right=right, note=said + shown(score))

        best, rank = self.right(query)
        said = notes or [self.place(place) for place in range(1, len(found) + 1)]
        items = [item(row, note) for row, note in zip(found, said, strict=True)]
        missed = rank > 1 and (best not in found or len(notes) > 0)
        return Example(self.query(query), items, item(best, self.place(rank)) if missed else None)

    def place(self, rank: int) -> str:
        """Return a rank in words."""
        return f"rank {rank:,} of {len(self.item_image):,}"


@dataclass(frozen=True)
class PageRun:
    """A run on the page: its name there, the run on its split, and the pictures."""

    name: str
    seen: Scored
    pictures: Pictures

    @cached_property
    def ways(self) -> dict[str, Way]:
        """Both directions, by the keys of `DIRECTIONS`."""
        seen, similarity = self.seen, self.seen.similarity
        images, owners = np.arange(len(similarity)), seen.caption_image.numpy()
        left, right = seen.image.elements, seen.text.elements
        return {
            "image_to_text": Way(similarity, images, owners, left, right, self.image, self.caption),
            "text_to_image": Way(similarity.T, owners, images, right, left, self.caption, self.image),
        }

    def picture(self, image: int) -> Picture | None:
        """Return the picture of an image as its feature set saw it; None if it cannot be read."""
        return self.pictures.hold(self.seen.file_names[image], are_upright(self.seen.batches.image_set))

    def first_caption(self, image: int) -> str:
        """Return the first caption of an image; an empty text if it has none."""
        captions = (self.seen.caption_image == image).nonzero()[:, 0]
        return self.seen.texts[int(captions[0])] if len(captions) else ""

    def image(self, row: int) -> Item:
        """Return an image as the page shows it."""
        return Item(self.first_caption(row), self.seen.ids[row], self.picture(row))

    def caption(self, row: int) -> Item:
        """Return a caption as the page shows it."""
        return Item(self.seen.texts[row])


def mixed(way: Way, count: int, seed: int) -> list[int]:
    """Return random queries in turn of those that are answered rightly, nearly (from rank 2 to 10) and wrongly."""
    kinds: tuple[list[int], ...] = [], [], []
    for query in np.random.default_rng(seed).permutation(way.queries)[:SEARCHED].tolist():
        _, rank = way.right(query)
        kinds[0 if rank == 1 else 1 if rank <= NEAR else 2].append(query)
    turns = (query for turn in zip_longest(*kinds) for query in turn if query is not None)
    return list(islice(turns, count))


def gallery(way: Way, queries: Several[int], top: int) -> list[Example]:
    """Return queries with the `top` results by the run's own similarity; ties in the store's order."""
    best = {query: way.similarity[query].sort(descending=True, stable=True).indices[:top].tolist() for query in queries}
    return [way.example(query, rows) for query, rows in best.items()]


def exemplary(run: PageRun, seed: int) -> list[int]:
    """Return an image that is answered rightly and finds many of its own captions, each by an element; none if none."""
    way = run.ways["image_to_text"]
    right = drawn(way.queries[way.hits], SEARCHED, seed)
    nearest_texts = nearest(way.query_elements[right], way.item_elements).tolist()
    pairs = zip(right, nearest_texts, strict=True)
    hits = [len({text for text in texts if way.item_image[text] == row}) for row, texts in pairs]
    return [right[int(np.argmax(hits))]] if right else []


def by_element(way: Way, right: bool, count: int, seed: int) -> list[Example]:
    """Return the best result of each element of `count` random queries whose whole set is right, or wrong."""
    chosen = drawn(way.queries[way.hits == right], count, seed)
    nearest_items = nearest(way.query_elements[chosen], way.item_elements)
    notes = [f"element {k}" for k in range(1, nearest_items.shape[1] + 1)]
    return [way.example(query, rows, notes) for query, rows in zip(chosen, nearest_items.tolist(), strict=True)]


def agreement_table(runs: Several[PageRun]) -> NumberTable:
    """Return how often each run finds what every other one misses, in percent of the queries of both directions."""
    hits = [np.concatenate([way.hits for way in run.ways.values()]) for run in runs]
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


def disagreements(runs: Several[PageRun], direction: str, count: int, seed: int) -> list[Example]:
    """Return a few random queries that some runs answer rightly and others wrongly.

    What is found is the first result of each run, with its name, its score and the rank of the right one.
    """
    ways = {run.name: run.ways[direction] for run in runs}
    right = np.sum([way.hits for way in ways.values()], axis=0)
    examples = []
    for query in drawn(runs[0].ways[direction].queries[(right > 0) & (right < len(runs))], count, seed):
        firsts = [way.example(query, [int(way.found[query])], [name]) for name, way in ways.items()]
        items = [
            item._replace(note=f"{item.note}, the right one at {missed.note}") if missed else item
            for _, (item,), missed in firsts
        ]
        examples.append(Example(firsts[0].query, items))
    return examples


@torch.no_grad()
def nearest(queries: Tensor, items: Tensor) -> Tensor:
    """Return the item nearest to each element of each query, int64 ``[Q, K1]`` on the CPU.

    That is by the cosine of unit elements, ``[Q, K1, D]`` and ``[M, K2, D]``, with the nearest of the item's.
    """
    flat = items.flatten(0, 1).T
    nearest_items = [(query @ flat).unflatten(1, items.shape[:2]).amax(2).argmax(1) for query in queries]
    return torch.stack(nearest_items).cpu() if nearest_items else torch.empty(queries.shape[:2], dtype=torch.int64)


def drawn(rows: np.ndarray, count: int, seed: int) -> list[int]:
    """Return at most `count` of `rows`, drawn with the seed, in ascending order."""
    dice = np.random.default_rng(seed)
    return sorted(dice.choice(rows, min(count, len(rows)), replace=False).tolist())
