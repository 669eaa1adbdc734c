"""What a tuning finds, as text, CSV, JSON and a plot."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from ...pipeline.files import making_file
from ...pipeline.wording import aligned, counted, in_time, rows_as_csv
from ..evaluation.evaluation import Evaluation
from .space import Value, written

SHOWN = 5  # trials in the table of a recipe


@dataclass(frozen=True)
class Trial:
    """What became of a trial.

    Attributes:
        number: counted from 0; the first has the recipe's own values.
        status: ``done``, ``pruned``, or ``failed``.
        values: of the keys that are varied.
        rsum: its best validation RSUM, of 600; None before the first epoch.
        epochs: complete ones.
        seconds: that they took, validation included.
        error: the sentence that a failed trial ended in.
    """

    number: int
    status: Literal["done", "pruned", "failed"]
    values: dict[str, Value]
    rsum: float | None
    epochs: int
    seconds: float
    error: str | None


@dataclass(frozen=True)
class Tuned:
    """What the tuning of a recipe finds; ``str`` shows it as tables.

    Attributes:
        recipe: its name.
        out: the folder, with ``best`` and ``best.yaml``.
        space: what was varied, by key, as ``--space`` takes it.
        trials: by their number.
        best: the one with the highest validation RSUM.
        evaluation: of its run on the test split.
    """

    recipe: str
    out: str
    space: dict[str, str]
    trials: tuple[Trial, ...]
    best: Trial
    evaluation: Evaluation

    def count(self, status: str) -> int:
        """Return how many trials have this status."""
        return sum(trial.status == status for trial in self.trials)

    @property
    def seconds(self) -> float:
        """Of the epochs of all trials."""
        return sum(trial.seconds for trial in self.trials)

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        own = {key: getattr(self, key) for key in ("recipe", "out", "space", "seconds")}
        trials = {"trials": [asdict(trial) for trial in self.trials], "best": asdict(self.best)}
        evaluation = self.evaluation.to_dict()
        return own | trials | {key: evaluation[key] for key in ("views", "results")}

    def __str__(self) -> str:
        keys = list(self.space)
        ranked = sorted(self.trials, key=lambda trial: (trial.status != "done", -(trial.rsum or 0), trial.number))
        shown = ranked[:SHOWN] + [trial for trial in ranked[SHOWN:] if trial.number == 0]
        rows = [["trial", "validation RSUM", "status", "epochs", "seconds", *keys]]
        for trial in shown:
            rsum = "-" if trial.rsum is None else f"{trial.rsum:.2f}"
            values = [_short(trial.values[key]) for key in keys]
            rows.append([str(trial.number), rsum, trial.status, str(trial.epochs), f"{trial.seconds:.1f}", *values])
        counts = f"{self.count('pruned')} pruned, {self.count('failed')} failed"
        head = f"{self.recipe}: {counted(len(self.trials), 'trial')}, {counts}, {in_time(self.seconds)}"
        failures = [f"failed: trial {trial.number}: {trial.error}" for trial in self.trials if trial.error]
        rest = ["the others are in trials.csv"] if len(shown) < len(self.trials) else []
        return "\n".join([head, *aligned(rows), *rest, *failures, "", str(self.evaluation)])


@dataclass(frozen=True)
class Tuning:
    """What `tune` finds; ``str`` shows it as tables.

    Attributes:
        recipes: a result a recipe, in the order that they were named in.
        failed: of each recipe of which no trial could be trained to its end, the sentence that says so.
    """

    recipes: tuple[Tuned, ...]
    failed: tuple[str, ...] = ()

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return it as JSON has it."""
        return [tuned.to_dict() for tuned in self.recipes]

    def __str__(self) -> str:
        parts = [str(tuned) for tuned in self.recipes]
        if len(parts) > 1:
            parts.append("\n".join(aligned([[_shown(cell) for cell in row] for row in self.comparison()])))
        if self.failed:
            parts.append("\n".join(f"failed: {sentence}" for sentence in self.failed))
        return "\n\n".join(parts)

    def comparison(self) -> list[list[str | int | float | None]]:
        """Return the table of the recipes, a row each after the names of its columns; None: not known."""
        results = {tuned.recipe: tuned.evaluation.results for tuned in self.recipes}
        protocols = dict.fromkeys(result.protocol for found in results.values() for result in found if result.rsum)
        rows: list[list[str | int | float | None]] = [
            ["recipe", "trials", "pruned", "failed", "seconds", "validation RSUM"]
        ]
        several = [max(tuned.evaluation.views) for tuned in self.recipes]
        if max(several) > 1:
            rows[0] += ["views"]
        for protocol in protocols:
            rows[0] += [f"test RSUM, {protocol}", f"mean recall, {protocol}"]
        for tuned in self.recipes:
            counts = [len(tuned.trials), tuned.count("pruned"), tuned.count("failed"), round(tuned.seconds)]
            rows.append([tuned.recipe, *counts, tuned.best.rsum])
            if max(several) > 1:
                rows[-1] += [max(tuned.evaluation.views)]
            for protocol in protocols:
                found = next((one for one in results[tuned.recipe] if one.protocol == protocol), None)
                rows[-1] += [None, None] if found is None else [found.rsum, found.mean_recall]
        return rows


def _shown(cell: str | float | None) -> str:
    return "-" if cell is None else f"{cell:.2f}" if isinstance(cell, float) else str(cell)


def as_csv(trials: tuple[Trial, ...]) -> str:
    """Return all trials as CSV: what became of each, and its values in full."""
    keys = list(dict.fromkeys(key for trial in trials for key in trial.values))
    facts = ("number", "status", "rsum", "epochs", "seconds", "error")
    rows = [[*(getattr(one, fact) for fact in facts), *(written(one.values[key]) for key in keys)] for one in trials]
    return rows_as_csv([[*facts, *keys], *rows])


def plot(shares: Mapping[str, float], file: Path) -> None:
    """Draw the importance of each key as a bar, the most important on top.

    Args:
        shares: by key.
        file: a PNG.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 1 + 0.3 * len(shares)), layout="constrained")
    axes = figure.subplots()
    ordered = sorted(shares.items(), key=lambda share: share[1])
    axes.barh([key for key, _ in ordered], [share for _, share in ordered])
    axes.set_xlabel("share of the variance of validation RSUM")
    with making_file(file) as partial:
        figure.savefig(partial, format="png")


def _short(value: Value) -> str:
    return f"{value:.3g}" if isinstance(value, float) else written(value)
