"""What people judged to belong together in COCO, besides each image's own captions.

The package `eccv_caption` holds ECCV Caption (Chun et al., *ECCV Caption: Correcting False Negatives by Collecting
Machine-and-Human-verified Image-Caption Associations for MS-COCO*) and the image-text part of Crisscrossed Captions
(Parekh et al., CxC), both for the 5,000 test images and 25,000 captions of Karpathy's split. COCO's own instance
annotations say which object classes an image shows.
"""

import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...pipeline.errors import RunError

Right = Mapping[int, Sequence[int]]  # right items, by their ids, of each query that was judged


class Judgements(NamedTuple):
    """The ground truth that `eccv_caption` holds, by cocoid and sentid.

    Attributes:
        images: the cocoids of the test split.
        captions: its sentids.
        eccv: ECCV Caption: right captions of images, right images of captions.
        cxc: the same of CxC.
    """

    images: set[int]
    captions: set[int]
    eccv: tuple[Right, Right]
    cxc: tuple[Right, Right]


def load_judgements(protocol: str) -> Judgements:
    """Read the files of `eccv_caption`.

    Args:
        protocol: what they are needed for.

    Raises:
        RunError: the package is not installed.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it misses a faster JSON reader
            from eccv_caption import Metrics  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError as error:
        raise RunError(
            f"protocol {protocol} reads its judgements from the package eccv_caption, which is not installed: "
            "pip install 'xret[eccv]'"
        ) from error
    files = Metrics()
    eccv, cxc = ((truth["i2t"], truth["t2i"]) for truth in (files.eccv_gts, files.cxc_gts))
    return Judgements(set(files.coco_gts["i2t"]), set(files.coco_ids.tolist()), eccv, cxc)


def require_test_split(truth: Judgements, cocoid: np.ndarray, sentid: np.ndarray, protocol: str, where: str) -> None:
    """Raise RunError unless the images and captions are exactly those that were judged."""
    images, captions = set(cocoid.tolist()), set(sentid.tolist())
    if images == truth.images and captions == truth.captions and len(captions) == len(sentid):
        return
    raise RunError(
        f"protocol {protocol} needs the {len(truth.images):,} images and {len(truth.captions):,} captions of COCO's "
        f"test split, with their cocoid and sentid; {where} has {len(cocoid):,} and {len(sentid):,}, of which "
        f"{len(images & truth.images):,} and {len(captions & truth.captions):,} are among them; take --protocol full"
    )


def relevance(right: Right, queries: np.ndarray, items: np.ndarray) -> tuple[Tensor, Tensor]:
    """Return which items are right for which queries.

    Args:
        right: by ids.
        queries: their ids, int64 `[Q]`.
        items: ids of the gallery, int64 `[G]`.

    Returns:
        bool `[Q, G]`, and how many right items each query has, those outside the gallery included, int64 `[Q]`.
    """
    column = {item: place for place, item in enumerate(items.tolist())}
    found = [set(right.get(query, ())) for query in queries.tolist()]
    pairs = [(row, column[item]) for row, ids in enumerate(found) for item in ids if item in column]
    relevant = torch.zeros(len(queries), len(items), dtype=torch.bool)
    relevant[tuple(torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).T)] = True
    return relevant, torch.tensor([len(ids) for ids in found])


class Instances(NamedTuple):
    """The object classes of images: of `instances_val2014.json` or a file of the same form.

    Attributes:
        file: where it was read.
        codes: by image id, whether it shows each class, bool `[L]`; instances of crowds count as well.
    """

    file: Path
    codes: dict[int, np.ndarray]

    @classmethod
    def read(cls, file: str | Path) -> "Instances":
        """Read annotations; a few hundred bytes a picture stay in memory, without the polygons.

        Raises:
            RunError: the file is missing or not of that form.
        """
        file = Path(file)
        try:
            with file.open(encoding="utf-8") as stream:
                content = json.load(stream, object_hook=_without_polygons)
            column = {entry["id"]: place for place, entry in enumerate(content["categories"])}
            codes = {entry["id"]: np.zeros(len(column), dtype=bool) for entry in content["images"]}
            for image, category in content["annotations"]:
                codes[image][column[category]] = True
        except OSError as error:
            raise RunError(f"the annotations {file} cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise RunError(
                f"{file} is not COCO's instance annotations, with images, categories and annotations that name an "
                "image_id and a category_id: give instances_val2014.json"
            ) from error
        return cls(file, codes)

    def require(self, cocoid: np.ndarray, where: str) -> None:
        """Raise RunError, naming `where`, if an image is not in the file."""
        if missing := [number for number in cocoid.tolist() if number not in self.codes]:
            raise RunError(
                f"{self.file} does not know {len(missing):,} of the {len(cocoid):,} images of {where}, among them "
                f"cocoid {missing[0]}: PMRP needs images of COCO and the annotations of their part"
            )

    def codes_of(self, cocoid: np.ndarray) -> Tensor:
        """Return the codes of images, bool `[I, L]`."""
        return torch.from_numpy(np.stack([self.codes[number] for number in cocoid.tolist()]))


def _without_polygons(entry: dict[str, Any]) -> Any:
    """Keep only what is needed of an annotation, as soon as it is read."""
    return (entry["image_id"], entry["category_id"]) if "category_id" in entry else entry
