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

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from torch import Tensor

from ...pipeline.data.manifest import PROTOCOLS as PROTOCOLS
from ...pipeline.errors import RunError
from . import metrics
from .judgements import Instances, Judgements, Right, load_judgements, relevance, require_test_split
from .metrics import WAYS, Recalls, Table, Ties
from .r_precision import best_ranks, map_at_r, plausible_matches, r_precision
from .scoring import Scores

FOLDED = 5000  # images that 1k-folds is defined for
ZETAS = (0, 1, 2)

GroundTruth = Judgements | Instances | None


def ground_truth(protocol: str, annotations: str | Path | None = None) -> GroundTruth:
    """Read what a protocol needs beside the captions' own images; None where that is nothing.

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
    """Raise RunError, naming `where`, if these images and captions are not those of which the ground truth speaks."""
    if isinstance(truth, Judgements):
        require_test_split(truth, cocoid, sentid, protocol, where)
    elif isinstance(truth, Instances):
        truth.of(cocoid, where)


def table(protocol: str, truth: GroundTruth, scores: Scores, ties: Ties, where: str) -> Table:
    """Return the table of a protocol.

    Args:
        protocol: one of `PROTOCOLS`.
        truth: its `ground_truth`.
        scores: of a split.
        ties: see `metrics.recall` and `r_precision`.
        where: names the split in messages.

    Returns:
        For ``full``, ``1k-folds`` and ``cxc`` as `metrics.recall_table`.
        Elsewhere `rsum` is None and both ways hold ``mAP@R``, ``R-P``, ``R@1`` (``eccv``), ``PMRP``, ``zeta 0``,
        ``zeta 1``, ``zeta 2`` (``pmrp``) or ``RPC2`` (``rpc2``); of 5,000 images also ``PMRP 1K`` or ``RPC2 1K``.

    Raises:
        RunError: the protocol is not defined for these images and captions.
    """
    require(protocol, truth, scores.cocoid, scores.sentid, where)
    if isinstance(truth, Instances):
        return _both(*_pmrp(scores, truth.of(scores.cocoid, where), ties))
    if truth is None:
        return recalls(scores.similarity, scores.caption_image, protocol, ties, where)
    if protocol == "eccv":
        return _both(*(_eccv(*asked, ties) for asked in _judged(scores, truth.eccv)))
    if protocol == "cxc":
        images, captions = (best_ranks(similarity, right) for similarity, right, _ in _judged(scores, truth.cxc))
        return metrics.recall_table(images, captions, ties)
    return _both(*_rpc2(scores, truth.cxc, ties))


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
    folds = metrics.folds(len(similarity))
    return metrics.mean_table(
        [metrics.recall_table(*metrics.fold_ranks(similarity, caption_image, fold), ties=ties) for fold in folds]
    )


def _both(image_to_text: dict[str, float], text_to_image: dict[str, float]) -> Table:
    return Table(image_to_text, text_to_image, rsum=None)


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


def _rpc2(scores: Scores, right: tuple[Right, Right], ties: Ties) -> list[dict[str, float]]:
    judged = list(_judged(scores, right))
    values = [{"RPC2": _percent(r_precision(*asked[:2], ties, asked[2]))} for asked in judged]
    if len(scores.similarity) == FOLDED:
        for value, mean in zip(values, _in_folds(scores, judged[0][1], judged[1][1], ties), strict=True):
            value["RPC2 1K"] = mean
    return values


def _pmrp(scores: Scores, codes: Tensor, ties: Ties) -> list[dict[str, float]]:
    per_zeta: list[tuple[float, float]] = []
    folded: list[tuple[float, float]] = []
    for zeta in ZETAS:
        right = plausible_matches(codes, zeta)[:, scores.caption_image.to(codes.device)]
        per_zeta.append(_r_precisions(scores.similarity, right, right.T, ties))
        if len(scores.similarity) == FOLDED:
            folded.append(_in_folds(scores, right, right.T, ties))
    values = []
    for way in range(len(WAYS)):
        found = [pair[way] for pair in per_zeta]
        values.append({"PMRP": sum(found) / len(found), **{f"zeta {z}": v for z, v in zip(ZETAS, found, strict=True)}})
        if folded:
            values[way]["PMRP 1K"] = sum(pair[way] for pair in folded) / len(folded)
    return values


def _in_folds(scores: Scores, captions: Tensor, images: Tensor, ties: Ties) -> tuple[float, float]:
    """Return the mean R-Precision of the folds; what is right: of images `[I, C]`, and of captions `[C, I]`."""
    found = []
    for fold in metrics.folds(len(scores.similarity)):
        rows = slice(fold.start, fold.stop)
        inside = ((scores.caption_image >= fold.start) & (scores.caption_image < fold.stop)).cpu()
        similarity = scores.similarity[rows][:, inside.to(scores.similarity.device)]
        found.append(_r_precisions(similarity, captions[rows][:, inside], images[inside][:, rows], ties))
    return sum(one for one, _ in found) / len(found), sum(other for _, other in found) / len(found)


def _r_precisions(similarity: Tensor, captions: Tensor, images: Tensor, ties: Ties) -> tuple[float, float]:
    return _percent(r_precision(similarity, captions, ties)), _percent(r_precision(similarity.T, images, ties))


def _percent(values: Tensor) -> float:
    return 100 * values.mean().item()
