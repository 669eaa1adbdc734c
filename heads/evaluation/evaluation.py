"""Evaluation: the tables of a run, of several as an ensemble, or of frozen encoders without any head.

The similarities of an ensemble are the mean of its runs' (SetDiv, rows marked with a dagger), and those of a run on
images in several views the mean over the views (`scoring.score_sets`). The runs of an ensemble may have been
trained on different stores, as of regions and of a grid: images and captions are then matched by their ids. `metrics`
and `precision` say how ties are counted.
"""

import logging
from collections.abc import Sequence as Several
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from ...pipeline.data.manifest import PROTOCOLS
from ...pipeline.device import pick_device
from ...pipeline.errors import RunError, nearest
from ...pipeline.reading.split import Split
from ...pipeline.store import FeatureCache
from ...pipeline.wording import counted
from ..runs.features import Sets, require_views
from .coco import GroundTruth, ground_truth
from .metrics import WAYS, Table, Ties, chance_rsum, recalls, require_folds, require_ties
from .paper_rows import ROWS, row_of
from .rankers import Ranker, in_one_space, open_rankers
from .scoring import Scores

T = TypeVar("T")
FEW = 100  # fewer images say next to nothing: one of them is a percent of the recalls, and chance finds many
log = logging.getLogger("xret")


@dataclass(frozen=True)
class Result:
    """What a protocol finds on a split; ``str`` shows it as a table.

    Attributes:
        split: which images and captions.
        protocol: one of `manifest.PROTOCOLS`.
        images, captions: how many were compared.
        captions_per_image: on average.
        skipped: samples without features, because they could not be read.
        ties: how equal scores are counted; see `metrics.recall`.
        image_to_text: ``R@1``, ``R@5``, ``R@10`` in percent and ``medr``, the median rank; protocols of R-Precision
            have other numbers, see `coco`.
        text_to_image: the same.
        rsum, mean_recall: the sum and the mean of the six recalls; None for protocols of R-Precision.
        paper_rsum: that of the recipe's paper; None for ensembles, and where the paper has no such row.
        log_circular_variance: of the embedding sets; None for ensembles, and for embeddings that are no sets.
        chance_rsum: what a random order is expected to have; None where there is no RSUM.
    """

    split: str
    protocol: str
    images: int
    captions: int
    captions_per_image: float
    skipped: int
    ties: Ties
    image_to_text: dict[str, float]
    text_to_image: dict[str, float]
    rsum: float | None
    mean_recall: float | None
    paper_rsum: float | None
    log_circular_variance: float | None
    chance_rsum: float | None

    @property
    def difference(self) -> float | None:
        """Of the RSUM to the paper's; None where one of them is not known."""
        return None if self.rsum is None or self.paper_rsum is None else self.rsum - self.paper_rsum

    def __str__(self) -> str:
        names = list(self.image_to_text)
        lines = [
            f"split {self.split}, protocol {self.protocol}: {counted(self.images, 'image')}, "
            f"{counted(self.captions, 'caption')} ({self.captions_per_image:.2f} an image), "
            f"{self.skipped:,} skipped, ties {self.ties}",
            f"{'':15}" + "".join(f"{name:>9}" for name in names),
        ]
        for way in WAYS:
            values = getattr(self, way)
            cells = "".join(f"{values[name]:9.{1 if name == 'medr' else 2}f}" for name in names)
            lines.append(f"{way.replace('_', ' '):15}{cells}")
        known = {
            "RSUM": self.rsum,
            "mean recall": self.mean_recall,
            "chance RSUM": self.chance_rsum,
            "log circular variance": self.log_circular_variance,
        }
        if last := ", ".join(f"{name} {value:.2f}" for name, value in known.items() if value is not None):
            lines.append(last)
        if self.difference is not None:
            lines.append(f"the paper's RSUM {self.paper_rsum:.2f}, difference {self.difference:+.2f}")
        if self.images < FEW:
            lines.append(f"{too_few(self.images)} to tell how good this is; take {FEW} or more")
        return "\n".join(lines)


def too_few(images: int) -> str:
    """Return that so many are too few, for a sentence that says for what."""
    return f"{counted(images, 'image')} {'is' if images == 1 else 'are'} too few"


@dataclass(frozen=True)
class Evaluation:
    """What `evaluate` finds; ``str`` shows it as tables.

    Attributes:
        runs: the run folders; of frozen encoders ``untrained``, and which.
        stores: the feature cache of each.
        views: over how many views of an image each takes the mean.
        results: one a protocol.
    """

    runs: tuple[str, ...]
    stores: tuple[str, ...]
    views: tuple[int, ...]
    results: tuple[Result, ...]

    @classmethod
    def of_one(cls, content: dict[str, Any]) -> "Evaluation":
        """Return the evaluation of one run that was written down with `to_dict`; KeyError or TypeError if it is not."""
        results = tuple(Result(**one) for one in content["results"])
        return cls((content["run"],), (content["store"],), (content["views"],), results)

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON has it: ``run`` is a list of several, other keys where theirs differ."""
        return {
            "run": self.runs[0] if len(self.runs) == 1 else list(self.runs),
            "store": _one(self.stores),
            "views": _one(self.views),
            "results": [asdict(result) for result in self.results],
        }

    def __str__(self) -> str:
        first = f"{', '.join(self.runs)} on {'; '.join(self.stores if len(set(self.stores)) > 1 else self.stores[:1])}"
        if max(self.views) > 1:
            first += f", mean over {' and '.join(map(str, dict.fromkeys(self.views)))} views of each image"
        return "\n".join([first, *map(str, self.results)])


def _one(values: Several[T]) -> T | list[T]:
    """Return the value that all have, or those of each."""
    return values[0] if len(set(values)) == 1 else list(values)


def evaluate(
    runs: str | Path | Several[str | Path],
    *,
    store: str | None = None,
    split: str = "test",
    protocol: str = "auto",
    ties: Ties = "pessimistic",
    views: bool = False,
    features: str = "auto",
    device: str = "auto",
) -> Evaluation:
    """Evaluate a run, several as an ensemble, or a store's frozen encoders.

    Args:
        runs: run folders, or stores for the frozen encoders of their features.
        store: where the runs' features are; None: where each was trained.
        split: which images and captions.
        protocol: one of `manifest.PROTOCOLS`, ``pmrp`` with COCO's annotations as
            ``pmrp:instances_val2014.json``; ``auto``: those of the manifest that apply to these images.
        ties: how equal scores are counted; see `metrics.recall`.
        views: take the mean over all cached views of an image, not the first alone.
        features: of a store with several sets, see `rankers.sets_in_one_space`.
        device: ``auto``, ``cpu`` or ``cuda``.

    Raises:
        RunError: a run, the store's feature sets, the split or the protocol do not fit, or the runs of an ensemble
            do not see the same images and captions.
    """
    target = pick_device(device)
    require_ties(ties)
    several = [runs] if isinstance(runs, str | Path) else list(runs)
    if not several:
        raise RunError("there is no run to evaluate; name one, or a store")
    rankers = open_rankers(several, store, features)
    counts = _views(rankers) if views else (1,) * len(rankers)
    truths = _ground_truths(rankers[0], split, protocol)
    scores = _score(rankers, split, target, counts)
    return _tables(rankers, scores, counts, truths, split, ties)


def evaluate_untrained(
    sets: Sets, split: str, ties: Ties = "pessimistic", device: str = "auto", views: bool = False
) -> Evaluation | None:
    """Return what frozen encoders reach without a head, by the protocols of the manifest.

    None where their features lie in no common space: then there is nothing to compare.

    Args:
        views: take the mean over all cached views of an image.

    Raises:
        RunError: the split does not fit the protocols.
        CacheError: the split is unknown, empty or not complete.
    """
    if not in_one_space(sets):
        return None
    ranker = Ranker(None, sets[0].cache, sets)
    counts = _views([ranker]) if views else (1,)
    truths = _ground_truths(ranker, split, "auto")
    return _tables([ranker], ranker.score(split, pick_device(device), counts[0]), counts, truths, split, ties)


def evaluate_scores(ranker: Ranker, scores: Scores, split: str, ties: Ties = "pessimistic") -> Evaluation:
    """Return the tables of scores that are known already, by the protocols of the manifest; errors as `evaluate`."""
    return _tables([ranker], scores, (1,), _ground_truths(ranker, split, "auto"), split, ties)


def _views(rankers: Several[Ranker]) -> tuple[int, ...]:
    """Return how many views of an image each one's features have; RunError where none has several."""
    images = [ranker.sets[0] for ranker in rankers]
    require_views(max(images, key=lambda features: features.views))
    return tuple(features.views for features in images)


def _ground_truths(ranker: Ranker, split: str, protocol: str) -> dict[str, GroundTruth | None]:
    """Return what each protocol compares with besides own captions; refuse what does not cover the split.

    Several that the manifest names and that cannot be used here are left out with a warning.
    """
    name, _, annotations = protocol.partition(":")
    if name not in ("auto", *PROTOCOLS):
        raise RunError(
            f"there is no protocol '{name}'{nearest(name, list(PROTOCOLS))}; `xret list protocols` lists them"
        )
    if annotations and name != "pmrp":
        raise RunError(f"only the protocol pmrp takes a file of annotations, not {name}")
    samples, where = Split.of(*ranker.sets, split), f"split '{split}' of {ranker.cache.url}"
    truths: dict[str, GroundTruth | None] = {}
    refused: dict[str, RunError] = {}
    for one in ranker.cache.protocols if name == "auto" else (name,):
        try:
            truths[one] = _ground_truth(ranker.cache, samples, one, annotations, where)
        except RunError as error:
            refused[one] = error
    if not truths:
        raise next(iter(refused.values()))
    for one, why in refused.items():
        log.warning("protocol %s is left out: %s", one, why)
    return truths


def _ground_truth(
    cache: FeatureCache, samples: Split, protocol: str, annotations: str, where: str
) -> GroundTruth | None:
    """Return what a protocol compares with; RunError, naming `where`, if it does not apply to these samples."""
    if protocol == "1k-folds":
        require_folds(len(samples.image_rows), where)
    if protocol in ("full", "1k-folds"):
        return None
    truth = ground_truth(protocol, annotations)
    cocoid = cache.sample_array("cocoid")[samples.image_rows]
    sentid = cache.sentids(0, cache.captions)[samples.caption_rows]
    truth.require(protocol, cocoid, sentid, where)
    return truth


def _score(rankers: Several[Ranker], split: str, device: torch.device, views: tuple[int, ...]) -> Scores:
    """Return the scores of one over so many views, or the mean of several's in the order of the first."""
    scores = rankers[0].score(split, device, views[0])
    for ranker, count in zip(rankers[1:], views[1:], strict=True):
        _add(scores, ranker.score(split, device, count), f"{ranker.name} and {rankers[0].name}")
    scores.similarity.div_(len(rankers))
    return scores


def _tables(
    rankers: Several[Ranker],
    scores: Scores,
    views: tuple[int, ...],
    truths: dict[str, GroundTruth | None],
    split: str,
    ties: Ties,
) -> Evaluation:
    """Return the tables of what rankers, together, have scored."""
    return Evaluation(
        tuple(ranker.name for ranker in rankers),
        tuple(ranker.cache.url for ranker in rankers),
        views,
        tuple(_result(name, truth, scores, rankers, split, ties) for name, truth in truths.items()),
    )


def _result(
    protocol: str, truth: GroundTruth | None, scores: Scores, rankers: Several[Ranker], split: str, ties: Ties
) -> Result:
    found: Table = (
        recalls(scores.similarity, scores.caption_image, protocol, ties)
        if truth is None
        else truth.table(protocol, scores, ties)
    )
    run = rankers[0].run if len(rankers) == 1 else None
    row = row_of(rankers[0].cache.dataset, protocol) if run is not None and split == "test" else None
    of_papers_size = row is not None and ROWS[row].images == len(scores.ids)
    return Result(
        split=split,
        protocol=protocol,
        images=len(scores.ids),
        captions=len(scores.texts),
        captions_per_image=len(scores.texts) / len(scores.ids),
        skipped=scores.skipped,
        ties=ties,
        image_to_text=found.image_to_text,
        text_to_image=found.text_to_image,
        rsum=found.rsum,
        mean_recall=None if found.rsum is None else found.rsum / 6,
        paper_rsum=getattr(run.recipe.expected, row) if run is not None and row and of_papers_size else None,
        log_circular_variance=scores.log_circular_variance if len(rankers) == 1 else None,
        chance_rsum=None if found.rsum is None else chance_rsum(scores.caption_image, len(scores.ids), protocol),
    )


def _add(scores: Scores, other: Scores, names: str) -> None:
    """Add another run's similarities, brought into the same order.

    Raises:
        RunError: they are not of the same images and captions.
    """
    ours, theirs = _captions(scores), _captions(other)
    image_at = {name: row for row, name in enumerate(other.ids)}
    caption_at = {name: row for row, name in enumerate(theirs)}
    if image_at.keys() != set(scores.ids) or caption_at.keys() != set(ours):
        images, captions = len(image_at.keys() & set(scores.ids)), len(caption_at.keys() & set(ours))
        raise RunError(
            f"{names} cannot be one ensemble: of {len(other.ids):,} and {len(scores.ids):,} images {images:,} are in "
            f"both, of {len(theirs):,} and {len(ours):,} captions {captions:,}: they skip different samples, or their "
            "stores hold different ones"
        )
    rows, columns = [image_at[name] for name in scores.ids], [caption_at[name] for name in ours]
    scores.similarity.add_(other.similarity[rows][:, columns])


def _captions(scores: Scores) -> list[tuple[str, int, str]]:
    """Return what tells the captions apart: the id of the image, the number and the text."""
    owners = [scores.ids[row] for row in scores.caption_image.tolist()]
    return list(zip(owners, scores.sentid.tolist(), scores.texts, strict=True))
