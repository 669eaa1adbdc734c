"""Tuning: Optuna draws the trials, `train` trains them, and the best run is kept.

OUT/tuning.json    what is tuned: samples, feature sets, the recipe, the space, the seed
OUT/journal.log    Optuna's journal: the trials, their values and the validation RSUM of each epoch
OUT/trials/N/      the run of a trial that is not over
OUT/best/          the run of the best trial
OUT/best.yaml      its recipe
OUT/result.json    all trials, and what the best one reaches on the test split

Several processes may run the same command, also on several machines that share the folder: OUT/working is locked
while one trains trials, OUT/lock while one looks into the journal and changes it.
"""

import fcntl
import json
import logging
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.pruners import SuccessiveHalvingPruner
from optuna.samplers import TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from ...pipeline.errors import NotFinite, OutOfMemory, RecipeError, RunError
from ...pipeline.files import locked, remove, write_text
from ...pipeline.reading.placement import Resident
from ...pipeline.store import FeatureCache
from ...pipeline.wording import aligned, counted, in_time
from ..evaluation.evaluation import evaluate
from ..evaluation.result import Evaluation
from ..model import feature_facts, fitted
from ..recipes.blocks import Recipe
from ..recipes.recipe import load_recipe
from ..recipes.settings import normalised
from ..runs.info import absolute, pictures_of
from ..runs.run import Run, copy_sources, recipe_text
from ..series import as_text, claim, fitting_sets, identity, make_folder, set_names, skipped
from ..training.callbacks import Callback
from ..training.stacked import Stack
from ..training.stacking import refusal, structure
from ..training.train import checked_seed, train
from .space import Space, describe, ends, make_space

logger = logging.getLogger("xret")
STARTUP = 6  # trials that are drawn at random before the sampler learns from them; so many are trained together
SHOWN = 5  # trials in the table, or fewer where it would be wider than
WIDTH = 80  # columns
_Asked = tuple[optuna.Study, optuna.Trial]
_OWN = "own"  # marks a trial of the recipe's own values
_STATUS = {TrialState.COMPLETE: "done", TrialState.PRUNED: "pruned", TrialState.FAIL: "failed"}


@dataclass(frozen=True)
class Trial:
    """A trial that is over, ``done``, ``pruned`` or ``failed`` with an `error`; the first has the recipe's own values.

    `values` are of the keys that are varied; `rsum` is its best validation RSUM, of 600, None before the first of its
    complete `epochs`.
    """

    number: int
    status: str
    values: dict[str, Any]
    rsum: float | None
    epochs: int
    seconds: float
    error: str | None = None

    @classmethod
    def of(cls, trial: FrozenTrial) -> "Trial":
        """Return what Optuna has of a trial."""
        reported, seconds = trial.intermediate_values, trial.duration.total_seconds() if trial.duration else 0.0
        lost = "its process was killed" if trial.state is TrialState.FAIL else None
        rsum = trial.user_attrs.get("rsum", max(reported.values(), default=None))
        facts = rsum, len(reported), round(seconds, 3)
        return cls(trial.number, _STATUS[trial.state], trial.params, *facts, trial.user_attrs.get("error", lost))

    def cells(self, space: Mapping[str, str]) -> list[str]:
        """Return what a table shows of it, with its values of the keys of a space."""
        rsum, values = "-" if self.rsum is None else f"{self.rsum:.2f}", (self.values.get(key) for key in space)
        shown = (f"{value:.3g}" if isinstance(value, float) else as_text(value) for value in values)
        return [str(self.number), rsum, self.status, str(self.epochs), f"{self.seconds:.1f}", *shown]


@dataclass(frozen=True)
class Tuning:
    """What `tune` finds; ``str`` shows it as tables.

    `space` is what was varied, by key, as ``--space`` takes it; `best` has the highest validation RSUM, and its
    run is ``out/best``; `evaluation` is that run's on the test split. In `seconds`, those of trials at once count once.
    """

    recipe: str
    out: str
    space: dict[str, str]
    trials: tuple[Trial, ...]
    best: Trial
    evaluation: Evaluation
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        facts = {key: value for key, value in asdict(self).items() if key != "evaluation"}
        evaluation = self.evaluation.to_dict()
        return facts | {key: evaluation[key] for key in ("results", "hubness") if key in evaluation}

    def __str__(self) -> str:
        ranked = sorted(self.trials, key=lambda trial: (trial.status != "done", -(trial.rsum or 0), trial.number))
        own = [trial for trial in ranked[SHOWN:] if trial.values == self.trials[0].values][:1]
        columns = [["trial", "validation RSUM", "status", "epochs", "seconds", *self.space]]
        columns += [trial.cells(self.space) for trial in ranked[:SHOWN] + own]
        while len(columns) > 3 and sum(2 + max(map(len, column)) for column in columns) > WIDTH + 2:
            columns.pop(-2 if own else -1)
        pruned, failed = (sum(trial.status == status for trial in self.trials) for status in ("pruned", "failed"))
        ended = f"{pruned} pruned, {failed} failed, {in_time(self.seconds)}"
        head = f"{self.recipe}: {counted(len(self.trials), 'trial')}, {ended}"
        failures = [f"failed: trial {trial.number}: {trial.error}" for trial in self.trials if trial.error]
        return "\n".join([head, *aligned([*zip(*columns, strict=True)]), *failures, "", str(self.evaluation)])


@dataclass(frozen=True)
class _Study:
    root: Path
    store: str
    name: str
    recipe: Recipe
    settings: dict[str, Any]
    space: Space
    trials: int
    seed: int
    hubness: bool
    device: str

    def open(self) -> optuna.Study:
        """Open the journal, or begin it; the number of trials seeds the sampler, so that a stop changes nothing."""
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        study = optuna.create_study(
            study_name="tuning",
            storage=JournalStorage(JournalFileBackend(str(self.root / "journal.log"))),
            pruner=SuccessiveHalvingPruner(min_resource=max(1, self.recipe.schedule.epochs // 6), reduction_factor=2),
            direction="maximize",
            load_if_exists=True,
        )
        seed = np.random.SeedSequence([self.seed, len(study.trials)]).generate_state(1)[0]
        study.sampler = TPESampler(seed=int(seed), n_startup_trials=STARTUP)
        return study


def tune(
    store: str | Path,
    recipe: str | Path,
    out: str | Path,
    *,
    trials: int = 50,
    space: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    seed: int = 0,
    hubness: bool = False,
    device: str = "auto",
) -> Tuning:
    """Find the values of a recipe that suit a store, by validation RSUM, and keep the best run (``xret tune``).

    The sampler is Optuna's TPE, the pruner its successive halving (Li et al., *A System for Massively Parallel
    Hyperparameter Tuning*, MLSys 2020). Called again with the same options, it resumes, also in several processes at
    once; more `trials` add to those that are there. The test split is looked at when all trials are over.

    Args:
        store: the feature store.
        recipe: a name that ``xret recipes`` lists, or the path of a YAML file.
        out: the folder, of one recipe, space, seed and data set.
        trials: all together; pruned, failed and killed ones count.
        space: what is varied beside the bundled space, or in its place, such as
            ``{"optimizer.lr": "1e-4:1e-2:log", "model.dim": [256, 512]}``.
        settings: changes for all trials.
        seed: of every run, and of the values that are drawn.
        hubness: evaluate the best run also with hubness corrected.
        device: ``auto``, ``cpu`` or ``cuda``.

    Returns:
        Every trial, and what the best run reaches on the test split; ``print`` shows the tables.

    Raises:
        RecipeError, CacheError, RunError: as `ablate`; or no trial could be trained.
    """
    if trials < 1:
        raise RecipeError(f"trials must be at least 1, not {trials}")
    recipe, settings, seed = str(recipe), normalised(settings or {}), checked_seed(seed)
    loaded, url, root = load_recipe(recipe, settings), absolute(str(store)), Path(out).resolve()
    cache = FeatureCache.open(url)
    sets = fitting_sets(cache, loaded, ("train", "val", "test"))
    facts = feature_facts(sets[0]), feature_facts(sets[1])
    varied, first = make_space(recipe, *facts, space or {}, settings)
    for key, one in varied.items():
        for value in ends(one):
            fitting_sets(cache, load_recipe(recipe, settings | {key: value}), ())
    texts = {key: describe(one) for key, one in varied.items()}
    make_folder(root)
    own = {"name": loaded.name, "manifest_sha256": cache.manifest_sha256, "sets": set_names(sets), "seed": seed}
    own |= {"skipped": skipped(sets), "pictures": {split: pictures_of(split, sets[0]) for split in ("train", "val")}}
    study = _Study(root, url, recipe, loaded, settings, varied, trials, seed, hubness, device)
    with _locked(root / "lock"):
        claim(root, "tuning", own | {"space": texts, "recipe": identity(fitted(loaded, *facts))})
        _begin(study, first)
    for line in (f"space of {loaded.name}:", *aligned([[f"  {key}", of] for key, of in texts.items()])):
        logger.info("%s", line)
    with _locked(root / "working", fcntl.LOCK_SH):
        _train_trials(study)
    with _locked(root / "working"):  # waits for other processes
        return _result(study, texts)


def _begin(study: _Study, first: dict[str, Any]) -> None:
    """Let the `first` values, the recipe's own, be tried, unless they were, are or will be."""
    opened = study.open()
    with suppress(BlockingIOError), _locked(study.root / "working", fcntl.LOCK_EX | fcntl.LOCK_NB):
        _count_lost(opened)
    own = [trial for trial in opened.trials if _OWN in trial.user_attrs]
    if all(trial.state is TrialState.FAIL and "error" not in trial.user_attrs for trial in own):
        opened.enqueue_trial(first, user_attrs={_OWN: True})


def _count_lost(opened: optuna.Study) -> None:
    """Count as failed what is still running in the journal where nobody trains: it lost its process."""
    for lost in opened.get_trials(states=(TrialState.RUNNING,)):
        opened.tell(lost.number, state=TrialState.FAIL)


def _train_trials(study: _Study) -> None:
    resident, why = Resident(), refusal(study.recipe, study.store)
    if why:
        logger.info("trained one by one: %s", why)
    while asked := list(_asked(study, 1 if why else STARTUP)):
        groups: dict[Hashable, list[_Asked]] = {}
        for opened, trial in asked:
            recipe = load_recipe(study.name, study.settings | trial.params)
            groups.setdefault(structure(recipe), []).append((opened, trial))
        for group in groups.values():
            trainings = [partial(_train_trial, study, *one, resident) for one in group]
            for ended in Stack().run(trainings) if len(group) > 1 else ():
                ended.result()
            if len(group) == 1:
                trainings[0](None)


def _asked(study: _Study, number: int) -> Iterator[_Asked]:
    with _locked(study.root / "lock"):
        for _ in range(number):
            opened = study.open()
            waiting = [one.state is TrialState.WAITING for one in opened.trials]
            if len(waiting) >= study.trials and not any(waiting):
                return
            yield opened, opened.ask(study.space)


class _Pruner(Callback):
    """Reports the best validation RSUM of a trial after each epoch, and ends one that falls behind."""

    def __init__(self, trial: optuna.Trial, epochs: int) -> None:
        self.trial, self.epochs, self.best = trial, epochs, float("-inf")

    def on_epoch(self, epoch: int, step: int, values: Mapping[str, float]) -> None:
        self.best = max(self.best, values["rsum"])
        self.trial.report(self.best, epoch)
        if epoch < self.epochs and self.trial.should_prune():
            raise optuna.TrialPruned


def _train_trial(
    study: _Study, opened: optuna.Study, trial: optuna.Trial, resident: Resident, stack: Stack | None
) -> None:
    run, pruner = study.root / "trials" / str(trial.number), _Pruner(trial, study.recipe.schedule.epochs)
    state, error, kept = TrialState.FAIL, None, None

    try:
        recipe = load_recipe(study.name, study.settings | trial.params)
        how: dict[str, Any] = {"device": study.device, "seed": study.seed, "stack": stack}
        how["title"] = f"trial {trial.number}" if stack is None else None
        kept = train(study.store, recipe, run, resident=resident, callbacks=[pruner], **how).best_rsum
        trial.set_user_attr("rsum", kept)  # perhaps of what a residual begins with, by which no values differ
        state = TrialState.COMPLETE
    except optuna.TrialPruned:
        state = TrialState.PRUNED
    except (NotFinite, OutOfMemory, RecipeError) as failure:
        error = str(failure)
        trial.set_user_attr("error", error)
    finally:
        with _locked(study.root / "lock"):
            opened.tell(trial, pruner.best if state is TrialState.COMPLETE else None, state)
            _keep_best(opened, study.root)
    over = len(opened.get_trials(states=tuple(_STATUS)))
    words = (trial.number, over, study.trials, _STATUS[state], error or f"validation RSUM {kept or pruner.best:.2f}")
    logger.info("trial %d: %d of %d: %s, %s", *words)


def _keep_best(study: optuna.Study, root: Path) -> None:
    for trial in study.get_trials(states=tuple(_STATUS)):
        run = root / "trials" / str(trial.number)
        if trial.state is TrialState.COMPLETE and trial.number == study.best_trial.number and run.is_dir():
            remove(root / "best")
            run.rename(root / "best")
        remove(run)


def _result(study: _Study, space: dict[str, str]) -> Tuning:
    """Evaluate the best trial on the test split, and write down all of them; nobody trains now."""
    opened = study.open()
    _count_lost(opened)
    _keep_best(opened, study.root)
    over = opened.get_trials(states=tuple(_STATUS))
    trials = tuple(map(Trial.of, over))
    if all(trial.status != "done" for trial in trials):
        first = next((trial.error for trial in trials if trial.error), "all were pruned")
        raise RunError(f"none of the trials in {study.root} could be trained to its end; the first: {first}")
    best = next(trial for trial in trials if trial.number == opened.best_trial.number)
    recipe = Run(study.root / "best").recipe
    copy_sources(recipe, study.root)
    head = f"# {study.recipe.name}, tuned: validation RSUM {best.rsum:.2f} with --seed {study.seed} on {study.store}\n"
    write_text(study.root / "best.yaml", head + recipe_text(recipe.to_dict()), RunError)
    evaluation = evaluate(study.root / "best", store=study.store, hubness=study.hubness, device=study.device)
    tuning = Tuning(study.recipe.name, str(study.root), space, trials, best, evaluation, _seconds_of(over))
    write_text(study.root / "result.json", json.dumps(tuning.to_dict(), indent=1) + "\n", RunError)
    return tuning


def _seconds_of(trials: Sequence[FrozenTrial]) -> float:
    """Return how long any of the trials ran."""
    spent, until = timedelta(), datetime.min
    both = [(one.datetime_start, one.datetime_complete) for one in trials]
    for begun, ended in sorted((begun, ended) for begun, ended in both if begun and ended):
        spent += max(timedelta(), ended - max(begun, until))
        until = max(until, ended)
    return round(spent.total_seconds(), 3)


@contextmanager
def _locked(file: Path, how: int = fcntl.LOCK_EX) -> Iterator[None]:
    file.touch()
    with locked(file, how=how):
        yield
