"""Crops A, B and C of a few images: how uncertain a run is of each, and what it chooses between.

Source: *Uncertainty-based Cross-Modal Retrieval with Probabilistic Representations*, section 4.6 and Figure 3.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..diagnostics.crops import Crop, Crops, Example, pixels
from ..figures import number
from ..pictures import Pictures, box_outline

CHOICES = {100.0: "✓ right", 0.0: "✗ wrong", 50.0: "= tied"}  # accuracy of one triplet, by how ties are counted


@dataclass(frozen=True)
class Triplet:
    """An image with its crops.

    Attributes:
        title: which triplets it stands for.
        picture: the whole image as SVG, with the boxes; None where it cannot be shown.
        crops: by letter, as SVG; None likewise.
        phrases: of A, B and C.
        rows: name and values, of A, B and C, of what is known of them.
    """

    title: str
    picture: str | None
    crops: dict[str, str | None]
    phrases: list[str]
    rows: list[tuple[str, list[str]]]


def triplets(found: Crops, pictures: Pictures) -> list[Triplet]:
    """Return the example of every other threshold."""
    return [_triplet(one.area, one.example, pictures) for one in found.thresholds[::2]]


def together(runs: Mapping[str, list[Triplet]]) -> list[Triplet]:
    """Return the triplets of several runs, those of the same crops as one with the rows of each."""
    found: dict[tuple[str | None, ...], Triplet] = {}
    for run, own in runs.items():
        for one in own:
            whole = found.setdefault((one.title, one.picture, *one.phrases), replace(one, rows=[]))
            whole.rows.extend((f"{run}: {what}" if len(runs) > 1 else what, values) for what, values in one.rows)
    return list(found.values())


def _triplet(area: float, example: Example, pictures: Pictures) -> Triplet:
    crops = {"A": example.A, "B": example.B, "C": example.C}
    known = [one.uncertainty for one in crops.values() if one.uncertainty]
    sides = (("image", "uncertainty of the crop"), ("text", "uncertainty of the caption")) if known else ()
    rows = [(title, [number(one[side]) for one in known]) for side, title in sides]
    for title, accuracy in (
        ("the crop's choice", example.accuracy.image_to_text),
        ("the caption's choice", example.accuracy.text_to_image),
    ):
        rows.append((title, [CHOICES[accuracy[letter]] if letter in accuracy else "–" for letter in crops]))
    return Triplet(
        f"A and B below {100 * area:.0f} % of the image",
        _whole(example, crops, pictures),
        {letter: _crop(letter, crop, example.file_name, pictures) for letter, crop in crops.items()},
        [one.phrase for one in crops.values()],
        rows,
    )


def _whole(example: Example, crops: dict[str, Crop], pictures: Pictures) -> str | None:
    whole = pictures.hold(example.file_name)
    if whole is None:
        return None
    boxes = []
    for letter, crop in crops.items():
        shares = [at / side for at, side in zip(crop.box, example.size * 2, strict=True)]
        boxes.append(box_outline(shares, whole, f"outline crop-{letter}"))
    return whole.svg(f"Image {example.file_name} with the boxes of its crops A, B and C", "".join(boxes))


def _crop(letter: str, crop: Crop, file_name: str, pictures: Pictures) -> str | None:
    picture = pictures.hold(file_name, pixels(crop.box))
    return None if picture is None else picture.svg(f"Crop {letter} of image {file_name}: {crop.phrase}")
