"""Crops A, B and C of a few images: how uncertain a run is of each, and what it chooses between.

Source: *Uncertainty-based Cross-Modal Retrieval with Probabilistic Representations*, section 4.6 and Figure 3.
"""

from dataclasses import dataclass
from typing import Any

from ..diagnostics.crops import pixels
from ..figures import number
from ..pictures import Pictures, box_outline

CHOICES = {100.0: "✓ right", 0.0: "✗ wrong", 50.0: "= tied"}  # accuracy of one triplet, by how ties are counted
SIDES = {"image": "uncertainty of the crop", "text": "uncertainty of the caption"}
WAYS = {"image_to_text": "the crop's choice", "text_to_image": "the caption's choice"}


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


def triplets(found: dict[str, Any], pictures: Pictures) -> list[Triplet]:
    """Return the example of each threshold; `found` is what `diagnostics.crops.crops` gives."""
    return [_triplet(one["area"], one["example"], pictures) for one in found["thresholds"]]


def _triplet(area: float, example: dict[str, Any], pictures: Pictures) -> Triplet:
    regions = {letter: example[letter] for letter in "ABC"}
    rows = []
    if regions["A"]["uncertainty"]:
        rows += [(title, [number(one["uncertainty"][side]) for one in regions.values()])
                 for side, title in SIDES.items()]  # fmt: skip
    rows += [(title, [CHOICES.get(example["accuracy"][way].get(letter), "–") for letter in regions])
             for way, title in WAYS.items()]  # fmt: skip
    return Triplet(
        f"A and B below {100 * area:.0f} % of the image",
        _whole(example, pictures),
        {letter: _crop(letter, example, pictures) for letter in regions},
        [one["phrase"] for one in regions.values()],
        rows,
    )


def _whole(example: dict[str, Any], pictures: Pictures) -> str | None:
    name, size = example["file_name"], example["size"] * 2
    whole = pictures.hold(name)
    if whole is None:
        return None
    shares = {letter: [at / side for at, side in zip(example[letter]["box"], size, strict=True)] for letter in "ABC"}
    boxes = [box_outline(box, whole, f"outline crop-{letter}") for letter, box in shares.items()]
    return whole.svg(f"Image {name} with the boxes of its crops A, B and C", "".join(boxes))


def _crop(letter: str, example: dict[str, Any], pictures: Pictures) -> str | None:
    name, region = example["file_name"], example[letter]
    picture = pictures.crop(name, pixels(region["box"]))
    return None if picture is None else picture.svg(f"Crop {letter} of image {name}: {region['phrase']}")
