"""The study of a tuning: which trial is next, what became of each, and which run is kept.

One process asks for trials and counts them. Whoever trains one reports its epochs into the journal.
"""

import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.storages.journal import JournalFileSymlinkLock
from optuna.trial import FrozenTrial, TrialState

from ...pipeline.errors import RecipeError, RunError
from ...pipeline.files import remove
from ...pipeline.wording import counted, in_time
from ..recipes.blocks import Recipe
from ..recipes.recipe import faults_of
from ..runs.run import Run
from ..series.processes import Series
from .space import Choice, Range, Space, own_values, recipe_of
from .table import Trial
from .trials import JOURNAL, NAME, Halving, Job, Outcome, damaged, open_journal, run_trial

STARTUP = 6  # trials that are drawn at random before the sampler learns from them
_COUNTED = (TrialState.COMPLETE, TrialState.PRUNED)
_LOSSES = 2  # of its process, after which a trial has failed


class Study:
    """A study in a folder, open.

    Args:
        root: the folder, absolute; nobody else may have a study open there.
        store: the address of a generation of the feature cache.
        recipe: resolved; its own values, as far as the space has them, are the first trial.
        settings: ``KEY=VALUE`` that it was resolved with, which hold in all trials.
        space: what is varied.
        seed: of all runs, and with its number of what a trial draws.
        device: ``auto``, ``cpu`` or ``cuda``.
        trials: how many there shall be, all together.
        verbose: as of `tuning.tune`.

    Raises:
        RunError: the journal is damaged, or ``best`` is not the best trial's.
    """

    def __init__(
        self,
        root: Path,
        store: str,
        recipe: Recipe,
        settings: Sequence[str],
        space: Space,
        *,
        seed: int,
        device: str,
        trials: int,
        verbose: bool | None = None,
    ) -> None:
        self.root, self.store, self.recipe, self.settings, self.space = root, store, recipe, settings, space
        self.seed, self.device, self.trials, self.verbose = seed, device, trials, verbose
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        _mend(root / JOURNAL)
        self.storage = open_journal(root)
        how: dict[str, Any] = {"storage": self.storage, "pruner": Halving(recipe.schedule.epochs)}
        if NAME in optuna.get_all_study_names(self.storage):
            self.study = optuna.load_study(study_name=NAME, **how)
        elif self._has_best():
            raise damaged(root)
        else:
            self.study = optuna.create_study(study_name=NAME, direction="maximize", **how)
        self.distributions = {key: _distribution(dimension) for key, dimension in space.items()}
        self._require_whole()
        self.losses: Counter[int] = Counter()
        self.began, self.ended = 0.0, 0  # trials that this call has trained
        self.waiting = self._cut_off()[: self.left]
        self._settle()
        self._require_best()

    def begin(self) -> Series[Job, Outcome]:
        """Return the trials that are left, as `series` trains them; their time counts from now."""
        self.began = time.monotonic()
        return Series(self._next, run_trial, self._record, self._lost)

    @property
    def left(self) -> int:
        """How many trials are to be trained."""
        return max(0, self.trials - len(self._in(_COUNTED)))

    @property
    def results(self) -> tuple[Trial, ...]:
        """The trials that count, by their number."""
        return tuple(_trial(trial) for trial in self._in(_COUNTED))

    def any_job(self) -> Job:
        """Return a job with the recipe's own values, to load features by."""
        return Job(str(self.root / "trials" / "any"), self.store, self.recipe, self.seed, self.device, -1)

    def _in(self, states: tuple[TrialState, ...]) -> list[FrozenTrial]:
        return self.study.get_trials(deepcopy=False, states=states)

    def _require_whole(self) -> None:
        """Raise RunError where the journal has lost values of a trial, or all trials that came to their end."""
        done = self._in((TrialState.COMPLETE,))
        lost = (not done and self._has_best()) or any("rsum" not in trial.user_attrs for trial in done)
        if lost or any(trial.params.keys() != self.space.keys() for trial in self._in(_COUNTED)):
            raise damaged(self.root)

    def _has_best(self) -> bool:
        """Return whether a trial came to its end, as what stands beside the journal says."""
        return any((self.root / name).exists() for name in ("best", "best.yaml"))

    def _require_best(self) -> None:
        """Raise RunError where ``best`` is another run than that of the best trial, as the journal has it."""
        best, run = self._best(), self.root / "best"
        if best is not None and (run / "run.json").is_file() and (found := Run(run).info.best_rsum) != best.value:
            raise RunError(
                f"{run} has validation RSUM {found}, and trial {best.number}, the best in {self.root / JOURNAL}, has "
                f"{best.value}; restore the one or the other, or take another --out"
            )

    def _cut_off(self) -> list[int]:
        """Return the trials that a process left behind, to go on with; one without all of its values is given up."""
        found = []
        for trial in self._in((TrialState.RUNNING,)):
            if trial.params.keys() == self.space.keys():
                found.append(trial.number)
            else:
                self.study.tell(trial.number, state=TrialState.FAIL)
        if not self._in((*_COUNTED, TrialState.RUNNING, TrialState.WAITING)):
            self.study.enqueue_trial(own_values(self.space, self.recipe))
        return found

    def _next(self) -> Job | None:
        """Return the next trial, or None where there are enough."""
        while True:
            if self.waiting:
                number = self.waiting.pop(0)
            elif len(self._in((*_COUNTED, TrialState.RUNNING))) < self.trials:
                number = self._ask()
            else:
                return None
            run = str(self.root / "trials" / str(number))
            try:
                recipe = recipe_of(self.recipe, self.settings, self._frozen(number).params)
            except RecipeError as error:  # values that each fit alone
                job = Job(run, self.store, self.recipe, self.seed, self.device, number)
                self._record(job, Outcome("failed", error="; ".join(faults_of(error))))
                continue
            return Job(run, self.store, recipe, self.seed, self.device, number, self.verbose)

    def _ask(self) -> int:
        """Draw a trial from a generator seeded by the seed and its number: a study that was stopped draws the same."""
        begun = len(self._in((*_COUNTED, TrialState.RUNNING)))  # one that was given up is drawn anew
        seed = int(np.random.SeedSequence([self.seed, begun]).generate_state(1)[0])
        self.study.sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=STARTUP)
        return self.study.ask(self.distributions).number

    def _frozen(self, number: int) -> FrozenTrial:
        return self.study.get_trials(deepcopy=False)[number]

    def _record(self, job: Job, outcome: Outcome) -> None:
        """Write down what came of a trial, and keep its run if it is the best."""
        if outcome.status == "stopped":
            raise RunError(f"trial {job.number}: {outcome.error}")
        trial_id = self.storage.get_trial_id_from_study_id_trial_number(
            self.storage.get_study_id_from_name(NAME), job.number
        )
        for key in ("rsum", "epochs", "seconds", "error"):
            self.storage.set_trial_user_attr(trial_id, key, getattr(outcome, key))
        done = outcome.status == "done"
        # One that failed counts as pruned: the sampler keeps away from there.
        self.study.tell(job.number, outcome.rsum if done else None, None if done else TrialState.PRUNED)
        self._settle()
        self.ended += outcome.epochs > 0
        self._say(job, outcome)

    def _lost(self, job: Job, sentence: str) -> None:
        """Go on with a trial whose process died; one that dies again has failed."""
        self.losses[job.number] += 1
        if self.losses[job.number] < _LOSSES:
            print(f"trial {job.number}: {sentence}; it goes on", file=sys.stderr, flush=True)
            _mend(self.root / JOURNAL)
            self.waiting.append(job.number)
        else:
            self._record(job, Outcome("failed", error=sentence))

    def _settle(self) -> None:
        """Keep the run of the best trial as ``best``, and nothing of the others that have ended."""
        best, folder = self._best(), self.root / "trials"
        at_work = {str(trial.number) for trial in self._in((TrialState.RUNNING,))}
        for path in sorted(folder.iterdir()) if folder.is_dir() else []:
            if path.name.lstrip(".").partition(".")[0] in at_work:  # its run, its log, or its run being made
                continue
            if best is not None and path.name == str(best.number):
                place, before = self.root / "best", folder / "before.partial"
                for file in ("best.yaml", "result.json"):  # of the trial that was the best before
                    remove(self.root / file)
                if place.exists():
                    remove(before)
                    place.rename(before)
                path.rename(place)
                remove(before)
            elif not (path.suffix == ".log" and self._failed(path.stem)):
                remove(path)

    def _best(self) -> FrozenTrial | None:
        done = self._in((TrialState.COMPLETE,))
        return max(done, key=lambda trial: (trial.value, -trial.number), default=None)

    def _failed(self, number: str) -> bool:
        return any(str(trial.number) == number and trial.user_attrs.get("error") for trial in self._in(_COUNTED))

    def _say(self, job: Job, outcome: Outcome) -> None:
        best = self._best()
        said = f"failed: {outcome.error}"
        if outcome.status != "failed":
            said = f"{outcome.status} after {counted(outcome.epochs, 'epoch')}, validation RSUM {outcome.rsum:.2f}"
            if best is not None and best.number == job.number:
                said += ", the best so far"
        if outcome.status == "failed" or self.verbose is not False:
            passed = time.monotonic() - self.began
            line = f"trial {job.number}: {len(self._in(_COUNTED))} of {self.trials}, {passed:.0f} s"
            if self.left and self.ended > len(self._in((TrialState.RUNNING,))):  # before, those at work tell nothing
                line += f", about {in_time(passed / self.ended * self.left)} left"
            print(f"{line}: {said}", file=sys.stderr, flush=True)


def importances(trials: tuple[Trial, ...], space: Space) -> dict[str, float]:
    """Return how much of the variance of validation RSUM each key explains; together 1.

    Source: functional ANOVA over a random forest, Hutter, Hoos, Leyton-Brown: *An Efficient Approach for Assessing
    Hyperparameter Importance* (ICML 2014). A pruned trial counts with the RSUM that it had reached.

    Raises:
        RunError: fewer than two trials have an RSUM, or all have the same.
    """
    study = optuna.create_study(direction="maximize")
    distributions = {key: _distribution(dimension) for key, dimension in space.items()}
    known = [trial for trial in trials if trial.rsum is not None]
    if len(known) < 2:
        raise RunError("the importance of keys needs two trials that have finished an epoch; give more --trials")
    if len({trial.rsum for trial in known}) == 1:
        raise RunError(
            "no key is seen to matter: all trials reach the same RSUM; give more --trials, or another --space"
        )
    for trial in known:
        study.add_trial(optuna.trial.create_trial(params=trial.values, distributions=distributions, value=trial.rsum))
    return optuna.importance.get_param_importances(study, evaluator=optuna.importance.FanovaImportanceEvaluator(seed=0))


def _trial(trial: FrozenTrial) -> Trial:
    known = trial.user_attrs
    status = "failed" if known.get("error") else "done" if trial.state is TrialState.COMPLETE else "pruned"
    facts = (known.get("rsum"), known.get("epochs", 0), known.get("seconds", 0.0), known.get("error"))
    return Trial(trial.number, status, dict(trial.params), *facts)  # type: ignore[arg-type]


def _distribution(dimension: Range | Choice) -> BaseDistribution:
    if isinstance(dimension, Choice):
        return CategoricalDistribution(dimension.values)
    if dimension.whole:
        return IntDistribution(int(dimension.low), int(dimension.high), log=dimension.log)
    return FloatDistribution(dimension.low, dimension.high, log=dimension.log)


def _mend(journal: Path) -> None:
    """Cut off the line that a killed process was writing: the next would be appended to it, and both be lost."""
    if not journal.is_file():
        return
    lock = JournalFileSymlinkLock(str(journal))
    lock.acquire()
    try:
        with journal.open("rb+") as file:
            size = file.seek(0, os.SEEK_END)
            last = max(0, size - (1 << 20))
            file.seek(last)
            rest = file.read()
            if rest and not rest.endswith(b"\n"):
                file.truncate(last + rest.rfind(b"\n") + 1)
    finally:
        lock.release()
