"""Protocols of COCO: what people judged to belong together besides each image's own captions, or what objects say.

- ``eccv``: mAP@R, R-Precision and R@1 on ECCV Caption (Chun et al., *ECCV Caption: Correcting False Negatives by
  Collecting Machine-and-Human-verified Image-Caption Associations for MS-COCO*).
- ``cxc``: recalls on Crisscrossed Captions (Parekh et al., CxC).
- ``rpc2``: R-Precision on Crisscrossed Captions (Pishdad et al., *Uncertainty-based Cross-Modal Retrieval with
  Probabilistic Representations*, section 4.3).
- ``pmrp``: Plausible Match R-Precision (PCME), by the object classes of COCO's instance annotations; zeta 0, 1, 2 and
  their mean.

The package `eccv_caption` holds the judgements, of the 5,000 test images and 25,000 captions of Karpathy's split. The
last two give, of 5,000 images, the mean of five folds of 1,000 as well; a fold's right items are those inside.
"""

import json
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...pipeline.errors import RunError
from . import metrics
from .metrics import Table, Ties
from .precision import best_ranks, map_at_r, plausible_matches, r_precision
from .scoring import Scores

Right = Mapping[int, Sequence[int]]  # right items, by their ids, of each query that was judged
Matches = tuple[Tensor, Tensor]  # which captions are right for each image, bool `[I, C]`, and the other way, `[C, I]`


@dataclass(frozen=True)
class Judgements:
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

    def require(self, protocol: str, cocoid: np.ndarray, sentid: np.ndarray, where: str) -> None:
        """Raise RunError, naming `where`, unless the images and captions are exactly those that were judged."""
        images, captions = set(cocoid.tolist()), set(sentid.tolist())
        if images != self.images or captions != self.captions or len(captions) != len(sentid):
            raise RunError(
                f"protocol {protocol} needs the {len(self.images):,} images and {len(self.captions):,} captions of "
                f"COCO's test split, with their cocoid and sentid; {where} has {len(cocoid):,} and {len(sentid):,}, of "
                f"which {len(images & self.images):,} and {len(captions & self.captions):,} are among them; take "
                "--protocol full"
            )

    def table(self, protocol: str, scores: Scores, ties: Ties) -> Table:
        """Return the table of ``eccv`` (``mAP@R``, ``R-P``, ``R@1``), ``cxc`` or ``rpc2`` (``RPC2``, ``RPC2 1K``)."""
        similarity = scores.similarity, scores.similarity.T
        truth = self.eccv if protocol == "eccv" else self.cxc
        (captions, of_image), (images, of_caption) = (
            relevance(truth[0], scores.cocoid, scores.sentid),
            relevance(truth[1], scores.sentid, scores.cocoid),
        )
        ways = [(similarity[0], captions, of_image), (similarity[1], images, of_caption)]
        if protocol == "cxc":
            return metrics.recall_table(best_ranks(*ways[0][:2]), best_ranks(*ways[1][:2]), ties)
        if protocol == "eccv":
            measured = [
                {
                    "mAP@R": _percent(map_at_r(scored, right, ties, count)),
                    "R-P": _percent(r_precision(scored, right, ties, count)),
                    "R@1": metrics.recall(best_ranks(scored, right), 1, ties),
                }
                for scored, right, count in ways
            ]
            return Table(measured[0], measured[1])
        found = [{"RPC2": _percent(r_precision(scored, right, ties, count))} for scored, right, count in ways]
        return _with_folds("RPC2 1K", found, scores, [(captions, images)], ties)


@dataclass(frozen=True)
class Instances:
    """The object classes of images: of `instances_val2014.json` or a file of the same form.

    Attributes:
        file: where it was read.
        codes: by image id, whether it shows each class, bool `[L]`; instances of crowds count as well.
    """

    file: Path
    codes: dict[int, np.ndarray]

    @classmethod
    def read(cls, file: Path) -> "Instances":
        """Read annotations; a few hundred bytes a picture stay in memory, without the polygons.

        Raises:
            RunError: the file is missing or not of that form.
        """
        try:
            with file.open(encoding="utf-8") as stream:
                content = json.load(stream, object_hook=_without_polygons)
            column = {entry["id"]: place for place, entry in enumerate(content["categories"])}
            codes = {entry["id"]: np.zeros(len(column), dtype=bool) for entry in content["images"]}
            for image, category in content["annotations"]:
                codes[image][column[category]] = True
        except OSError as error:
            raise RunError(f"the annotations {file} cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(
                f"{file} is not COCO's instance annotations, with images, categories and annotations that name an "
                "image_id and a category_id: give instances_val2014.json"
            ) from error
        return cls(file, codes)

    def require(self, protocol: str, cocoid: np.ndarray, sentid: np.ndarray, where: str) -> None:
        """Raise RunError, naming `where`, if an image is not in the file."""
        if missing := [number for number in cocoid.tolist() if number not in self.codes]:
            raise RunError(
                f"{self.file} does not know {len(missing):,} of the {len(cocoid):,} images of {where}, among them "
                f"cocoid {missing[0]}: {protocol} needs images of COCO and the annotations of their part"
            )

    def table(self, protocol: str, scores: Scores, ties: Ties) -> Table:
        """Return ``PMRP``, ``zeta 0``, ``zeta 1``, ``zeta 2`` and, of 5,000 images, ``PMRP 1K``."""
        codes = torch.from_numpy(np.stack([self.codes[number] for number in scores.cocoid.tolist()]))

        def matches() -> Iterator[Matches]:  # one at a time: each has a byte a cell
            for zeta in range(3):
                captions = plausible_matches(codes, zeta)[:, scores.caption_image]
                yield captions, captions.T

        found = zip(*(_r_precisions(scores.similarity, pair, ties) for pair in matches()), strict=True)
        ways = [{"PMRP": fmean(way)} | {f"zeta {zeta}": one for zeta, one in enumerate(way)} for way in found]
        return _with_folds("PMRP 1K", ways, scores, matches(), ties)


def _without_polygons(entry: dict[str, Any]) -> Any:
    """Keep only what is needed of an annotation, as soon as it is read."""
    return (entry["image_id"], entry["category_id"]) if "category_id" in entry else entry


GroundTruth = Judgements | Instances


def ground_truth(protocol: str, annotations: str) -> GroundTruth:
    """Read what ``eccv``, ``cxc``, ``rpc2`` or ``pmrp`` compares with.

    Args:
        protocol: one of them.
        annotations: path of COCO's ``instances_val2014.json``, for ``pmrp``.

    Raises:
        RunError: a package or a file is missing.
    """
    if protocol != "pmrp":
        return load_judgements(protocol)
    if not annotations:
        raise RunError(
            "protocol pmrp compares the object classes of the images: name COCO's annotations, as "
            "--protocol pmrp:instances_val2014.json"
        )
    return Instances.read(Path(annotations))


def load_judgements(protocol: str) -> Judgements:
    """Read the files of `eccv_caption`; RunError, naming the protocol, where it is not installed."""
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


def _with_folds(
    name: str, ways: Sequence[dict[str, float]], scores: Scores, matches: Iterable[Matches], ties: Ties
) -> Table:
    """Return both ways with, of 5,000 images, the mean R-Precision of the folds over all `matches`."""
    if len(scores.similarity) == metrics.FOLDED:
        found = []
        for captions, images in matches:
            for fold in metrics.FOLDS:
                rows, columns = metrics.inside(fold, scores.caption_image)
                some = scores.similarity[rows][:, columns.to(scores.similarity.device)]
                found.append(_r_precisions(some, (captions[rows][:, columns], images[columns][:, rows]), ties))
        ways = [way | {name: fmean(values)} for way, values in zip(ways, zip(*found, strict=True), strict=True)]
    return Table(ways[0], ways[1])


def _r_precisions(similarity: Tensor, matches: Matches, ties: Ties) -> tuple[float, float]:
    """Return the mean R-Precision of both ways."""
    return (
        _percent(r_precision(similarity, matches[0], ties)),
        _percent(r_precision(similarity.T, matches[1], ties)),
    )


def _percent(values: Tensor) -> float:
    return 100 * values.mean().item()
