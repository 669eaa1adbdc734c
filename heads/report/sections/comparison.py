"""Several runs on the same queries: where they agree, and where one finds what another misses."""

from collections.abc import Sequence as Several
from dataclasses import replace

import numpy as np

from ..figures import Table, number
from ..pictures import Pictures
from ..views import View
from .examples import Direction, Example, Item, drawn, image_item
from .tables import WAYS

EXAMPLES = 3  # queries of each direction that the runs disagree on


def agreement_table(views: Several[View]) -> Table:
    """Return how often each run finds what every other one misses, in percent of the queries of both directions."""
    hits = [np.concatenate([_hits(view, way) for way in WAYS]) for view in views]
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

    What is found is the first result of each run, with the run's name as its note.
    """
    hits = np.stack([_hits(view, direction) for view in views])
    asked = (
        np.unique(views[0].embedded.caption_image.numpy()) if direction == "image_to_text" else np.arange(len(hits[0]))
    )
    split = np.flatnonzero(hits.any(0) & ~hits.all(0))
    first, texts = views[0], views[0].embedded.texts
    shown = []
    for place in drawn(split, EXAMPLES, seed):
        row = int(asked[place])
        if direction == "image_to_text":
            query = image_item(first, pictures, row)
            found = [Item(texts[int(view.found_captions[row])]) for view in views]
        else:
            query = Item(texts[row])
            found = [image_item(first, pictures, int(view.found_images[row])) for view in views]
        marked = [
            replace(item, right=bool(right), note=view.name)
            for item, right, view in zip(found, hits[:, place], views, strict=True)
        ]
        shown.append(Example(query, marked))
    return shown


def _hits(view: View, direction: str) -> np.ndarray:
    """Return whether the first result is right, of every query; images without a caption ask nothing."""
    if direction == "text_to_image":
        return view.caption_hits.numpy()
    return view.image_hits.numpy()[np.unique(view.embedded.caption_image.numpy())]
