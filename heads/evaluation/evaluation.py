"""Evaluation: the tables of a run, of several as an ensemble, or of frozen encoders without any head.

The similarities of an ensemble are the mean of its runs' (SetDiv, rows marked with a dagger). Its runs may have been
trained on different stores, as of regions and of a grid: images and captions are then matched by their ids. `metrics`
and `precision` say how ties are counted.
"""

import logging
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Several
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, get_args

from torch import Tensor, nn

from ...pipeline.errors import RunError
from ...pipeline.openmp import waiting_well
from ..model import in_one_space
from ..modules.similarity.sets import Direction
from ..runs.features import Sets
from ..runs.info import pictures_of
from .calibration import judge_calibration
from .hubness import CHOOSE, MULTIPLES, biases_of, require_bank, skewness
from .metrics import Ties, chance_rsum, recall_table, require_ties
from .own_model import Embedder
from .paper_rows import ROWS, row_of
from .protocols import Protocol, load_protocol, require_table
from .result import Evaluation, Hubness, Result
from .scoring import Frozen, Ranker, Scored, embed_split, is_store, open_frozen

T = TypeVar("T")
log = logging.getLogger("xret")


def evaluate(
    runs: str | Path | Embedder | Several[str | Path | Embedder],
    *,
    store: str | Path | None = None,
    split: str = "test",
    protocol: str = "auto",
    ties: Ties = "pessimistic",
    views: bool = False,
    hubness: bool = False,
    calibration: bool = False,
    direction: Direction | None = None,
    features: str = "auto",
    device: str = "auto",
    trust: bool = False,
) -> Evaluation:
    """Evaluate a run, several as an ensemble, or a store's frozen encoders (``xret eval``); ``print`` shows the tables.

    Args:
        runs: a run folder, a store, or a user-defined model, see `own_model.Embedder`; or several of them.
        store: another feature cache, with features of the same encoders; None: each run's own. A model needs it.
        split: whose images and captions.
        protocol: one that ``xret list protocols`` names, ``pmrp:FILE`` with COCO's annotations, or ``module:Class``
            for a user-defined `xret.metrics.Protocol`; ``auto``: those of the manifest.
        ties: how equal scores are counted, see `metrics.recall`.
        views: take the mean over all views that are cached of an image.
        hubness: correct hubness as well, by a bank of training queries; see the module `hubness`.
        calibration: see of a single run whether the probabilities of a search hold; see the module `calibration`.
        direction: of sets whose elements look for their nearest, those of ``image`` or ``caption`` alone, or of
            ``both``; None: as the run was trained.
        features: of a store with several sets in one space, or for a model, how the names of one of each begin,
            ``IMAGE,TEXT``.
        device: ``auto``, ``cpu`` or ``cuda``.
        trust: let user-defined parts in a run that was not trained here run code.

    Raises:
        RunError: a run, the feature sets or the protocol do not fit, or the runs of an ensemble do not see the same
            images and captions.
        CacheError: a store or its split cannot be used.
    """
    require_ties(ties)
    rankers = open_rankers(runs, store, features, device, trust)
    for ranker in rankers if direction is not None else ():
        compare: Any = copy(ranker.model.compare)  # that of a user's model stays as it is
        if not {direction, getattr(compare, "direction", None)} <= {*get_args(Direction)}:
            raise RunError(
                f"{ranker.name} does not compare by chamfer or smooth-chamfer, which have a direction"
                f" ({', '.join(get_args(Direction))}); leave it out"
            )
        compare.direction = direction
        ranker.model.compare = compare
    if calibration and (len(rankers) > 1 or views or direction is not None):
        raise RunError(
            "probabilities are those of a search: of a single run as it was trained, of the first view of images; leave"
            " calibration out"
        )
    evaluation = _evaluate(rankers, split, protocol=protocol, ties=ties, views=views, hubness=hubness)
    evaluation = replace(evaluation, direction=direction)
    return replace(evaluation, calibration=judge_calibration(rankers[0], split)) if calibration else evaluation


def open_rankers(
    runs: str | Path | Embedder | Several[str | Path | Embedder],
    store: str | Path | None,
    features: str,
    device: str,
    trust: bool,
) -> list[Ranker]:
    """Open runs, stores and models; arguments as of `evaluate`, RunError where there is none, or one is for none."""
    given = list(runs) if isinstance(runs, Iterable) and not isinstance(runs, str | nn.Module) else [runs]
    if not given:
        raise RunError("there is no run to evaluate; name one, or a store")
    stores = [isinstance(item, str | Path) and is_store(item) for item in given]
    if store is not None and all(stores):
        raise RunError("--store is another store for a run, and none is evaluated; name that store itself")
    runs_alone = all(isinstance(item, str | Path) for item in given) and not any(stores)

    def opened(item: str | Path | Embedder, frozen: bool) -> Ranker:
        if not isinstance(item, str | Path):
            return Ranker(item, store=store, features=features, device=device)
        if frozen:
            return open_frozen(str(item), device, features)
        ranker = Ranker(item, store=store, features=features if runs_alone else "auto", device=device, trust=trust)
        _warn_of_others(ranker)
        return ranker

    return [opened(*both) for both in zip(given, stores, strict=True)]


def _warn_of_others(ranker: Ranker) -> None:
    """Warn where a run was trained on features of other pictures than its store has them of now."""
    info = None if ranker.run is None else ranker.run.info
    if info is None or info.pictures is None or info.manifest_sha256 != ranker.cache.manifest_sha256:
        return
    for split, then in info.pictures.items():
        if then.split()[0] != pictures_of(split, ranker.sets[0]):
            words = ranker.name, split, ranker.cache.url
            log.warning("%s was trained with other pictures of %s than %s has features of now; train it again", *words)


def take_views(rankers: Several[Ranker]) -> None:
    """Let each ranker take the mean over all views that its store has of an image; RunError where none has several."""
    for ranker in rankers:
        ranker.views = ranker.sets[0].views
    if max(ranker.views for ranker in rankers) == 1:
        name, url = rankers[0].sets[0].name, rankers[0].cache.url
        raise RunError(
            f"'{name}' in {url} has one view of each image, so that there is no mean over views; leave --views out, or"
            " train on features of `xret extract --views`"
        )


def evaluate_untrained(sets: Sets, split: str, device: str = "auto", **how: Any) -> Evaluation | None:
    """Return what frozen encoders reach without a head; None where their features lie in no common space.

    Other arguments and errors are those of `evaluate`.
    """
    if not in_one_space(*sets):
        return None
    return _evaluate([Frozen(sets, device)], split, **how)


@waiting_well()
def _evaluate(
    rankers: Several[Ranker],
    split: str,
    *,
    protocol: str = "auto",
    ties: Ties = "pessimistic",
    views: bool = False,
    hubness: bool = False,
) -> Evaluation:
    if views:
        take_views(rankers)
    for ranker in rankers if hubness else ():
        require_bank(ranker.cache, split)
    measures = load_measures(rankers[0], protocol)
    whole = set(measures) != {"full"}
    if not hubness:
        return tables(rankers, _together(rankers, split, whole=whole)[0], measures, ties)
    scale, deviations, tried = choose_scale(rankers, ties)
    scales = () if scale is None else (scale,)
    scores, biases, _ = _together(rankers, split, scales, deviations, whole=whole)
    evaluation = tables(rankers, scores, measures, ties)
    skews, results = {"without": _skewness(scores)}, evaluation.results
    if biases is not None:
        scores = scores.biased(biases[0][0], biases[1][0])
        corrected = tables(rankers, scores, measures, ties).results
        results = tuple(replace(result, paper_rsum=None) for result in corrected)  # papers correct nothing
    skews["with"] = _skewness(scores)
    of_each = tuple(multiple / deviation for deviation in deviations for multiple in scales)
    return replace(evaluation, hubness=Hubness(scale, of_each, tried, skews, results))


def _together(
    rankers: Several[Ranker],
    split: str,
    scales: Several[float] = (),
    deviations: Several[float] = (),
    whole: bool = False,
) -> tuple[Scored, tuple[Tensor, Tensor] | None, tuple[float, ...]]:
    """Return the mean of the similarities that rankers give, of their biases with each scale, and the deviations.

    `scales` are in units of one over each ranker's deviation, by default that of its similarities here. `whole` is as
    of `embed_split`.
    """
    scores: Scored | None = None
    biases: tuple[Tensor, Tensor] | None = None
    for number, ranker in enumerate(rankers):
        other = embed_split(ranker, split, whole=whole)
        if len(deviations) == number:
            deviations = (*deviations, (other.deviation() if scales else 0.0) or 1.0)
        of_ranker = [scale / deviations[number] for scale in scales]
        share = biases_of(other, of_ranker) if scales else None
        if scores is None:
            scores, biases = other.without_embeddings(), share
            continue
        rows, columns = in_order(scores, other, f"{ranker.name} and {rankers[0].name} cannot be one ensemble")
        if scores.pairs is not None and other.pairs is not None:
            scores = replace(scores, pairs=scores.pairs.joined(other.pairs, rows, columns))
        else:
            scores.similarity.add_(other.similarity[rows][:, columns])
        if biases is not None and share is not None:
            biases = biases[0] + share[0][:, rows], biases[1] + share[1][:, columns]
    assert scores is not None, "there is a ranker"
    scores.similarity.div_(len(rankers))
    mean = biases and (biases[0] / len(rankers), biases[1] / len(rankers))
    return scores, mean, tuple(deviations)


def choose_scale(
    rankers: Several[Ranker], ties: Ties = "pessimistic"
) -> tuple[float | None, tuple[float, ...], dict[str, float]]:
    """Return the best scale on `CHOOSE`, each ranker's deviation there, and the RSUM of each scale that was tried."""
    scores, biases, deviations = _together(rankers, CHOOSE, MULTIPLES)
    assert biases is not None, "there are scales"
    rsums: dict[float | None, float] = {None: recall_table(*scores.ranks(), ties).rsum}
    for multiple, *bias in zip(MULTIPLES, *biases, strict=True):
        rsums[multiple] = recall_table(*scores.biased(*bias).ranks(), ties).rsum
    best = max(rsums, key=lambda multiple: rsums[multiple])
    return best, deviations, {"none" if multiple is None else f"{multiple:g}": rsum for multiple, rsum in rsums.items()}


def _skewness(scores: Scored) -> dict[str, float]:
    if scores.pairs is not None:  # it would need the order of all pairs
        return {}
    return {"image_to_text": skewness(scores.similarity), "text_to_image": skewness(scores.similarity.T)}


def load_measures(ranker: Ranker, protocol: str = "auto") -> dict[str, Protocol]:
    """Return what measures by each protocol of a manifest, or by a single one; errors of `load_protocol`."""
    auto = protocol == "auto"
    names = ranker.cache.protocols if auto else (protocol,)
    return dict(_of_each(names, lambda name: load_protocol(name, named=not auto)).values())


def tables(
    rankers: Several[Ranker], scores: Scored, measures: dict[str, Protocol], ties: Ties = "pessimistic"
) -> Evaluation:
    """Return the tables of scores that rankers, together, have given; RunError where no protocol applies."""
    results = _of_each(measures, lambda name: _result(name, measures[name], scores, rankers, ties))
    runs, stores, views = zip(*((ranker.name, ranker.cache.url, ranker.views) for ranker in rankers), strict=True)
    return Evaluation(runs, stores, views, tuple(results.values()))


def _of_each(protocols: Iterable[str], make: Callable[[str], T]) -> dict[str, T]:
    """Return what `make` gives for each protocol; those that it refuses are left out with a warning, unless all are."""
    accepted: dict[str, T] = {}
    refused: dict[str, RunError] = {}
    for protocol in protocols:
        try:
            accepted[protocol] = make(protocol)
        except RunError as error:
            refused[protocol] = error
    if not accepted:
        raise next(iter(refused.values()))
    for protocol, why in refused.items():
        log.warning("protocol %s is left out: %s", protocol, why)
    return accepted


def _result(protocol: str, measure: Protocol, scores: Scored, rankers: Several[Ranker], ties: Ties) -> Result:
    table, images, captions = measure(scores, ties), len(scores.ids), len(scores.texts)
    require_table(protocol, table)
    run = rankers[0].run if len(rankers) == 1 else None
    row = row_of(rankers[0].cache.dataset, protocol) if run is not None and scores.split == "test" else None
    of_papers_size = row is not None and ROWS[row].images == images
    return Result(
        split=scores.split,
        protocol=protocol,
        images=images,
        captions=captions,
        captions_per_image=captions / images,
        skipped=scores.skipped,
        ties=ties,
        image_to_text=table.image_to_text,
        text_to_image=table.text_to_image,
        rsum=table.rsum,
        mean_recall=None if table.rsum is None else table.rsum / 6,
        paper_rsum=run.recipe.expected.get(row) if run is not None and row and of_papers_size else None,
        log_circular_variance=scores.log_circular_variance if len(rankers) == 1 else None,
        chance_rsum=chance_rsum(scores.caption_image, images, protocol),
        frozen=run is not None and run.recipe.reaches == "finetune" and run.info.finetuned is None,
    )


def in_order(scores: Scored, other: Scored, fault: str) -> tuple[list[int], list[int]]:
    """Return where another run has our images and captions, in our order; RunError if it has others."""
    ours, theirs = _captions(scores), _captions(other)
    image_at = {name: row for row, name in enumerate(other.ids)}
    caption_at = {name: row for row, name in enumerate(theirs)}
    if image_at.keys() != set(scores.ids) or caption_at.keys() != set(ours):
        images, captions = len(image_at.keys() & set(scores.ids)), len(caption_at.keys() & set(ours))
        raise RunError(
            f"{fault}: of {len(other.ids):,} and {len(scores.ids):,} images {images:,} are in "
            f"both, of {len(theirs):,} and {len(ours):,} captions {captions:,}: they skip different samples, or their "
            "stores hold different ones"
        )
    return [image_at[name] for name in scores.ids], [caption_at[name] for name in ours]


def _captions(scores: Scored) -> list[tuple[str, int, str]]:
    """Return what distinguishes the captions: the id of the image, the number and the text."""
    owners = [scores.ids[row] for row in scores.caption_image.tolist()]
    return list(zip(owners, scores.sentid.tolist(), scores.texts, strict=True))
