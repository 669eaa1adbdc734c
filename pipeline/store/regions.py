"""The local rows of one image where their number varies: regions, or the frames of a video."""

from dataclasses import dataclass

import numpy as np

# What a set may hold besides its features, one row per region: shape of a row, dtype, and fill.
REGION_ARRAYS: dict[str, tuple[tuple[int, ...], str, float]] = {
    "boxes": ((4,), "float32", np.nan),
    "classes": ((), "int32", -1),
    "scores": ((), "float32", np.nan),
}


@dataclass(frozen=True)
class Regions:
    """The features of one image."""

    local: np.ndarray  # floating point [n,C]
    boxes: np.ndarray | None = None  # [n,4], x1, y1, x2, y2 in pixels
    classes: np.ndarray | None = None  # the detector's own numbers, whole, [n]
    scores: np.ndarray | None = None  # the detector's confidence [n]
    size: tuple[int, int] = (0, 0)  # width and height of the picture in pixels; zeros where they are not known


def lay_out(arrays: dict[str, np.ndarray], row: int, regions: Regions) -> None:
    """Put the features of one image into a row of ``local``, ``global``, ``length`` and what else `arrays` have.

    Zeros follow its regions, so that only numbers ever reach training. Its global feature is the mean of its regions.
    """
    count = len(regions.local)
    for key in ("local", *(name for name in REGION_ARRAYS if name in arrays)):
        arrays[key][row, :count] = getattr(regions, key)
        arrays[key][row, count:] = -1 if key == "classes" else 0
    arrays["global"][row] = regions.local.mean(axis=0, dtype=np.float64)
    arrays["length"][row] = count
