"""Where a run looks in an image: its slots (SetDiv, Figures 4, A2 and A3), or a caption's words (SCAN, section 3.1).

SetDiv: *Improving Cross-Modal Retrieval with Set of Diverse Embeddings*. SCAN: Lee et al., *Stacked Cross Attention for
Image-Text Matching*, ECCV 2018.
"""

from collections.abc import Sequence as Several
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...pipeline.reading.joined_sets import JoinedSets, are_upright, parts_of
from ...pipeline.store import ImageSet
from ..evaluation.scoring import Scored
from ..modules.embedding import Sequence
from .examples import PageRun, drawn, nearest
from .pictures import Picture, shade

CELLS = 56  # along each side of the map that attention is drawn on: whole ones for grids of 7 and of 14
OUTLINED = 2  # cells or regions with the largest weights
WORDS = 24  # of a caption that are drawn


class Map(NamedTuple):
    """What is drawn over a picture, where a slot or a word looks: what that shows, and what is written below it."""

    shade: str  # a PNG file in base64
    boxes: list[list[float]]  # x1, y1, x2, y2 of the foremost rows as shares of the picture's width and height
    shows: str
    title: str
    text: str
    right: bool = False  # whether `text` belongs to the image


class Attended(NamedTuple):
    """An image, what it is compared with, and the maps of its slots or of a caption's words."""

    name: str
    title: str
    picture: Picture
    caption: str
    note: str
    maps: list[Map]


class Place(NamedTuple):
    """An image whose local features can be drawn."""

    picture: Picture
    boxes: np.ndarray  # x1, y1, x2, y2 of its N rows as shares of the picture's width and height, [N, 4]

    def lit(self, weights: np.ndarray) -> np.ndarray:
        """Return how far each cell of a map is lit by the `weights` of the rows, and maybe padding: 0 to 1."""
        relative = weights[: len(self.boxes)] / max(weights.max(), 1e-9)
        centres = (np.arange(CELLS) + 0.5) / CELLS
        across = (self.boxes[:, 0, None] <= centres) & (centres <= self.boxes[:, 2, None])
        down = (self.boxes[:, 1, None] <= centres) & (centres <= self.boxes[:, 3, None])
        lit: np.ndarray = (relative[:, None, None] * (down[:, :, None] & across[:, None, :])).max(0)
        return lit

    def map(self, weights: np.ndarray, shows: str, title: str, text: str, right: bool = False) -> Map:
        """Return the map of some weights, which outlines the boxes of the largest ones; other arguments as in `Map`."""
        inside = weights[: len(self.boxes)]
        foremost = [row for row in np.argsort(-inside, kind="stable")[:OUTLINED] if 2 * inside[row] >= inside.max()]
        return Map(shade(self.lit(weights)), self.boxes[foremost].tolist(), shows, title, text, right)


def attention_of_run(run: PageRun, count: int, seed: int, first: Several[int] = ()) -> tuple[str, list[Attended], str]:
    """Return what the attention is, in words, how it looks over `count` images, or why there is none.

    They are `first`, and then random ones.
    """
    seen, compare = run.seen, run.seen.model.compare
    words = compare.attends is not None and seen.ranker.run is not None  # of another model, the words are not known
    images = np.unique(seen.caption_image.numpy())
    chosen = list(dict.fromkeys([*first, *drawn(images, count, seed)]))[:count]
    slots = None if words else slot_attention(seen, chosen)
    if not words and slots is None:
        return "", [], "the run has no attention over local features"
    if reason := _why_no_places(run, chosen):
        return "", [], reason
    places = {row: place for row in chosen if (place := place_of(run, row)) is not None}
    if not places:
        return "", [], "the pictures cannot be read"
    if slots is not None:
        nearest_texts = nearest(seen.image.elements[chosen], seen.text.elements)
        each = zip(chosen, slots, nearest_texts, strict=True)
        what = "Each slot at its last iteration; below it its share of all attention and the caption nearest to it."
        return what, [_slots(run, row, places[row], weights, near) for row, weights, near in each if row in places], ""
    by_word = compare.attends == "t-i"
    who = "Each word attends to the places" if by_word else "Each place attends to the words"
    what = f"{who} (cross-attention): the weights of each add up to 100 %; below a word is the largest that it has."
    return what, [attended for row, place in places.items() for attended in _words(run, row, place, by_word)], ""


@torch.no_grad()
def slot_attention(seen: Scored, images: list[int]) -> Tensor | None:
    """Return the last iteration's attention over the rows of some images, mean of its heads, ``[B, K, N]``, or None."""
    aggregated = seen.model.embed_images(seen.batches.image_source.fetch(np.array(images))())
    return None if aggregated.attention is None else aggregated.attention[-1].float().mean(1).cpu()


@torch.no_grad()
def word_attention(seen: Scored, image: int, caption: int) -> Tensor:
    """Return the cross-attention between the rows of an image and the words of a caption, ``[N, L]``."""
    images, captions = seen.image.embedding, seen.text.embedding
    assert isinstance(images, Sequence) and isinstance(captions, Sequence), "a similarity that attends compares them"
    regions, words = (Sequence(*(t[[row]] for t in side)) for row, side in ((image, images), (caption, captions)))
    return seen.model.compare.attention(regions, words)[0, 0][: int(regions.length), : int(words.length)].cpu()


def words_of(seen: Scored, caption: int) -> list[str]:
    """Return the words of a caption as the run reads them, with its ends; tokens of a language model are numbered."""
    row, labels = seen.batches.caption_rows[[caption]], list[str]()
    for features, adapter in zip(parts_of(seen.batches.caption_set), seen.model.text.adapters, strict=True):
        if features.vocabulary is None:
            labels += [f"token {number + 1}" for number in range(int(features.length[row][0]))]
            continue
        words = [features.vocabulary[number] if number else "(unknown word)" for number in features.token(row).tolist()]
        labels += ["<start>", *words, "<end>"] if adapter.ends else words
    return labels


def place_of(run: PageRun, image: int) -> Place | None:
    """Return where the rows of an image lie; None if its picture cannot be read."""
    features, row = run.seen.batches.image_set, run.seen.batches.image_rows[[image]]
    assert not isinstance(features, JoinedSets), "_why_no_places says so"
    picture = run.picture(image)
    if picture is None:
        return None
    if features.grid is not None:
        boxes = grid_boxes(*features.cells, features.identity["pool"]) if features.cells else grid_boxes(*features.grid)
        corner, size = window_of(features, picture.size)
        return Place(picture, np.tile(corner, 2) + boxes * np.tile(size, 2))
    boxes, size = features.array("boxes", row)[0], features.array("size", row)[0]
    if (picture.size[0] - picture.size[1]) * (int(size[0]) - int(size[1])) < 0:  # imports do not say how they turned it
        picture = run.pictures.hold(run.seen.file_names[image], not are_upright(features)) or picture
    return Place(picture, boxes[: int(features.length[row][0])] / np.tile(size, 2))


def window_of(features: ImageSet, size: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the part of an image that a grid's network sees: its corner and size as shares of width and height.

    That is the middle of its shorter side, or of the image stretched to a square, or padded to one, whose edges lie
    outside; all, where that is not known.
    """
    preprocessing, share = features.identity.get("preprocessing"), np.ones(2)
    if isinstance(preprocessing, dict) and "stretch" in preprocessing:
        share *= preprocessing.get("crop", preprocessing["stretch"]) / preprocessing["stretch"]
    elif isinstance(preprocessing, dict) and "resize" in preprocessing:
        for cut, side in (("crop", min(size)), ("pad", max(size))):
            if cut in preprocessing:
                share *= preprocessing[cut] / preprocessing["resize"] * side / np.array(size)
    return (1 - share) / 2, share


def grid_boxes(height: int, width: int, pool: Several[int] = (1, 1)) -> np.ndarray:
    """Return the boxes of windows of `pool` cells in a grid, row by row, [N, 4]; at the edges they are cut off."""
    down, across = (range(0, side, step) for side, step in zip((height, width), pool, strict=True))
    first = np.array([[x, y] for y in down for x in across])
    last = np.minimum(first + np.array(pool[::-1]), [width, height])
    return np.concatenate([first, last], axis=1) / [width, height, width, height]


def _why_no_places(run: PageRun, images: list[int]) -> str:
    features, rows = run.seen.batches.image_set, run.seen.batches.image_rows[images]
    if run.pictures.why_not:
        return "there are no pictures"
    if isinstance(features, JoinedSets):
        return "its rows are those of several feature sets, which do not share one division of the picture"
    placed = features.grid or ("boxes" in features.array_names and features.array("size", rows).all())
    return "" if placed and features.kind != "frames" else "the store does not know where its rows lie in a picture"


def _slots(run: PageRun, row: int, place: Place, attention: Tensor, nearest_texts: Tensor) -> Attended:
    """Draw one image; `attention` is ``[K, N]``, `found` the caption nearest to each of K elements."""
    seen, name = run.seen, run.seen.ids[row]
    shares = 100 * attention.sum(1) / attention.sum().clamp(min=1e-9)
    maps = []
    for k, (weights, share, text) in enumerate(zip(attention, shares.tolist(), nearest_texts.tolist(), strict=True), 1):
        right, shows = int(seen.caption_image[text]) == row, f"Attention of slot {k} over image {name}"
        maps.append(place.map(weights.numpy(), shows, f"slot {k}, {share:.0f} %", seen.texts[text], right))
    way = run.ways["image_to_text"]
    best, rank = way.right(row)
    return Attended(name, "slots", place.picture, seen.texts[best], f" (its closest caption, {way.place(rank)})", maps)


def _words(run: PageRun, image: int, place: Place, by_word: bool) -> list[Attended]:
    """Draw one image with the closest of its own captions, and with the one found first if that is another's."""
    way, seen, name = run.ways["image_to_text"], run.seen, run.seen.ids[image]
    closest, rank = way.right(image)
    pairs = [(closest, f"the closest of its own captions, rank {rank:,}")]
    if rank > 1:
        pairs.append((int(way.found[image]), "the caption that is found first, of another image"))
    attended = []
    for caption, title in pairs:
        weights, words = word_attention(seen, image, caption), words_of(seen, caption)
        even, score = 100 / weights.shape[0 if by_word else 1], float(seen.similarity[image, caption])
        note = f" (similarity {score:.2f}; spread evenly, each weight would be {even:.1f} %)"
        note += f", {len(words) - WORDS} more words are not shown" if len(words) > WORDS else ""
        maps = [
            place.map(over.numpy(), f"Attention of '{word}' over image {name}", word, f"{100 * over.max():.1f} %")
            for word, over in zip(words[:WORDS], weights.T[:WORDS], strict=True)
        ]
        attended.append(Attended(name, title, place.picture, seen.texts[caption], note, maps))
    return attended
