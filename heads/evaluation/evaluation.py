"""Evaluation: the tables of a run, or of several as an ensemble.

The similarities of an ensemble are the mean of its runs' (SetDiv, rows marked with a dagger). Its runs may have been
trained on different stores, as of regions and of a grid: images and captions are then matched by their ids. `metrics`
and `precision` say how ties are counted.
"""

import sys
from collections.abc import Hashable
from collections.abc import Sequence as Several
from pathlib import Path
from typing import Any

import torch

from ...pipeline.cache.feature_cache import FeatureCache
from ...pipeline.device import pick_device
from ...pipeline.errors import RunError, nearest
from ..recipes.recipe import Expected
from ..runs.features import open_store
from ..runs.run import Run
from .metrics import Ties
from .paper_rows import ROWS, row_of
from .protocols import FOLDED, PROTOCOLS, ground_truth, require, table
from .scoring import Scores, score_run


def evaluate(
    runs: Several[str | Path],
    *,
    store: str | None = None,
    split: str = "test",
    protocol: str = "auto",
    ties: Ties = "pessimistic",
    device: str = "auto",
    annotations: str | Path | None = None,
    scores: Scores | None = None,
) -> dict[str, Any]:
    """Evaluate a run, or several as an ensemble.

    Args:
        runs: run folders.
        store: the feature cache to evaluate all of them on; None: each on the one that it was trained on.
        split: which images.
        protocol: one of `PROTOCOLS`, or ``auto``: what the data set's manifest says, without those that do not apply
            to these images, as long as another does.
        ties: ``pessimistic``, ``optimistic`` or ``mean``; see `metrics.recall`.
        device: ``auto``, ``cpu`` or ``cuda``.
        annotations: COCO's ``instances_val2014.json``, for the protocol ``pmrp``.
        scores: of a single run on this store and split, where they are there already; None: they are computed.

    Returns:
        ``{"run", "store", "results"}`` with one result a protocol: ``{"split", "protocol", "images", "captions",
        "captions_per_image", "skipped", "ties", "image_to_text": {"R@1", "R@5", "R@10", "medr"}, "text_to_image": the
        same, "rsum", "mean_recall", "paper_rsum", "log_circular_variance"}``, recalls in percent. ``run`` is a list
        where there are several, ``store`` where theirs differ. Protocols of precisions have other numbers in both ways
        (`protocols.table`) and neither RSUM nor mean recall. ``paper_rsum`` is that of the recipe's paper, null for
        ensembles, and where it has none for this data set and protocol; the circular variance is null for ensembles,
        and for embeddings that are no sets.

    Raises:
        RunError: a run, the store's feature sets, the split or the protocol do not fit, or the runs of an ensemble
            do not see the same images and captions.
    """
    target = pick_device(device)
    opened = [Run(path) for path in runs]
    caches = _open_stores(opened, store)
    cache, where = caches[0], f"split '{split}' of {caches[0].url}"
    protocols = cache.protocols if protocol == "auto" else (protocol,)
    for name in protocols:
        if name not in PROTOCOLS:
            raise RunError(f"there is no protocol '{name}'{nearest(name, list(PROTOCOLS))}: {', '.join(PROTOCOLS)}")
    if annotations is not None and "pmrp" not in protocols:
        raise RunError(f"--annotations is for the protocol pmrp, and this is {', '.join(protocols)}; leave it out")
    truths = {name: ground_truth(name, annotations) for name in protocols}
    if split in cache.splits:
        _require_early(truths, cache, split, where)  # embedding takes its time

    scores = scores or score_run(opened[0], cache, split, target)
    for run, other in zip(opened[1:], caches[1:], strict=True):
        _add(scores, score_run(run, other, split, target), f"{run.path} and {opened[0].path}")
    scores.similarity.div_(len(opened))

    if protocol == "auto":
        protocols = _applicable(protocols, len(scores.ids))
    names, urls = [str(run.path) for run in opened], [other.url for other in caches]
    alone = len(opened) == 1
    results = []
    for name in protocols:
        found = table(name, truths[name], scores, ties, where)
        row = row_of(cache.dataset, name) if alone and split == "test" else None
        results.append(
            {
                "split": split,
                "protocol": name,
                "images": len(scores.ids),
                "captions": len(scores.texts),
                "captions_per_image": len(scores.texts) / len(scores.ids),
                "skipped": scores.skipped,
                "ties": ties,
                **found,
                "mean_recall": None if found["rsum"] is None else found["rsum"] / 6,
                "paper_rsum": _expected(opened[0].recipe.expected, row, len(scores.ids)),
                "log_circular_variance": scores.log_circular_variance if alone else None,
            }
        )
    return {
        "run": names[0] if alone else names,
        "store": urls[0] if len(set(urls)) == 1 else urls,
        "results": results,
    }


def _open_stores(runs: list[Run], store: str | None) -> list[FeatureCache]:
    """Return the store of each run, opened once where several have the same."""
    opened: dict[str, FeatureCache] = {}
    for run in runs:
        url = store or run.info.store
        if url not in opened:
            opened[url] = open_store(run, store)
    return [opened[store or run.info.store] for run in runs]


def _require_early(truths: dict[str, Any], cache: FeatureCache, split: str, where: str) -> None:
    """Refuse a protocol that is not defined for the split before anything is embedded."""
    first, last = cache.splits[split]
    begin = int(cache.caption_start[first])
    end = begin + int(cache.caption_count[first:last].sum())
    for name, truth in truths.items():
        if truth is not None:
            cocoid = cache.store.read_array("samples/cocoid", first, last)
            require(name, truth, cocoid, cache.sentids(begin, end), where)


def _add(scores: Scores, other: Scores, names: str) -> None:
    """Add another run's similarities, brought into the same order.

    Raises:
        RunError: they are not of the same images and captions.
    """
    images, captions = _order(scores.ids, other.ids), _order(_captions(scores), _captions(other))
    if images is None or captions is None:
        both = len(set(scores.ids) & set(other.ids)), len(set(_captions(scores)) & set(_captions(other)))
        raise RunError(
            f"{names} cannot be one ensemble: of {len(other.ids):,} and {len(scores.ids):,} images {both[0]:,} are in "
            f"both, of {len(other.texts):,} and {len(scores.texts):,} captions {both[1]:,}: they skip different "
            "samples, or their stores hold different ones"
        )
    added = other.similarity
    if images != list(range(len(images))):
        added = added[torch.tensor(images, device=added.device)]
    if captions != list(range(len(captions))):
        added = added[:, torch.tensor(captions, device=added.device)]
    scores.similarity.add_(added)


def _captions(scores: Scores) -> list[tuple[str, int, str]]:
    """Return what tells the captions apart: the id of the image, the number and the text."""
    owners = [scores.ids[row] for row in scores.caption_image.tolist()]
    return list(zip(owners, scores.sentid.tolist(), scores.texts, strict=True))


def _order(wanted: Several[Hashable], there: Several[Hashable]) -> list[int] | None:
    """Return where each of `wanted` stands in `there`; None where they are not the same."""
    place = {key: row for row, key in enumerate(there)}
    if len(wanted) != len(there) or place.keys() != set(wanted):
        return None
    return [place[key] for key in wanted]


def _expected(expected: Expected, row: str | None, images: int) -> float | None:
    return None if row is None or images != ROWS[row].images else getattr(expected, row)


def _applicable(protocols: tuple[str, ...], images: int) -> tuple[str, ...]:
    """Leave 1k-folds out where it does not apply, with a line on standard error, if another protocol is left."""
    rest = tuple(name for name in protocols if name != "1k-folds")
    if images == FOLDED or not rest or rest == protocols:
        return protocols
    print(f"protocol 1k-folds is left out: it needs exactly {FOLDED:,} images, not {images:,}", file=sys.stderr)
    return rest
