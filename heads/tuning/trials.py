"""The trials of a tuning: how one is trained, reports its epochs and is pruned."""

import json
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial

from ...pipeline.errors import NotFinite, OutOfMemory, RecipeError, RunError, XretError
from ...pipeline.reading.placement import Resident
from ...pipeline.wording import reason
from ..recipes.blocks import Recipe
from ..runs.run import Run
from ..series.processes import one_at_a_time
from ..training.display import Shown
from ..training.training import train

NAME = "tuning"  # of the one study in a journal
JOURNAL = "journal.log"


@dataclass(frozen=True)
class Job:
    """A trial: all that whoever trains it must know.

    Attributes:
        run: the run folder, absolute: ``OUT/trials/NUMBER``.
        store: the address of a generation of the feature cache.
        recipe: resolved, with the trial's values.
        seed: of the run.
        device: ``auto``, ``cpu`` or ``cuda``, where it is trained.
        number: of the trial.
        verbose: how much of its training is shown, see `display.Shown`.
    """

    run: str
    store: str
    recipe: Recipe
    seed: int
    device: str
    number: int
    verbose: bool | None = None


@dataclass(frozen=True)
class Outcome:
    """What came of a trial.

    Attributes:
        status: ``done``; ``pruned``; ``failed``, which its values may be the cause of; or ``stopped``, which is not
            the trial's fault: it can go on.
        rsum: the best validation RSUM; None before the first epoch.
        epochs: complete ones.
        seconds: that they took, validation included.
        error: the sentence that a failed or stopped trial ended in.
    """

    status: Literal["done", "pruned", "failed", "stopped"]
    rsum: float | None = None
    epochs: int = 0
    seconds: float = 0.0
    error: str | None = None


class Pruned(Exception):
    """Ends a training that others are ahead of."""


def open_journal(root: Path) -> JournalStorage:
    """Open, or begin, the journal of a tuning; any number of processes may do so at once.

    Raises:
        RunError: it is damaged.
    """
    try:
        # Optuna passes over a last line that is damaged, and fails at it when another one follows.
        for line in (root / JOURNAL).read_bytes().split(b"\n")[:-1] if (root / JOURNAL).exists() else []:
            json.loads(line)["op_code"]
        return JournalStorage(JournalFileBackend(str(root / JOURNAL)))
    except (ValueError, LookupError, TypeError, AttributeError, AssertionError) as error:  # as Optuna makes of it
        raise damaged(root) from error


def damaged(root: Path) -> RunError:
    """Return the error that says that the journal of a tuning is damaged."""
    return RunError(f"{root / JOURNAL} is damaged; restore it, or take another --out")


class Halving(optuna.pruners.BasePruner):
    """Decides which trials go on: those in the better half of all that have come as far, each by its best epoch.

    Successive halving, asynchronous: Li et al., *A System for Massively Parallel Hyperparameter Tuning* (MLSys 2020),
    after about a sixth of the epochs, and each time after twice as many. Optuna's own decides as this one does, but
    once: it notes that it was asked, so that a trial that was killed before it heard the answer would go on for good.
    This one depends on the reported values alone, and may be asked again.

    Args:
        epochs: of a whole training.
    """

    def __init__(self, epochs: int) -> None:
        first = max(1, epochs // 6)
        rungs = (first * 2**rung for rung in range(epochs.bit_length()))
        self.rungs = {rung for rung in rungs if rung < epochs}  # after the last one there is nothing to prune

    def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        """Return whether a trial ends after the last epoch that it has reported."""
        epoch = trial.last_step
        if epoch is None or epoch not in self.rungs:
            return False
        others = (one for one in study.get_trials(deepcopy=False) if one.number != trial.number)
        own = _best(trial, epoch)
        known = sorted([own, *(_best(one, epoch) for one in others if epoch in one.intermediate_values)], reverse=True)
        return own < known[max(1, len(known) // 2) - 1]


def _best(trial: FrozenTrial, epoch: int) -> float:
    """Return the best validation RSUM up to an epoch: it decides at the end, so it decides on the way."""
    return max(rsum for step, rsum in trial.intermediate_values.items() if step <= epoch)


def run_trial(job: Job, resident: Resident) -> Outcome:
    """Train a trial, or go on with it, until it is complete or pruned.

    Args:
        job: which.
        resident: features that other trials have in memory.
    """
    root = Path(job.run).parents[1]
    if not (root / "tuning.json").is_file():
        where = f"{root} is missing on {socket.gethostname()}"
        return Outcome("stopped", error=f"{where}: --out must be a folder that all workers share")
    try:
        after_epoch = _reporting(root, job.number, job.recipe.schedule.epochs)
        with one_at_a_time:
            train(
                job.store,
                job.recipe,
                job.run,
                device=job.device,
                seed=job.seed,
                resume=True,
                resident=resident,
                after_epoch=after_epoch,
                shown=Shown.of(job.verbose, "bar", f"trial {job.number}"),
            )
    except Pruned:
        return _outcome(job, "pruned")
    except NotFinite as error:
        return _outcome(job, "failed", error.seen)
    except (OutOfMemory, RecipeError) as error:
        return _outcome(job, "failed", str(error))
    except XretError as error:
        return Outcome("stopped", error=str(error))
    except OSError as error:
        return Outcome("stopped", error=f"{error}; mend it and run the same command again")
    except Exception as error:  # whatever one trial makes of it, the others are to be trained
        return _outcome(job, "failed", f"{type(error).__name__}: {reason(error)}")
    return _outcome(job, "done")


def _reporting(root: Path, number: int, epochs: int) -> Callable[[int, float], None]:
    """Return what writes each epoch's validation RSUM into the journal, and prunes."""
    storage = open_journal(root)
    study = optuna.load_study(study_name=NAME, storage=storage)
    study_id = storage.get_study_id_from_name(NAME)
    trial_id = storage.get_trial_id_from_study_id_trial_number(study_id, number)
    pruner = Halving(epochs)

    def after_epoch(epoch: int, rsum: float) -> None:
        known = storage.get_trial(trial_id).intermediate_values
        if epoch not in known:
            storage.set_trial_intermediate_value(trial_id, epoch, rsum)
        if pruner.prune(study, storage.get_trial(trial_id)):
            raise Pruned

    return after_epoch


def _outcome(job: Job, status: Literal["done", "pruned", "failed"], error: str | None = None) -> Outcome:
    if not (Path(job.run) / "run.json").is_file():
        return Outcome(status, error=error)
    lines = Run(job.run).metrics()
    rsum = max((line["rsum"] for line in lines), default=None)
    return Outcome(status, rsum, len(lines), round(sum(line["seconds"] for line in lines), 3), error)
