"""Where a run looks in an image: its slots (SetDiv, Figures 4, A2 and A3), or a caption's words (SCAN, section 3.1).

SetDiv: *Improving Cross-Modal Retrieval with Set of Diverse Embeddings*. SCAN: Lee et al., *Stacked Cross Attention for
Image-Text Matching*, ECCV 2018.
"""

from collections.abc import Sequence as Several
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...pipeline.reading.joined_sets import JoinedSets, parts_of
from ..evaluation.scoring import Embedded
from ..modules.embedding import Sequence
from ..modules.similarity import CrossAttention
from .examples import PageRun, described, drawn, nearest
from .pictures import Picture, input_of

CELLS = 36  # along each side of the map that regions are drawn on
OUTLINED = 2  # cells or regions with the largest weights
WORDS = 24  # of a caption that are drawn


@dataclass(frozen=True)
class Place:
    """An image whose local features can be drawn.

    Attributes:
        picture: the image, a grid's as its network saw it.
        boxes: x1, y1, x2, y2 of its N rows as shares of the picture's width and height, [N, 4].
        cells: height and width of the map that attention is drawn on.
    """

    picture: Picture
    boxes: np.ndarray
    cells: tuple[int, int]

    def drawn(self, weights: np.ndarray, alt: str) -> str:
        """Return the picture as SVG, coloured where its rows have large weights; the foremost boxes are outlined.

        Args:
            weights: of each row; what comes after them is padding.
            alt: what it shows.
        """
        relative = weights[: len(self.boxes)] / max(weights.max(), 1e-9)
        y, x = ((np.arange(count) + 0.5) / count for count in self.cells)
        across = (self.boxes[:, 0, None] <= x) & (x <= self.boxes[:, 2, None])
        down = (self.boxes[:, 1, None] <= y) & (y <= self.boxes[:, 3, None])
        lit = relative[:, None, None] * (down[:, :, None] & across[:, None, :])
        foremost = self.boxes[np.argsort(-relative, kind="stable")[:OUTLINED]].tolist()
        return self.picture.svg(alt, self.picture.heated(lit.max(0)) + "".join(map(self.picture.outlined, foremost)))


@dataclass(frozen=True)
class Map:
    """Attention of a slot or a word over an image, as SVG, with what is written below it."""

    svg: str
    title: str
    text: str
    right: bool = False  # whether `text` belongs to the image


@dataclass(frozen=True)
class Attended:
    """An image, what it is compared with, and the maps of its slots or of a caption's words."""

    title: str
    picture: str
    text: str
    maps: list[Map]


def attention_of_run(run: PageRun, count: int, seed: int) -> tuple[str, list[Attended], str]:
    """Return the attention over `count` random images.

    Returns:
        What it is, for the page; the images; and a sentence why there are none.
    """
    words = isinstance(run.seen.model.compare, CrossAttention)
    images = np.unique(run.seen.scores.caption_image.numpy()) if words else np.arange(len(run.seen.scores.ids))
    chosen = drawn(images, count, seed)
    slots = None if words else slot_attention(run.seen, chosen)
    if not words and slots is None:
        return "", [], "the run has no attention over local features"
    if reason := _why_no_places(run, chosen):
        return "", [], reason
    places = {row: place for row in chosen if (place := place_of(run, row)) is not None}
    if not places:
        return "", [], "the pictures cannot be read"
    if slots is not None:
        found = nearest(run.seen.image.elements[chosen], run.seen.text.elements)
        each = zip(chosen, slots, found, strict=True)
        what = "Each slot at its last iteration; below it its share of all attention and the caption nearest to it."
        return what, [_slots(run, row, places[row], weights, near) for row, weights, near in each if row in places], ""
    who = "Each word attends to the places" if _by_word(run.seen) else "Each place attends to the words"
    what = f"{who} (cross-attention): the weights of each add up to 100 %; below a word is the largest that it has."
    return what, [one for row, place in places.items() for one in _words(run, row, place)], ""


@torch.no_grad()
def slot_attention(seen: Embedded, images: list[int]) -> Tensor | None:
    """Return the last iteration's attention over the rows of some images, mean of its heads, ``[B, K, N]``, or None."""
    made = seen.model.embed_images(seen.batches.image_source.fetch(np.array(images))())
    return None if made.attention is None else made.attention[-1].float().mean(1).cpu()


@torch.no_grad()
def word_attention(seen: Embedded, image: int, caption: int) -> Tensor:
    """Return the cross-attention between the rows of an image and the words of a caption, ``[N, L]``."""
    images, captions, compare = seen.image.embedding, seen.text.embedding, seen.model.compare
    assert isinstance(images, Sequence) and isinstance(captions, Sequence) and isinstance(compare, CrossAttention)
    one, other = (Sequence(*(t[[row]] for t in side)) for row, side in ((image, images), (caption, captions)))
    return compare.weights(one, other)[0, 0][: int(one.length), : int(other.length)].cpu()


def words_of(seen: Embedded, caption: int) -> list[str]:
    """Return the words of a caption as the run reads them, with its ends; tokens of a language model are numbered."""
    row, labels = seen.batches.caption_rows[[caption]], list[str]()
    for features in parts_of(seen.batches.caption_set):
        if features.vocabulary is None:
            labels += [f"token {number + 1}" for number in range(int(features.length[row][0]))]
            continue
        words = [features.vocabulary[number] if number else "(unknown word)" for number in features.token(row).tolist()]
        labels += ["<start>", *words, "<end>"] if seen.run.recipe.adapter["words"]["ends"] else words
    return labels


def place_of(run: PageRun, image: int) -> Place | None:
    """Return where the rows of an image lie; None if its picture cannot be read."""
    features, row = run.seen.batches.image_set, run.seen.batches.image_rows[[image]]
    assert not isinstance(features, JoinedSets), "_why_no_places says so"
    name = run.seen.scores.file_names[image]
    picture = run.pictures.hold(name, input_of(features))
    if picture is None:
        return None
    if features.grid is not None:
        if features.cells is None:
            return Place(picture, grid_boxes(*features.grid), features.grid)
        return Place(picture, grid_boxes(*features.cells, features.identity["pool"]), features.cells)
    boxes, size = features.array("boxes", row)[0], features.array("size", row)[0]
    if (picture.size[0] - picture.size[1]) * (int(size[0]) - int(size[1])) < 0:  # imports do not say how they turned it
        picture = run.pictures.seen(not run.pictures.upright).hold(name) or picture
    return Place(picture, boxes[: int(features.length[row][0])] / np.tile(size, 2), (CELLS, CELLS))


def grid_boxes(height: int, width: int, pool: Several[int] = (1, 1)) -> np.ndarray:
    """Return the boxes of windows of `pool` cells in a grid, row by row, [N, 4]; at the edges they are cut off."""
    down, across = (range(0, side, step) for side, step in zip((height, width), pool, strict=True))
    first = np.array([[x, y] for y in down for x in across])
    last = np.minimum(first + np.array(pool[::-1]), [width, height])
    return np.concatenate([first, last], axis=1) / [width, height, width, height]


def _why_no_places(run: PageRun, images: list[int]) -> str:
    """Return why attention over these images cannot be drawn; empty if it can."""
    features = run.seen.batches.image_set
    if run.pictures.why_not:
        return "there are no pictures"
    if isinstance(features, JoinedSets):
        return "its rows are those of several feature sets, which do not share one division of the picture"
    if features.kind == "frames":
        return "its rows are frames of a video, not places of a picture"
    if features.kind == "roi" and "boxes" not in features.array_names:
        return "the store does not know where its regions are"
    if features.kind == "roi" and not features.array("size", run.seen.batches.image_rows[images]).all():
        return "the store does not know how large the pictures of its regions are"
    if features.kind == "grid" and features.grid is None:
        return f"the store does not know how its grid of {features.rows} cells lies"
    return ""


def _slots(run: PageRun, row: int, place: Place, attention: Tensor, found: Tensor) -> Attended:
    """Draw one image; `attention` is ``[K, N]``, `found` the caption nearest to each of K elements."""
    scores, caption = run.seen.scores, run.first_caption(row)
    name = scores.ids[row]
    shares = 100 * attention.sum(1) / attention.sum().clamp(min=1e-9)
    maps = [
        Map(
            place.drawn(weights.numpy(), f"Attention of slot {k} over image {name}"),
            f"slot {k}, {share:.0f} %",
            scores.texts[text],
            int(scores.caption_image[text]) == row,
        )
        for k, (weights, share, text) in enumerate(
            zip(attention, shares.tolist(), found.tolist(), strict=True), 1
        )
    ]  # fmt: skip
    return Attended(f"Image {name}: slots", place.picture.svg(described(name, caption)), caption, maps)


def _words(run: PageRun, image: int, place: Place) -> list[Attended]:
    """Draw one image with the closest of its own captions, and with the one found first if that is another's."""
    way, scores = run.ways["image_to_text"], run.seen.scores
    closest, rank = way.right(image)
    pairs = [(closest, f"the closest of its own captions, rank {rank:,}")]
    if rank > 1:
        pairs.append((int(way.found[image]), "the caption that is found first, of another image"))
    name, shown = scores.ids[image], []
    for caption, title in pairs:
        weights, text, words = (
            word_attention(run.seen, image, caption),
            scores.texts[caption],
            words_of(run.seen, caption),
        )
        maps = [
            Map(
                place.drawn(over.numpy(), f"Attention of '{word}' over image {name}"), word, f"{100 * over.max():.1f} %"
            )
            for word, over in zip(words[:WORDS], weights.T[:WORDS], strict=True)
        ]
        even = 100 / weights.shape[0 if _by_word(run.seen) else 1]
        score = float(scores.similarity[image, caption])
        said = f"{text} (similarity {score:.2f}; spread evenly, each weight would be {even:.1f} %)"
        if len(words) > WORDS:
            said += f", {len(words) - WORDS} more words are not shown"
        shown.append(Attended(f"Image {name}: {title}", place.picture.svg(described(name, text)), said, maps))
    return shown


def _by_word(seen: Embedded) -> bool:
    """Return whether words attend to places, not places to words."""
    return isinstance(seen.model.compare, CrossAttention) and seen.model.compare.direction == "t-i"
