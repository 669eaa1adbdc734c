"""Regions that a data set's caption file describes, and triplets of crops of different ambiguity made of them.

Source: *Uncertainty-based Cross-Modal Retrieval with Probabilistic Representations*, section 4.6 and Figure 3. Of a
Karpathy JSON an image may carry ``regions: [{bbox: [x, y, width, height], phrase}]`` in pixels, as those of Visual
Genome do and those of the generated scenes.
"""

import posixpath
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ...pipeline.data.manifest import bundled_manifests, load_manifest
from ...pipeline.documents import read_json
from ...pipeline.errors import CacheError
from ...pipeline.reading.reattachment import manifest_in

LARGEST = 10  # regions of an image that are looked at
THINNEST = 50  # longer side of a box over its shorter one: encoders refuse what is far thinner

Box = tuple[float, float, float, float]  # left, top, right, bottom in pixels


class Region(NamedTuple):
    """A described part of an image: its box, inside the image, and what is there."""

    box: Box
    phrase: str


class Triplet(NamedTuple):
    """Two regions, A and B, and the box around both, C, which shows more and is more ambiguous."""

    a: Region
    b: Region
    c: Region


def regions_in(dataset: str, data_root: Path) -> dict[str, list[Any]]:
    """Return the ``regions`` of the images of a data set that have some, by file name below the image folder.

    Args:
        dataset: its name; a bundled one's paths start from `data_root`.
        data_root: of others, the folder that holds the manifest, or the folder of images next to it.

    Raises:
        CacheError: the manifest is missing, or its caption file has no regions.
        ManifestError: a bundled data set is not below `data_root`.
    """
    manifest = load_manifest(dataset, data_root) if dataset in bundled_manifests() else manifest_in(data_root, dataset)
    if manifest is None or manifest.captions is None:
        raise CacheError(f"there is no manifest of '{dataset}' with a caption file in {data_root}: check --data-root")
    return read_regions(manifest.captions)


def read_regions(captions: Path) -> dict[str, list[Any]]:
    """Return the regions that a caption file has; CacheError if it is no Karpathy JSON, or has none."""
    try:
        images = read_json(captions)["images"] if captions.suffix == ".json" else []
        found = {
            posixpath.normpath(posixpath.join(image.get("filepath", ""), image["filename"])): list(image["regions"])
            for image in images
            if image.get("regions")
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CacheError(f"{captions} is no Karpathy JSON with regions ({error!r})") from error
    if not found:
        raise CacheError(f"no image in {captions} has regions to crop; take a data set with regions, such as scenes")
    return found


def regions_of(listed: Sequence[Any], size: tuple[int, int]) -> list[Region]:
    """Return the usable ones of an image's ``regions``, cut off at its edges.

    Those without a phrase, without a pixel or too thin are left out.

    Args:
        listed: as the file has them.
        size: width and height of the image in pixels.

    Raises:
        CacheError: one has no ``bbox`` of four numbers, or a phrase that is no text.
    """
    regions = []
    for entry in listed:
        try:
            x, y, width, height = (float(number) for number in entry["bbox"])
            phrase = (entry.get("phrase") or "").strip()
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CacheError(
                f"a region is {entry!r}, but must have 'bbox': [x, y, width, height] in pixels and a text as 'phrase'"
            ) from error
        box = max(x, 0.0), max(y, 0.0), min(x + width, float(size[0])), min(y + height, float(size[1]))
        shorter, longer = sorted([box[2] - box[0], box[3] - box[1]])
        if phrase and shorter >= 1 and longer <= THINNEST * shorter:
            regions.append(Region(box, phrase))
    return regions


def triplet(regions: Sequence[Region], size: tuple[int, int], threshold: float) -> Triplet | None:
    """Return the triplet of an image (section 4.6), or None if fewer than two regions are small enough.

    A is the largest of the ten largest regions below the threshold; B, of the others, overlaps least with A by
    intersection over union, and is the largest of those that overlap as little; C is the box around both.

    Args:
        regions: of the image.
        size: its width and height in pixels.
        threshold: the share of the image's area that A and B stay below.
    """
    below = [region for region in regions if area(region.box) < threshold * size[0] * size[1]]
    largest = sorted(below, key=lambda region: -area(region.box))[:LARGEST]
    if len(largest) < 2:
        return None
    a, *others = largest
    b = min(others, key=lambda other: overlap(a.box, other.box))
    (left, top, right, bottom), other = a.box, b.box
    around = min(left, other[0]), min(top, other[1]), max(right, other[2]), max(bottom, other[3])
    return Triplet(a, b, Region(around, f"{a.phrase} and {b.phrase}"))


def area(box: Box) -> float:
    """Return the area of a box; 0 where its edges have crossed."""
    return max(0.0, box[2] - box[0]) * max(0.0, box[3] - box[1])


def overlap(one: Box, other: Box) -> float:
    """Return the intersection over union of two boxes."""
    (left, top, right, bottom) = one
    common = area((max(left, other[0]), max(top, other[1]), min(right, other[2]), min(bottom, other[3])))
    return common / (area(one) + area(other) - common)
