"""Uncertainty against ambiguity, and the binary selection task, on crops of images.

Source: *Uncertainty-based Cross-Modal Retrieval with Probabilistic Representations*, section 4.6: Figure 3 (triplets of
regions), Figure 2 (mean uncertainty of crops and captions A and C) and Table 4 (binary selection, which point
embeddings can do too). In a Karpathy JSON an image may have ``regions: [{bbox: [x, y, width, height], phrase}]`` in
pixels, as the generated scenes have. The paper's are Visual Genome's, whose own files are read as well.
"""

import itertools
import json
import logging
import math
import posixpath
from collections.abc import Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.ops import box_area, box_iou
from tqdm import tqdm

from ...pipeline.data.images import open_image
from ...pipeline.data.manifest import bundled_manifests, load_manifest
from ...pipeline.data.sources import FolderReader, PictureReader
from ...pipeline.documents import json_items
from ...pipeline.errors import CacheError, SampleError
from ...pipeline.progress import hidden
from ...pipeline.reading.joined_sets import are_upright
from ...pipeline.reading.pictures import find_pictures, manifests_in, unreadable
from ...pipeline.wording import counted
from ..evaluation.metrics import Ties
from ..evaluation.number_table import NumberTable, Rows
from ..evaluation.scoring import Scored, Side, embed_side
from ..modules.embedding import Embedding, each
from ..runs.encoders import encode_captions_by_all, encode_images_by_all

THRESHOLDS = (0.1, 0.2, 0.3, 0.4, 0.5)  # Figure 2: the share of the image that A and B stay below
LARGEST = 10  # regions of an image that are looked at
THINNEST = 50  # longer side of a box over its shorter one: encoders refuse what is far thinner
IMAGES = 2000  # that triplets are made of; drawn at random from more
PART = 256  # crops that are held decoded

log = logging.getLogger("xret")
Box = tuple[float, float, float, float]  # left, top, right, bottom in pixels


class Region(NamedTuple):
    """A described part of an image: its box, inside the image, and what is there."""

    box: Box
    phrase: str


class Described(NamedTuple):
    """An image with regions as its file has them, and its width and height as far as the file says."""

    regions: list[Any]
    size: tuple[int, int] | None = None


class Found(NamedTuple):
    """A region A of an image, and C, the box around A and another one, which shows more and is more ambiguous."""

    threshold: float
    file_name: str
    a: Region
    c: Region


def crop_tables(
    seen: Scored, data_root: Path | None, ties: Ties, visual_genome: Path | None = None
) -> dict[str, NumberTable]:
    """Embed crops and captions A and C of triplets, and compare the ones with the others.

    They are cut out of the split's images that have regions, or out of Visual Genome's in a folder, whatever the run
    was trained on. A tie is a failure (``pessimistic``), a success (``optimistic``), or half of one (``mean``).

    Returns:
        ``crops``, a row a threshold with the accuracies of binary selection, and with Gaussians ``uncertainty of
        crops``, their means.

    Raises:
        CacheError: the pictures or regions are missing, or no image has two regions that are small enough.
        SampleError: an image cannot be read.
    """
    described, pictures = _described(seen, data_root, visual_genome)
    names = sorted(described)
    device = str(seen.ranker.device)
    if len(names) > IMAGES:
        names = np.random.default_rng(0).choice(names, IMAGES, replace=False).tolist()
    image_encoders, text_encoders = seen.ranker.encoders("image"), seen.ranker.encoders("text")
    upright = are_upright(seen.batches.image_set)
    triplets = _triplets({name: described[name] for name in names}, pictures, upright)
    if not triplets:
        raise CacheError(
            f"none of the {len(names):,} images that have regions has two of at most {max(THRESHOLDS):.0%} of its area;"
            " take another --split or data set"
        )
    parts = sorted({(case.file_name, part) for case in triplets for part in (case.a, case.c)})
    crops = iter(tqdm(cut(pictures, upright, parts), "crops", len(parts), unit=" crops", disable=hidden()))
    some_crops = iter(lambda: list(itertools.islice(crops, PART)), [])
    encoded = (features for some in some_crops for features in encode_images_by_all(image_encoders, device, some))
    images = embed_side(seen.model.embed_images, encoded)
    texts = encode_captions_by_all(text_encoders, device, [region.phrase for _, region in parts])
    captions = embed_side(seen.model.embed_captions, texts)
    at = {part: row for row, part in enumerate(parts)}
    rows = [[at[case.file_name, part] for part in (case.a, case.c)] for case in triplets]
    return _tables(seen, triplets, images, captions, rows, ties)


def _described(
    seen: Scored, data_root: Path | None, visual_genome: Path | None
) -> tuple[dict[str, Described], PictureReader]:
    """Return the regions of images by file name, and what reads the images."""
    if visual_genome is not None:
        return read_visual_genome(visual_genome)
    if data_root is None:
        raise CacheError(
            "crops are cut out of the images; name their folder with --data-root DIR, or Visual Genome's with"
            " --visual-genome DIR"
        )
    cache, inside = seen.ranker.cache, set(seen.file_names)
    regions = regions_in(cache.dataset, data_root).items()
    return {name: Described(some) for name, some in regions if name in inside}, find_pictures(cache, data_root)


def _triplets(described: dict[str, Described], pictures: PictureReader, upright: bool) -> list[Found]:
    """Return the triplets of images, and warn of those whose boxes are of another picture."""
    cases, odd = [], []
    for name, (regions, size_there) in described.items():
        size = read_picture(pictures, name, upright).size
        if size_there not in (None, size):
            odd.append(name)  # or it lies on a side
            continue
        usable = regions_of(regions, size)
        triplets = ((threshold, triplet(usable, size, threshold)) for threshold in THRESHOLDS)
        cases += [Found(threshold, name, abc[0], abc[2]) for threshold, abc in triplets if abc is not None]
    if odd:
        what = counted(len(odd), "image")
        log.warning("%s left out, whose size is not the one that their boxes are for: %s", what, odd[0])
    return cases


def read_visual_genome(folder: Path) -> tuple[dict[str, Described], PictureReader]:
    """Return Visual Genome's images that have regions, by file name below a folder, and what opens them.

    The folder has ``region_descriptions.json``, ``image_data.json`` and the pictures as their zips hold them, in
    ``VG_100K`` and ``VG_100K_2``; an image's URL says in which. CacheError where a file is missing or is another.
    """

    def region(entry: dict[str, Any]) -> Any:
        if "phrase" not in entry:
            return entry
        return {"bbox": [entry[key] for key in ("x", "y", "width", "height")], "phrase": entry["phrase"]}

    try:
        images, entries = (
            json.loads((folder / name).read_bytes(), object_hook=region)
            for name in ("image_data.json", "region_descriptions.json")
        )
        image_of = {image["image_id"]: image for image in images}
        described = {}
        for entry in entries:
            image = image_of[entry["id"] if "id" in entry else entry["image_id"]]
            if entry["regions"]:
                name = "/".join(image["url"].split("/")[-2:])
                described[name] = Described(entry["regions"], (image["width"], image["height"]))
    except OSError as error:
        raise CacheError(
            f"{error.filename} cannot be read ({error.strerror}); --visual-genome is the folder of Visual Genome's"
            " image_data.json, region_descriptions.json, VG_100K and VG_100K_2"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CacheError(
            f"{folder} does not hold image_data.json and region_descriptions.json of Visual Genome"
        ) from error
    return described, FolderReader(folder)


def regions_in(dataset: str, data_root: Path) -> dict[str, list[Any]]:
    """Return the ``regions`` of the images of a data set that have some, by file name below the image folder.

    A bundled data set's paths start from `data_root`; others have their manifest there, or beside it. CacheError if
    the manifest is missing, or its caption file has no regions.
    """
    beside = next(manifests_in(data_root, dataset), None)
    manifest = load_manifest(dataset, data_root) if dataset in bundled_manifests() else beside
    if manifest is None or manifest.captions is None:
        raise CacheError(f"there is no manifest of '{dataset}' with a caption file in {data_root}: check --data-root")
    captions = manifest.captions
    try:
        regions = {
            posixpath.normpath(posixpath.join(image.get("filepath", ""), image["filename"])): list(image["regions"])
            for key, number, image in (json_items(captions) if captions.suffix == ".json" else ())
            if key == "images" and number is not None and image.get("regions")
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CacheError(f"{captions} is no Karpathy JSON with regions ({error!r})") from error
    if not regions:
        raise CacheError(f"no image in {captions} has regions to crop; take a data set with regions, such as scenes")
    return regions


def regions_of(listed: Sequence[Any], size: tuple[int, int]) -> list[Region]:
    """Return the usable ones of an image's ``regions``, cut off at its edges; `size` is its width and height.

    Those without a phrase, without a pixel or too thin are left out. CacheError where one has no ``bbox`` of four
    numbers, or a phrase that is no text.
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


def triplet(regions: Sequence[Region], size: tuple[int, int], threshold: float) -> tuple[Region, Region, Region] | None:
    """Return the triplet A, B, C of an image (section 4.6), or None if fewer than two regions are small enough.

    A is the largest of the ten largest regions below the threshold, a share of the image's area; B, of the others,
    overlaps least with A by intersection over union, and is the largest of those that overlap as little; C is the box
    around both.
    """
    boxes = torch.tensor([region.box for region in regions], dtype=torch.float64).view(-1, 4)
    areas = box_area(boxes)
    falling = areas.argsort(descending=True, stable=True)
    largest = falling[areas[falling] < threshold * size[0] * size[1]][:LARGEST]
    if len(largest) < 2:
        return None
    first, others = largest[:1], largest[1:]
    second = others[box_iou(boxes[first], boxes[others]).argmin()]
    a, b = regions[int(first)], regions[int(second)]
    (left, top, right, bottom), other = a.box, b.box
    around = min(left, other[0]), min(top, other[1]), max(right, other[2]), max(bottom, other[3])
    return a, b, Region(around, f"{a.phrase} and {b.phrase}")


def cut(pictures: PictureReader, upright: bool, parts: list[tuple[str, Region]]) -> Iterator[Image.Image]:
    """Cut regions out of their images, those of an image next to each other: the whole pixels that each touches."""
    for name, of_image in itertools.groupby(parts, key=itemgetter(0)):
        image = read_picture(pictures, name, upright)
        for _, (box, _) in of_image:
            yield image.crop((math.floor(box[0]), math.floor(box[1]), math.ceil(box[2]), math.ceil(box[3])))


def read_picture(pictures: PictureReader, name: str, upright: bool) -> Image.Image:
    """Return an image as its feature set saw it, turned as EXIF says if `upright`."""
    try:
        return open_image(pictures.open(name), upright=upright)
    except SampleError as error:
        raise unreadable(error) from error


def selection_accuracy(similarity: Tensor, ties: Ties) -> list[float]:
    """Return how often (%) the right one of two is chosen, if crop A, crop C, caption A or caption C asks.

    `similarity` is of the crops A and C (rows) of each triplet with its captions A and C, ``[triplets, 2, 2]``.
    """
    tie = {"pessimistic": 0.0, "optimistic": 1.0, "mean": 0.5}[ties]
    right = similarity.diagonal(dim1=1, dim2=2)
    accuracies = []
    for wrong in (similarity.flip(2), similarity.flip(1)):
        other = wrong.diagonal(dim1=1, dim2=2)
        accuracies += (100 * ((right > other).double() + tie * (right == other).double()).mean(0)).tolist()
    return accuracies


@torch.no_grad()
def _tables(
    seen: Scored, triplets: list[Found], images: Side, captions: Side, rows: list[list[int]], ties: Ties
) -> dict[str, NumberTable]:

    def taken(side: Side, some: list[int]) -> Embedding:
        return each(lambda t: t[some], side.embedding)

    similarity = torch.stack([seen.model.similarity(taken(images, some), taken(captions, some)).cpu() for some in rows])
    selected, uncertain, places = Rows(), Rows(), torch.tensor(rows)
    for threshold in THRESHOLDS:
        inside = [number for number, case in enumerate(triplets) if case.threshold == threshold]
        if not inside:
            continue
        selected.append([f"{threshold:.0%}", len(inside), *selection_accuracy(similarity[inside], ties)])
        if images.uncertainty is not None and captions.uncertainty is not None:
            means = [side.cpu()[places[inside]].mean(0).tolist() for side in (images.uncertainty, captions.uncertainty)]
            uncertain.append([f"{threshold:.0%}", *means[0], *means[1]])
    letters = [f"{query} {letter}" for query in ("crop", "caption") for letter in "AC"]
    caption = (
        "Binary selection, accuracy (%); chance is 50. Crop A asks: which of the captions A and C of its image is "
        "its own? Caption A asks for its crop likewise. A is a region smaller than the area's share of the image, C "
        "the box around it and another one."
    )
    tables = {"crops": NumberTable(caption, ["area", "triplets", *(f"{name} asks" for name in letters)], selected)}
    if uncertain:
        caption = "Uncertainty of crops and captions against ambiguity: means over the triplets."
        tables["uncertainty of crops"] = NumberTable(caption, ["area", *letters], uncertain)
    return tables
