"""Evaluation: the tables of a run, of several as an ensemble, or of frozen encoders without any head.

The similarities of an ensemble are the mean of its runs' (SetDiv, rows marked with a dagger), and those of a run on
images in several views the mean over the views (`scoring.score_sets`). The runs of an ensemble may have been
trained on different stores, as of regions and of a grid: images and captions are then matched by their ids. `metrics`
and `r_precision` say how ties are counted.
"""

import sys
from collections.abc import Sequence as Several
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from ...pipeline.cache.feature_cache import FeatureCache
from ...pipeline.device import pick_device
from ...pipeline.errors import RunError, nearest
from ...pipeline.reading.split import Split
from ...pipeline.wording import counted
from ..runs.features import Sets, generation_shown, require_views, titled
from .metrics import WAYS, Ties, require_ties
from .paper_rows import ROWS, row_of
from .protocols import FOLDED, PROTOCOLS, GroundTruth, chance_rsum, ground_truth, require, table
from .scoring import Scores
from .subjects import Subject, in_one_space, open_subjects

T = TypeVar("T")
FEW = 100  # fewer images say next to nothing: one of them is a percent of the recalls, and chance finds many


@dataclass(frozen=True)
class Result:
    """What a protocol finds on a split; ``str`` shows it as a table.

    Attributes:
        split: which images and captions.
        protocol: one of `PROTOCOLS`.
        images, captions: how many were compared.
        captions_per_image: on average.
        skipped: samples without features, because they could not be read.
        ties: how equal scores are counted; see `metrics.recall`.
        image_to_text: ``R@1``, ``R@5``, ``R@10`` in percent and ``medr``, the median rank; protocols of R-Precision
            have other numbers, see `protocols.table`.
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
    chance_rsum: float | None = None  # as of results that earlier versions wrote

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
        last = []
        if self.rsum is not None:
            last += [f"RSUM {self.rsum:.2f}", f"mean recall {self.mean_recall:.2f}"]
        if self.chance_rsum is not None:
            last.append(f"chance RSUM {self.chance_rsum:.2f}")
        if self.log_circular_variance is not None:
            last.append(f"log circular variance {self.log_circular_variance:.2f}")
        if last:
            lines.append(", ".join(last))
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
        generations: of each store, the one that was read; None where it never grew. Empty: not known.
    """

    runs: tuple[str, ...]
    stores: tuple[str, ...]
    views: tuple[int, ...]
    results: tuple[Result, ...]
    generations: tuple[int | None, ...] = ()

    @classmethod
    def of_one(cls, content: dict[str, Any]) -> "Evaluation":
        """Return the evaluation of one run that was written down with `to_dict`.

        Raises:
            KeyError, TypeError: it is of something else, or of several runs.
        """
        results, views = tuple(Result(**one) for one in content["results"]), content.get("views", 1)
        if not isinstance(views, int):
            raise TypeError("an evaluation of several runs")
        return cls((content["run"],), (content["store"],), (views,), results, (content.get("generation"),))

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON has it: ``run`` is a list of several, other keys where theirs differ."""
        return {
            "run": self.runs[0] if len(self.runs) == 1 else list(self.runs),
            "store": _one(self.stores),
            "generation": _one(self.generations) if any(self.generations) else None,
            "views": _one(self.views),
            "results": [asdict(result) for result in self.results],
        }

    def __str__(self) -> str:
        read = zip(self.stores, self.generations or (None,) * len(self.stores), strict=True)
        titles = [titled(*store) for store in read]
        first = f"{', '.join(self.runs)} on {'; '.join(titles if len(set(titles)) > 1 else titles[:1])}"
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
    device: str = "auto",
    annotations: str | Path | None = None,
    views: bool = False,
    image: str = "auto",
    text: str = "auto",
    scores: Scores | None = None,
) -> Evaluation:
    """Evaluate a run, several as an ensemble, or a store's frozen encoders; `xret.evaluate` explains the arguments.

    Args:
        protocol: of those that ``auto`` finds in the manifest, one that does not apply to these images is left out, as
            long as another does.
        scores: of a single run on this store and split, in the first view; None: they are computed.

    Raises:
        RunError: a run, the store's feature sets, the split or the protocol do not fit, or the runs of an ensemble
            do not see the same images and captions.
    """
    target = pick_device(device)
    require_ties(ties)
    several = [runs] if isinstance(runs, str | Path) else list(runs)
    if not several:
        raise RunError("there is no run to evaluate; name one, or a store")
    subjects = open_subjects(several, store, image, text)
    counts = _views(subjects) if views else (1,) * len(subjects)
    truths = _ground_truths(subjects[0], split, protocol, annotations)
    return _evaluate(subjects, counts, truths, split, ties, target, scores, every=protocol != "auto")


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
    subject = Subject(None, sets[0].cache, sets)
    truths = _ground_truths(subject, split, "auto", None)
    counts = _views([subject]) if views else (1,)
    return _evaluate([subject], counts, truths, split, ties, pick_device(device), every=False)


def _evaluate(
    subjects: Several[Subject],
    views: tuple[int, ...],
    truths: dict[str, GroundTruth],
    split: str,
    ties: Ties,
    device: torch.device,
    scores: Scores | None = None,
    *,
    every: bool,
) -> Evaluation:
    """Return the tables of subjects, each over so many views; of the protocols `every` one, or those that apply."""
    if scores is None:
        scores = _score(subjects, split, device, views)
    names = tuple(truths) if every else _applicable(tuple(truths), len(scores.ids))
    return Evaluation(
        tuple(subject.name for subject in subjects),
        tuple(subject.cache.url for subject in subjects),
        views,
        tuple(_result(name, truths[name], scores, subjects, split, ties) for name in names),
        tuple(generation_shown(subject.cache) for subject in subjects),
    )


def _views(subjects: Several[Subject]) -> tuple[int, ...]:
    """Return how many views of an image each one's features have; RunError where none has several."""
    images = [subject.sets[0] for subject in subjects]
    require_views(max(images, key=lambda features: features.views))
    return tuple(features.views for features in images)


def _ground_truths(
    subject: Subject, split: str, protocol: str, annotations: str | Path | None
) -> dict[str, GroundTruth]:
    """Return what each protocol compares with; refuse what does not cover the split before anything is embedded.

    Of several that the manifest names, those that cannot be used here are left out, with a line on standard error.
    """
    cache = subject.cache
    protocols = cache.protocols if protocol == "auto" else (protocol,)
    for name in protocols:
        if name not in PROTOCOLS:
            raise RunError(
                f"there is no protocol '{name}'{nearest(name, list(PROTOCOLS))}; `xret list protocols` lists them"
            )
    if annotations is not None and "pmrp" not in protocols:
        raise RunError(f"--annotations is for the protocol pmrp, and this is {', '.join(protocols)}; leave it out")
    truths: dict[str, GroundTruth] = {}
    refused: dict[str, RunError] = {}
    for name in protocols:
        try:
            truths[name] = _ground_truth(subject, split, name, annotations)
        except RunError as error:
            if name == "pmrp" and annotations is not None:  # then it is asked for
                raise
            refused[name] = error
    if refused and (not truths or protocol != "auto"):
        raise next(iter(refused.values()))
    for name, why in refused.items():
        print(f"protocol {name} is left out: {why}", file=sys.stderr)
    return truths


def _ground_truth(subject: Subject, split: str, protocol: str, annotations: str | Path | None) -> GroundTruth:
    """Return what a protocol compares with; RunError where it does not cover the split."""
    cache, truth = subject.cache, ground_truth(protocol, annotations)
    if truth is not None:
        samples = Split.of(*subject.sets, split)
        cocoid = cache.sample_array("cocoid")[samples.image_rows]
        sentid = cache.sentids(0, cache.captions)[samples.caption_rows]
        require(protocol, truth, cocoid, sentid, _where(cache, split))
    return truth


def _score(subjects: Several[Subject], split: str, device: torch.device, views: tuple[int, ...]) -> Scores:
    """Return the scores of one over so many views, or the mean of several's in the order of the first."""
    scores = subjects[0].score(split, device, views[0])
    for subject, count in zip(subjects[1:], views[1:], strict=True):
        _add(scores, subject.score(split, device, count), f"{subject.name} and {subjects[0].name}")
    scores.similarity.div_(len(subjects))
    return scores


def _result(
    protocol: str, truth: GroundTruth, scores: Scores, subjects: Several[Subject], split: str, ties: Ties
) -> Result:
    cache = subjects[0].cache
    found = table(protocol, truth, scores, ties, _where(cache, split))
    run = subjects[0].run if len(subjects) == 1 else None
    row = row_of(cache.dataset, protocol) if run is not None and split == "test" else None
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
        log_circular_variance=scores.log_circular_variance if len(subjects) == 1 else None,
        chance_rsum=None if found.rsum is None else chance_rsum(scores.caption_image, len(scores.ids), protocol),
    )


def _where(cache: FeatureCache, split: str) -> str:
    return f"split '{split}' of {cache.url}"


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


def _applicable(protocols: tuple[str, ...], images: int) -> tuple[str, ...]:
    """Leave 1k-folds out where it does not apply, with a line on standard error, if another protocol is left."""
    rest = tuple(name for name in protocols if name != "1k-folds")
    if images == FOLDED or not rest or rest == protocols:
        return protocols
    print(f"protocol 1k-folds is left out: it needs exactly {FOLDED:,} images, not {images:,}", file=sys.stderr)
    return rest
