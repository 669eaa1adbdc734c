"""Protocols: which table is made of the scores of a split. Recalls and R-Precisions are in percent.

- ``full``: all images against all captions (Flickr30K 1K, COCO 5K, any number of captions an image).
- ``1k-folds``: the mean of five consecutive folds of 1,000 images in the order of Karpathy's file (COCO 1K).
- ``eccv``: mAP@R, R-Precision and R@1 on ECCV Caption.
- ``cxc``: recalls on Crisscrossed Captions.
- ``pmrp``: Plausible Match R-Precision, from COCO's object classes; zeta 0, 1, 2 and their mean.
- ``rpc2``: R-Precision on Crisscrossed Captions (Pishdad et al., *Uncertainty-based Cross-Modal Retrieval with
  Probabilistic Representations*, section 4.3).

The last two give, of 5,000 images, the mean of the five folds as well; a fold's ground truth is what lies inside.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from torch import Tensor

from ...pipeline.data.manifest import PROTOCOLS as PROTOCOLS
from ...pipeline.errors import RunError
from . import metrics
from .judgements import Instances, Judgements, Right, load_judgements, relevance, require_test_split
from .metrics import Recalls, Table, Ties
from .r_precision import best_ranks, map_at_r, plausible_matches, r_precision
from .scoring import Scores

FOLDED = 5000  # images that 1k-folds is defined for
ZETAS = (0, 1, 2)

GroundTruth = Judgements | Instances | None
Matches = tuple[Tensor, Tensor]  # which captions are right for each image, bool `[I, C]`, and the other way, `[C, I]`


def ground_truth(protocol: str, annotations: str | Path | None = None) -> GroundTruth:
    """Read what a protocol needs besides the captions' own images; None where that is nothing.

    Args:
        protocol: one of `PROTOCOLS`.
        annotations: COCO's ``instances_val2014.json``, for ``pmrp``.

    Raises:
        RunError: a package or a file is missing.
    """
    if protocol in ("eccv", "cxc", "rpc2"):
        return load_judgements(protocol)
    if protocol != "pmrp":
        return None
    if annotations is None:
        raise RunError(
            "protocol pmrp compares the object classes of the images: give COCO's instances_val2014.json with "
            "--annotations"
        )
    return Instances.read(annotations)


def require(protocol: str, truth: GroundTruth, cocoid: np.ndarray, sentid: np.ndarray, where: str) -> None:
    """Raise RunError, naming `where`, if the ground truth does not cover these images and captions."""
    if isinstance(truth, Judgements):
        require_test_split(truth, cocoid, sentid, protocol, where)
    elif isinstance(truth, Instances):
        truth.require(cocoid, where)


def table(protocol: str, truth: GroundTruth, scores: Scores, ties: Ties, where: str) -> Table:
    """Return the table of a protocol.

    Args:
        protocol: one of `PROTOCOLS`.
        truth: its `ground_truth`, which `require` has found to cover the split.
        scores: of a split.
        ties: see `metrics.recall` and `r_precision`.
        where: names the split in messages.

    Returns:
        For ``full``, ``1k-folds`` and ``cxc`` as `metrics.recall_table`.
        Elsewhere `rsum` is None and both ways hold ``mAP@R``, ``R-P``, ``R@1`` (``eccv``), ``PMRP``, ``zeta 0``,
        ``zeta 1``, ``zeta 2`` (``pmrp``) or ``RPC2`` (``rpc2``); of 5,000 images also ``PMRP 1K`` or ``RPC2 1K``.

    Raises:
        RunError: the protocol is not defined for this number of images.
    """
    if truth is None:
        return recalls(scores.similarity, scores.caption_image, protocol, ties, where)
    if isinstance(truth, Instances):
        return _plausible(scores, truth.codes_of(scores.cocoid), ties)
    if protocol == "eccv":
        return _both(_eccv(*asked, ties) for asked in _judged(scores, truth.eccv))
    if protocol == "cxc":
        text, image = (best_ranks(similarity, right) for similarity, right, _ in _judged(scores, truth.cxc))
        return metrics.recall_table(text, image, ties)
    (_, captions, of_image), (_, images, of_caption) = _judged(scores, truth.cxc)
    whole = _r_precisions(scores.similarity, (captions, images), ties, (of_image, of_caption))
    ways = [{"RPC2": one} for one in whole]
    return _both(_with_folds("RPC2 1K", ways, scores, [(captions, images)], ties))


def recalls(similarity: Tensor, caption_image: Tensor, protocol: str, ties: Ties, where: str) -> Recalls:
    """Return the table of ``full`` or ``1k-folds`` for ``similarity [I, C]``.

    Raises:
        RunError: the split is not what the protocol is defined for.
    """
    if protocol == "full":
        return metrics.recall_table(*metrics.ranks(similarity, caption_image), ties=ties)
    if len(similarity) != FOLDED:
        raise RunError(
            f"protocol 1k-folds needs exactly {FOLDED:,} images and {where} has {len(similarity):,}; "
            "take --protocol full"
        )
    return metrics.mean_table(
        [metrics.recall_table(*metrics.fold_ranks(similarity, caption_image, fold), ties) for fold in metrics.FOLDS]
    )


def chance_rsum(caption_image: Tensor, images: int, protocol: str) -> float | None:
    """Return the RSUM that chance has under ``full`` or ``1k-folds``, see `metrics.chance`; None under others."""
    counts = torch.bincount(caption_image.cpu(), minlength=images).tolist()
    if protocol == "full":
        return metrics.chance(counts)
    if protocol == "1k-folds":
        return fmean(metrics.chance(counts[fold.start : fold.stop]) for fold in metrics.FOLDS)
    return None


def _both(ways: Iterable[dict[str, float]]) -> Table:
    image_to_text, text_to_image = ways
    return Table(image_to_text, text_to_image)


def _judged(scores: Scores, right: tuple[Right, Right]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield both ways: similarity, what is right, and R of each query."""
    yield scores.similarity, *relevance(right[0], scores.cocoid, scores.sentid)
    yield scores.similarity.T, *relevance(right[1], scores.sentid, scores.cocoid)


def _eccv(similarity: Tensor, right: Tensor, count: Tensor, ties: Ties) -> dict[str, float]:
    return {
        "mAP@R": _percent(map_at_r(similarity, right, ties, count)),
        "R-P": _percent(r_precision(similarity, right, ties, count)),
        "R@1": metrics.recall(best_ranks(similarity, right), 1, ties),
    }


def _plausible(scores: Scores, codes: Tensor, ties: Ties) -> Table:
    def matches(zeta: int) -> Matches:
        captions = plausible_matches(codes, zeta)[:, scores.caption_image.to(codes.device)]
        return captions, captions.T

    by_zeta = [_r_precisions(scores.similarity, matches(zeta), ties) for zeta in ZETAS]
    ways = [
        {"PMRP": fmean(found), **{f"zeta {zeta}": one for zeta, one in zip(ZETAS, found, strict=True)}}
        for found in zip(*by_zeta, strict=True)
    ]
    return _both(_with_folds("PMRP 1K", ways, scores, map(matches, ZETAS), ties))


def _with_folds(
    name: str, ways: list[dict[str, float]], scores: Scores, matches: Iterable[Matches], ties: Ties
) -> list[dict[str, float]]:
    """Add to both ways, of 5,000 images, the mean R-Precision of the folds over all `matches`."""
    if len(scores.similarity) != FOLDED:
        return ways
    found = []
    for captions, images in matches:
        for fold in metrics.FOLDS:
            rows, columns = metrics.inside(fold, scores.caption_image)
            some = scores.similarity[rows][:, columns.to(scores.similarity.device)]
            found.append(_r_precisions(some, (captions[rows][:, columns], images[columns][:, rows]), ties))
    return [way | {name: fmean(values)} for way, values in zip(ways, zip(*found, strict=True), strict=True)]


def _r_precisions(
    similarity: Tensor, matches: Matches, ties: Ties, count: tuple[Tensor | None, Tensor | None] = (None, None)
) -> tuple[float, float]:
    """Return the mean R-Precision of both ways; `count` as for `r_precision`."""
    return (
        _percent(r_precision(similarity, matches[0], ties, count[0])),
        _percent(r_precision(similarity.T, matches[1], ties, count[1])),
    )


def _percent(values: Tensor) -> float:
    return 100 * values.mean().item()
