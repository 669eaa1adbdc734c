"""An average of runs, itself a run: it embeds by all of them, and its scores are the weighted mean of theirs."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from ...pipeline.device import within_memory
from ...pipeline.errors import RunError
from ...pipeline.files import making
from ..runs.info import BRANCHES, RunInfo, absolute, versions
from ..runs.run import MEMBERS, WEIGHTS, Run, copy_sources, require_free, write_facts
from .evaluation import in_order
from .metrics import ranks, recall_table
from .scoring import Ranker, Scored, embed_split, lacking

Weights = Literal["equal", "validation"]
VAL, ROUNDS = "val", 25


@dataclass(frozen=True)
class Average:
    """What `average` has made; ``str`` shows it as a table."""

    run: str  # the folder
    weights: dict[str, float]  # by run; those with a weight of 0 are left out
    val_rsum: float
    of_each: dict[str, float]  # the RSUM on val of each run that was given

    def __str__(self) -> str:
        width = max(map(len, self.of_each))
        lines = [
            f"{name:{width}}  validation RSUM {rsum:6.1f}  weight {self.weights.get(name, 0.0):.3g}"
            for name, rsum in self.of_each.items()
        ]
        return "\n".join([*lines, f"{self.run}: their average, validation RSUM {self.val_rsum:.1f}"])


def average(
    runs: Sequence[str | Path],
    *,
    out: str | Path,
    weights: Weights = "equal",
    store: str | Path | None = None,
    device: str = "auto",
    trust: bool = False,
) -> Average:
    """Make a run of several runs, whose scores are the weighted mean of theirs (``xret average``).

    It is a run for all that ranks: evaluation, search, server, index, export, report. It holds copies of the runs'
    weights. If all compare vectors by cosine, a sample is embedded as one vector, theirs side by side.

    Args:
        runs: two or more runs of heads on one store, perhaps on features of different encoders.
        out: the folder of the new run; must not exist.
        weights: ``equal``, of the scores as they are; or by ``validation``: of scores in units of their deviation, the
            run that adds most to the RSUM on val is taken again and again (Caruana et al., *Ensemble Selection from
            Libraries of Models*, ICML 2004).
        store: where the feature store is now; None: where the runs were trained.
        device: ``auto``, ``cpu`` or ``cuda``.
        trust: let user-defined parts in a run that was not trained here run code.

    Raises:
        RunError: `out` exists; there are fewer than two runs; one is not finished, was fine-tuned, is an average, or is
            of other samples or words than the first.
        CacheError: the store cannot be used.
    """
    require_free(out)
    names = [str(run) for run in runs]
    if not 1 < len({Path(name).resolve() for name in names}) == len(names):
        raise RunError("an average is of two different runs or more; name each once")
    if weights not in get_args(Weights):
        raise RunError(f"weights is '{weights}', but must be {' or '.join(get_args(Weights))}")
    rankers = [Ranker(name, store=store, device=device, trust=trust) for name in names]
    opened = {name: ranker.run for name, ranker in zip(names, rankers, strict=True) if ranker.run is not None}
    reader = next((run for run in opened.values() if run.vocabulary), opened[names[0]])
    for run in opened.values():
        _require_fit(run, opened[names[0]], reader)
    with within_memory(rankers[0].device, *lacking(VAL)):
        scored = [embed_split(ranker, VAL) for ranker in rankers]
        chosen, of_each, best = _weigh(scored, names, weights)
    info = replace(_info([opened[name] for name in chosen], chosen, best), store=absolute(rankers[0].cache.url))
    with making(Path(out), RunError, "make room, or take another --out") as partial:
        write_facts(partial, info)
        for number, name in enumerate(chosen):
            (folder := partial / MEMBERS / str(number)).mkdir(parents=True)
            run = opened[name]
            for file in ("run.json", "recipe.yaml", WEIGHTS):
                shutil.copyfile(run.file(file), folder / file)
            copy_sources(run.recipe, folder)
    return Average(str(out), chosen, best, of_each)


def _require_fit(run: Run, first: Run, reader: Run) -> None:
    _ = run.weights  # of a finished epoch
    if run.info.finetuned is not None:
        raise RunError(
            f"{run.path} has fine-tuned encoders of its own, and an average is of heads on cached features; leave it"
            " out, or evaluate both together: xret eval RUN RUN"
        )
    if run.info.manifest_sha256 != first.info.manifest_sha256:
        raise RunError(f"{run.path} was trained on other samples than {first.path}; average runs of one store")
    if run.vocabulary and run.vocabulary != reader.vocabulary:
        raise RunError(f"{run.path} reads captions by other words than {reader.path}; average runs of one set of words")


def _weigh(
    scored: Sequence[Scored], names: Sequence[str], how: Weights
) -> tuple[dict[str, float], dict[str, float], float]:
    """Return the weights of runs that have one, the RSUM of each, and that of their average."""
    first = scored[0]
    matrices = [first.similarity]
    for name, other in zip(names[1:], scored[1:], strict=True):
        rows, columns = in_order(first, other, f"{name} and {names[0]} cannot be averaged")
        matrices.append(other.similarity[rows][:, columns])

    def rsum(matrix: torch.Tensor) -> float:
        return recall_table(*ranks(matrix, first.caption_image)).rsum

    of_each = dict(zip(names, map(rsum, matrices), strict=True))
    units, taken = [1.0] * len(names), [*range(len(names))]
    if how == "validation":
        units = [1 / (float(matrix.double().std()) or 1.0) for matrix in matrices]
        taken = _greedy([matrix * unit for matrix, unit in zip(matrices, units, strict=True)], rsum)
    shares = [taken.count(number) * unit for number, unit in enumerate(units)]
    weights = {name: share / sum(shares) for name, share in zip(names, shares, strict=True) if share}
    total = sum((share * matrix for share, matrix in zip(shares, matrices, strict=True)), torch.zeros(()))
    return weights, of_each, rsum(total)


def _greedy(matrices: Sequence[torch.Tensor], rsum: Any) -> list[int]:
    """Return which matrices were taken, some several times, for the sum with the best RSUM."""
    taken: list[int] = []
    best, kept, total = -1.0, 0, torch.zeros_like(matrices[0])
    for _ in range(ROUNDS):
        value, number = max((rsum(total + matrix), -number) for number, matrix in enumerate(matrices))
        taken.append(-number)
        total += matrices[-number]
        if value > best:
            best, kept = value, len(taken)
    return taken[:kept]


def _info(runs: Sequence[Run], weights: dict[str, float], rsum: float) -> RunInfo:
    sides: dict[str, Any] = {}
    for side in BRANCHES:
        sets: dict[str, tuple[Any, Any]] = {}
        for run in runs:
            facts = run.image_facts if side == "image" else run.text_facts
            for origin, fact in zip(run.info.origins(side), facts, strict=True):
                sets.setdefault(origin.fingerprint, (origin, fact))
        origins, of_each = zip(*sets.values(), strict=True)
        sides |= {side: origins, f"{side}_facts": of_each}
    first = runs[0]
    recipe = replace(
        first.recipe, name="average", paper=f"the average of {len(runs)} runs", reaches="cache", expected={}
    )
    return RunInfo(
        recipe=recipe,
        vocabulary=next((run.vocabulary for run in runs if run.vocabulary), None),
        store=first.info.store,
        manifest_sha256=first.info.manifest_sha256,
        average=weights,
        versions=versions(),
        best_rsum=rsum,
        **sides,
    )
