"""The rows of the papers' tables that numbers are compared with: the data set and protocol of each."""

from typing import NamedTuple


class Row(NamedTuple):
    """A row, or column, that papers print."""

    title: str
    dataset: str  # a manifest's name
    protocol: str
    images: int | None = None  # of the test split; None where no recipe expects a value of it


ROWS = {  # by the name that recipes and grids have for it
    "coco_1k": Row("COCO 1K", "coco", "1k-folds", 5000),
    "coco_5k": Row("COCO 5K", "coco", "full", 5000),
    "f30k": Row("F30K", "flickr30k", "full", 1000),
    "msrvtt": Row("MSR-VTT", "msrvtt", "full"),
    "vatex": Row("VATEX", "vatex", "full"),
}


def row_of(dataset: str, protocol: str) -> str | None:
    """Return the name of the row that a data set's table under a protocol belongs to, or None."""
    return next((name for name, row in ROWS.items() if (row.dataset, row.protocol) == (dataset, protocol)), None)
