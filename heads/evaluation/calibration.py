"""Probabilities of answers: how likely an item belongs to a query, given the scores of the whole gallery.

The log-odds of item i are ``slope · s_i − log Σ_{j≠i} exp(slope · s_j) + offset``: a logistic of its score, whose
threshold is what all other items reach together. An item of a larger gallery so needs a higher score, and nothing is
fitted again where the size changes. With an offset of zero this is the softmax over the gallery, the posterior of an
item where exactly one fits. Slope and offset are those of the highest likelihood (Platt, *Probabilistic Outputs for
Support Vector Machines*, 1999) of the ten best answers to each query of `val`.

The gallery is taken to hold something that fits, as `val` does: nothing in the scores says how often it does not.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...pipeline.errors import RunError, XretError
from ...pipeline.files import write_text
from ..runs.info import pictures_of
from .metrics import WAYS
from .scoring import Ranker, embed_split

CHOOSE, BEST = "val", 10  # where it is fitted, on how many answers to each query
CELLS = 1 << 22  # of the similarities that it is fitted on, those of some queries with the whole gallery
GALLERIES, BINS, PRECISION = (100, 300, 1000), 10, 0.9  # that `reliability` looks at
FILE = "calibration.json"  # in a run


@dataclass(frozen=True)
class Calibration:
    """What turns the scores of a direction into probabilities, see the module."""

    slope: float
    offset: float

    def probabilities(self, scores: Tensor, rows: Any = slice(None)) -> Tensor:
        """Return the probability of N items, or of some `rows`, from all scores for a query, float64 ``[..., N]``."""
        return torch.sigmoid(_log_odds(scores.double() * self.slope, rows) + self.offset)


def fit_calibration(scores: Tensor, fits: Tensor) -> Calibration:
    """Return the calibration of the highest likelihood for scores ``[Q, N]``, with which items fit, bool ``[Q, N]``."""
    some = (
        torch.linspace(0, len(scores) - 1, min(len(scores), max(1, CELLS // scores.shape[1]))).long().to(scores.device)
    )
    scores, fits = scores[some].float(), fits[some]
    best = scores.topk(min(BEST, scores.shape[1]), dim=1).indices
    aims, deviation = fits.gather(1, best).float(), float(scores.std(correction=0)) or 1.0
    logarithm, offset = (torch.zeros((), device=scores.device, requires_grad=True) for _ in "ab")
    search = torch.optim.LBFGS([logarithm, offset], max_iter=50, tolerance_change=1e-6, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        search.zero_grad()
        odds = _log_odds(scores * (logarithm.exp() / deviation)).gather(1, best) + offset
        value = functional.binary_cross_entropy_with_logits(odds, aims)
        value.backward()
        return value

    search.step(loss)
    return Calibration(logarithm.exp().item() / deviation, offset.item())


def calibrations(ranker: Ranker) -> dict[str, Calibration] | None:
    """Return the calibration of each of `WAYS`; None where neither the run nor its store can give one.

    A run keeps it in `FILE` from the first time on; that of another store than its own is fitted there, and not kept.
    """
    run = ranker.run if ranker.run is not None and ranker.on_own_store else None
    digest, pictures = None if run is None else run.weights_digest, None
    with suppress(XretError, KeyError):  # a run that was handed on without its store keeps its calibration
        pictures = pictures_of(CHOOSE, ranker.sets[0])
    if run is not None and run.has(FILE):
        with suppress(ValueError, KeyError, TypeError, AttributeError):  # damaged: it is fitted again
            kept = json.loads(run.file(FILE).read_text(encoding="utf-8"))
            if kept["weights"] == digest and pictures in (None, kept.get("pictures")):
                return {way: Calibration(**kept[way]) for way in WAYS}
    try:
        scored = embed_split(ranker, CHOOSE)
    except XretError:  # a store or pictures that are not there, or no such split
        return None
    fitted = {way: fit_calibration(*both) for way, both in _queries(scored.similarity, scored.caption_image).items()}
    if run is not None:
        of_ways = {way: asdict(calibration) for way, calibration in fitted.items()}
        content = {"weights": digest, "pictures": pictures, **of_ways}
        with suppress(RunError):  # others' runs are read alone
            write_text(run.path / FILE, json.dumps(content), RunError)
    return fitted


@dataclass(frozen=True)
class Reliability:
    """How well the probabilities of a direction hold in galleries of some images, over the ten best answers."""

    images: int  # of each gallery
    galleries: int  # of which the answers are taken together
    first: float  # the mean probability of the first answer
    fits: float  # how many first answers fit
    first_ece: float  # expected calibration error of the first answers: the mean distance of the two, over ten bins
    ece: float  # the same of the ten best
    wrong: float  # of queries whose match is taken out of the gallery, how many still have an answer of 0.5 or more
    precise: float | None  # from which probability on nine of ten answers fit; None: from none
    bins: list[tuple[int, float, float]]  # of the ten best, by tenths: answers, mean probability, how many fit


@dataclass(frozen=True)
class CalibrationReport:
    """What ``xret eval --calibration`` shows; ``str`` is a table."""

    calibrations: dict[str, Calibration]  # of each of `WAYS`
    reliability: dict[str, list[Reliability]]  # likewise, from small galleries to the whole split

    def __str__(self) -> str:
        lines = [
            f"\nprobabilities, fitted on {CHOOSE}:{'first answer':>25}{f'{BEST} best':>11}{'no match':>12}",
            f"{'':16}{'gallery':>14}{'says':>9}{'fits':>9}{'ECE':>9}{'ECE':>9}{'0.5 says':>12}{'90% fit from':>15}",
        ]
        for way, several in self.reliability.items():
            for row in several:
                values = "".join(f"{value:9.3f}" for value in (row.first, row.fits, row.first_ece, row.ece))
                precise = "none" if row.precise is None else f"{row.precise:.2f}"
                lines.append(
                    f"{way.replace('_', ' '):16}{f'{row.images:,} images':>14}{values}{row.wrong:12.3f}{precise:>15}"
                )
        lines.append(f"how many of the {BEST} best fit in the whole split:")
        lines.append(f"{'probability':16}" + "".join(f"{way.replace('_', ' '):>28}" for way in WAYS))
        for tenth, both in enumerate(zip(*(self.reliability[way][-1].bins for way in WAYS), strict=True)):
            cells = [f"{count:10,} answers, {fits:7.1%}" if count else "none" for count, _, fits in both]
            lines.append(f"{f'{tenth / BINS:.1f} to {(tenth + 1) / BINS:.1f}':16}" + "".join(f"{c:>28}" for c in cells))
        return "\n".join(lines)


def judge_calibration(ranker: Ranker, split: str) -> CalibrationReport:
    """Return how well the probabilities fitted on `val` hold on another split; RunError where they cannot be had."""
    if split == CHOOSE:
        raise RunError(f"probabilities are fitted on '{CHOOSE}', which cannot judge them; take another split")
    if (fitted := calibrations(ranker)) is None:
        raise RunError(f"{ranker.cache.url} has no complete '{CHOOSE}', on which probabilities are fitted")
    report: dict[str, list[Reliability]] = {way: [] for way in WAYS}
    scored = embed_split(ranker, split)
    images = len(scored.ids)
    order = torch.randperm(images, generator=torch.Generator().manual_seed(0)).to(scored.similarity.device)
    for size in (*(size for size in GALLERIES if size < images), images):
        parts: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {way: [] for way in WAYS}
        for rows in order.split(size)[: images // size]:
            columns = torch.isin(scored.caption_image.to(rows.device), rows)
            owner = torch.empty(images, dtype=torch.long, device=rows.device)
            owner[rows] = torch.arange(size, device=rows.device)
            part = scored.similarity[rows][:, columns]
            for way, (scores, fits) in _queries(part, owner[scored.caption_image.to(rows.device)[columns]]).items():
                best = scores.topk(min(BEST, scores.shape[1]), dim=1).indices
                lost = fitted[way].probabilities(scores.masked_fill(fits, -torch.inf)).amax(1)
                parts[way].append((fitted[way].probabilities(scores).gather(1, best), fits.gather(1, best), lost))
        for way, several in parts.items():
            report[way].append(
                reliability(size, len(several), *(torch.cat(all_).cpu() for all_ in zip(*several, strict=True)))
            )
    return CalibrationReport(fitted, report)


def reliability(images: int, galleries: int, said: Tensor, fits: Tensor, lost: Tensor) -> Reliability:
    """Return how well probabilities ``[Q, K]`` of answers, best first, hold, with which fit, bool ``[Q, K]``.

    `lost` is the highest one of each query where what fits is taken out, ``[Q]``.
    """
    flat, right = said.flatten(), fits.flatten().double()
    order = flat.argsort(descending=True, stable=True)
    falling, share = flat[order], right[order].cumsum(0) / torch.arange(1, len(flat) + 1)
    apart = falling.diff(append=falling.new_full((1,), -1)) != 0  # a threshold takes all that are equal, or none
    last = ((share >= PRECISION) & apart).nonzero()
    return Reliability(
        images,
        galleries,
        first=float(said[:, 0].mean()),
        fits=float(fits[:, 0].double().mean()),
        first_ece=expected_error(_bins(said[:, 0], fits[:, 0].double())),
        ece=expected_error(bins := _bins(flat, right)),
        wrong=float((lost >= 0.5).double().mean()),
        precise=float(falling[last[-1, 0]]) if len(last) else None,
        bins=bins,
    )


def expected_error(bins: Sequence[tuple[int, float, float]]) -> float:
    """Return the expected calibration error of bins: answers, mean probability, how many fit (Guo et al., 2017)."""
    return sum(count * abs(mean - fits) for count, mean, fits in bins) / sum(count for count, _, _ in bins)


def _bins(said: Tensor, fits: Tensor) -> list[tuple[int, float, float]]:
    number = (said * BINS).long().clamp(max=BINS - 1)
    chosen = (number == bin_ for bin_ in range(BINS))
    return [
        (int(inside.sum()), *((float(said[inside].mean()), float(fits[inside].mean())) if inside.any() else (0.0, 0.0)))
        for inside in chosen
    ]


def _queries(similarity: Tensor, caption_image: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the scores of each direction's queries, a row each, and which items fit, of similarities ``[I, C]``."""
    fits = caption_image.to(similarity.device) == torch.arange(len(similarity), device=similarity.device)[:, None]
    asks = fits.any(1)  # images without a caption ask nothing
    return {"image_to_text": (similarity[asks], fits[asks]), "text_to_image": (similarity.T, fits.T)}


def _log_odds(scaled: Tensor, rows: Any = slice(None)) -> Tensor:
    """Return the log-odds of a softmax over the last dimension, in some rows of it."""
    share = scaled.log_softmax(-1)[..., rows]
    return share - torch.log(-torch.expm1(share).clamp(max=-torch.finfo(share.dtype).tiny))
