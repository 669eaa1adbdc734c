"""An ablation: every variant of a recipe with every seed is a run, in one folder. It can be stopped and resumed.

OUT/ablation.json             what is varied, of which data set
OUT/VARIANT/seed=N/           a run, and its `eval.json`, the result of `evaluate`, with which the cell is finished
"""

import itertools
import json
import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote

import torch

from ...pipeline.device import cores
from ...pipeline.errors import RecipeError, RunError, XretError
from ...pipeline.files import locked, write_text
from ...pipeline.reading.placement import Resident
from ...pipeline.store import FeatureCache
from ...pipeline.wording import raised, reason
from ...pipeline.workers import connect, run_tasks
from ..evaluation.evaluation import evaluate, evaluate_untrained
from ..evaluation.hubness import require_bank
from ..evaluation.metrics import WAYS
from ..evaluation.paper_rows import row_of
from ..evaluation.result import Evaluation, Result
from ..model import feature_facts, fitted
from ..recipes.blocks import Recipe
from ..recipes.own import remember
from ..recipes.recipe import without_effect
from ..recipes.schema import difference
from ..recipes.settings import normalised
from ..runs.features import Sets
from ..runs.info import absolute, pictures_of
from ..runs.run import Run
from ..series import claim, fitting_sets, identity, make_folder, set_names, skipped
from ..training.stacked import AT_ONCE, Stack
from ..training.stacking import refusal, structure
from ..training.train import train
from .plan import Plan, Variant, make_plan
from .table import Entry, Line, as_text, require_saveable, save, summarise

logger = logging.getLogger("xret")
T = TypeVar("T")
_ONE_AT_A_TIME = threading.Lock()  # torch has one generator a process, which two trainings would share


@dataclass(frozen=True)
class Cell:
    """A variant with a seed: all that its training and evaluation need, wherever they happen."""

    run: str  # absolute
    store: str
    recipe: Recipe
    sets: tuple[str, ...]  # names of the feature sets
    seed: int
    split: str
    views: bool
    hubness: bool
    device: str
    alone: bool  # in its process, so that its training may show progress
    data: dict[str, Any]  # what it reads beside features: by split a digest of the files, and by what it is measured

    @property
    def title(self) -> str:
        """The cell in a line of progress."""
        return unquote("/".join(Path(self.run).parts[-2:]))

    @property
    def features(self) -> str:
        """The feature sets that the recipe names; cells with the same ones read the same arrays."""
        return f"{self.recipe.data.image} {self.recipe.data.text}"

    def evaluation(self) -> Evaluation | None:
        """Return the evaluation of a finished cell, or None; RunError where its run has read or learnt otherwise."""
        run = Path(self.run)
        if (run / "run.json").is_file():
            remember(self.recipe.code)
            trained = Run(run)
            if differing := difference(identity(trained.recipe), identity(self.recipe)):
                raise RunError(f"{run} has another recipe: {differing}; take another --out")
            names = tuple(one.name for one in (*trained.info.image, *trained.info.text))
            if names != self.sets:
                read = f"{' and '.join(names)} and would now read {' and '.join(self.sets)}"
                raise RunError(f"{run} has read {read}; take another --out")
            if not (trained.info.pictures or {}).items() <= self.data["pictures"].items():
                raise RunError(f"{run} has learnt other pictures than {self.store} has features of; take another --out")
        try:
            content = json.loads((run / "eval.json").read_text(encoding="utf-8"))
            found = Evaluation.of_one(content)
        except (OSError, ValueError, KeyError, TypeError):
            return None
        other = (found.views[0] > 1) != self.views or any(result.split != self.split for result in found.results)
        other |= content.get("data", self.data) != self.data
        if other or not found.results or (self.hubness and found.hubness is None):
            return None
        return found if self.hubness else replace(found, hubness=None)


@dataclass(frozen=True)
class Ablation:
    """What `ablate` finds; ``str`` shows it as a table.

    Attributes:
        entries: of each cell, one a protocol; a failed cell has one, without numbers.
        source: of a grid, the paper's table.
        untrained: of the frozen encoders by themselves, if their features lie in one space; one a protocol.
    """

    entries: tuple[Entry, ...]
    source: str | None = None
    untrained: tuple[Entry, ...] = ()

    @property
    def lines(self) -> list[Line]:
        """The lines of the table: mean and standard deviation over seeds."""
        return summarise([*self.untrained, *self.entries])

    @property
    def failed(self) -> tuple[Entry, ...]:
        """The cells that failed."""
        return tuple(entry for entry in self.entries if entry.error is not None)

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return the entries as JSON has them."""
        return [entry.to_dict() for entry in (*self.untrained, *self.entries)]

    def __str__(self) -> str:
        failures = [f"failed: {entry.label}, seed {entry.seed}: {entry.error}" for entry in self.failed]
        return "\n".join([*([self.source] if self.source else []), as_text(self.lines), *failures])


def ablate(
    store: str | Path,
    out: str | Path,
    *,
    recipe: str | Path | None = None,
    vary: Mapping[str, Sequence[Any]] | None = None,
    grid: str | None = None,
    settings: Mapping[str, Any] | None = None,
    baselines: str | Sequence[str] = (),
    split: str | None = None,
    views: bool = False,
    files: str | Path | Sequence[str | Path] = (),
    seeds: int = 1,
    hubness: bool = False,
    device: str = "auto",
    jobs: int | str = 1,
) -> Ablation:
    """Train a recipe in many variants and with several seeds, and evaluate each (``xret ablate``).

    Finished cells in `out` are kept: further values or seeds train only what is new. A cell that was interrupted is
    resumed after its last complete epoch. One that fails does not stop the others, and is tried again the next time.

    Args:
        store: the feature store.
        out: the folder of all runs, of one plan and data set.
        recipe: a name that ``xret recipes`` lists, or the path of a YAML file; with `grid` in the place of its own.
        vary: the values of each key, such as ``{"model.dim": [256, 512]}``.
        grid: a paper's, in the place of `vary`.
        settings: changes for all variants.
        baselines: recipes to compare with; only `settings` change them.
        split: the split to evaluate; None: ``test``, or that of the grid's paper.
        views: evaluate by the mean over all cached views of an image.
        files: to write the table to, ``.csv`` or ``.tex``, or to plot it to, ``.png``, ``.svg`` or ``.pdf``.
        seeds: how many; they are counted from 0.
        hubness: correct it as well, in tables of their own.
        device: ``auto``, ``cpu`` or ``cuda``.
        jobs: how many at once, in processes of this machine, which divide its cores (a number of threads decides last
            digits); or the address of a Dask cluster, whose workers must reach `store` and `out`.

    Returns:
        Every cell's numbers, or why it failed; ``print`` shows the table.

    Raises:
        RecipeError: a variant does not fit; all faults at once, before anything is trained.
        CacheError: the store or the cluster cannot be used.
        RunError: `out` belongs to something else, or is in use; or a file cannot have this table.
    """
    plan = make_plan(recipe, vary, grid, settings=settings, baselines=baselines, split=split, views=views)
    files = [files] if isinstance(files, str | Path) else files
    for file in files:
        require_saveable(Path(file), [variant.values for variant in plan.variants if not variant.baseline])
    if min(seeds, jobs if isinstance(jobs, int) else 1) < 1:
        raise RecipeError("seeds and jobs must be at least 1")
    root, url = Path(out).resolve(), absolute(str(store))
    cache = FeatureCache.open(url)
    sets_of = _sets_of_variants(cache, plan)
    if hubness:
        require_bank(cache, plan.split)
    untrained = tuple(_untrained(plan, sets_of, hubness, device))
    images, splits = {sets[0].name: sets[0] for sets in sets_of.values()}, ("train", "val", plan.split)
    pictures = {name: {split: pictures_of(split, one) for split in splits} for name, one in images.items()}
    cells: list[tuple[Variant, Cell]] = []
    for variant, seed in itertools.product(plan.variants, range(seeds)):
        sets, run = sets_of[variant.name], str(root / variant.name / f"seed={seed}")
        used = fitted(variant.recipe, *map(feature_facts, sets))
        data = {"pictures": pictures[sets[0].name], "protocols": [*cache.protocols]}
        how = plan.split, plan.views and sets[0].views > 1, hubness, device, jobs == 1, data
        cells.append((variant, Cell(run, url, used, tuple(set_names(sets)), seed, *how)))
    make_folder(root)
    with locked(root, RunError(f"another ablation is at work in {root}; wait until it has ended")):
        claim(root, "ablation", {"manifest_sha256": cache.manifest_sha256, **_read(plan, sets_of), **plan.description})
        outcomes = _outcomes([cell for _, cell in cells], jobs)
    rows = {row for variant in plan.variants for row in variant.paper}
    only = rows.pop() if len(rows) == 1 else None  # may be shown, with its name, for another data set
    entries: list[Entry] = []
    for variant, cell in cells:
        entries += _entries(variant, cell, outcomes[cell.run], cache.dataset, only)
    ablation = Ablation(tuple(entries), plan.source, untrained)
    for file in files:
        save(ablation.lines, Path(file))
    return ablation


def _read(plan: Plan, sets_of: Mapping[str, Sets]) -> dict[str, Any]:
    """Return the names of the feature sets that all variants read, and how many samples lack features."""
    first, *others = [sets_of[variant.name] for variant in plan.variants if not variant.baseline]
    if any(set_names(sets) != set_names(first) for sets in others):
        return {"sets": None}
    return {"sets": set_names(first), "skipped": skipped(first)}


def _entries(
    variant: Variant, cell: Cell, outcome: Evaluation | str, dataset: str, only: str | None
) -> Iterator[Entry]:
    first = variant.label, variant.values, cell.seed, cell.run
    if isinstance(outcome, str):
        yield Entry(*first, error=outcome)
        return
    for result, corrected in outcome.tables:
        row = row_of(dataset, result.protocol) or only
        paper = {} if corrected else variant.paper.get(row or "", {})
        yield Entry(*first, result, None, paper, row if paper else None, outcome.views[0], corrected)


def run_cell(cell: Cell, resident: Resident) -> Evaluation | str:
    """Train a cell, or resume it, and evaluate it; if that fails, return the sentence.

    `resident` has the features that other cells left in memory.
    """
    return train_cell(cell, resident) or evaluate_cell(cell)


def train_cell(cell: Cell, resident: Resident, stack: Stack | None = None) -> str | None:
    """Train a cell, or resume it, perhaps with those of a `stack`; if that fails, return the sentence."""
    run = Path(cell.run)
    if not (run.parents[1] / "ablation.json").is_file():
        return f"{run.parents[1]} is missing here: --out must be a folder that all workers share"
    how: dict[str, Any] = {"device": cell.device, "seed": cell.seed, "resume": True, "stack": stack}
    how["title"] = cell.title if cell.alone and stack is None else None
    found = _or_sentence(lambda: train(cell.store, cell.recipe, run, resident=resident, **how))
    return found if isinstance(found, str) else None


def evaluate_cell(cell: Cell) -> Evaluation | str:
    """Evaluate a cell that is trained; if that fails, return the sentence."""

    def evaluated() -> Evaluation:
        also: dict[str, Any] = {"device": cell.device, "views": cell.views, "hubness": cell.hubness}
        found = evaluate(cell.run, store=cell.store, split=cell.split, **also)
        content = found.to_dict() | {"data": cell.data}
        write_text(Path(cell.run) / "eval.json", json.dumps(content, indent=1) + "\n", RunError)
        return found

    return _or_sentence(evaluated)


def _or_sentence(work: Callable[[], T]) -> T | str:
    """Return what `work` does; of an error, which ends one cell and no other, the sentence."""
    try:
        return work()
    except XretError as error:
        return str(error)
    except Exception as error:
        return raised(error)


def _run_here(cells: Sequence[Cell]) -> Iterator[tuple[Cell, Evaluation | str]]:
    """Yield each cell with its result; those that differ in numbers alone are trained together."""
    groups: dict[Hashable, list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.features, structure(cell.recipe)), []).append(cell)
    for group in groups.values():
        resident = _resident(group[0].features, 1)
        for begin in range(0, len(group), AT_ONCE):
            together = group[begin : begin + AT_ONCE]
            why = refusal(group[0].recipe, group[0].store) if len(together) > 1 else None
            if why:
                logger.info("%s: one by one: %s", group[0].recipe.name, why)
            if why or len(together) == 1:
                for cell in together:
                    yield cell, run_cell(cell, resident)
                continue
            trained = Stack().run([partial(train_cell, cell, resident) for cell in together])
            for cell, future in zip(together, trained, strict=True):
                yield cell, future.result() or evaluate_cell(cell)


def run_all(cells: Sequence[Cell], where: int | str) -> Iterator[tuple[Cell, Evaluation | str]]:
    """Yield each cell with its result as they end; a sentence for a cell that killed its process.

    Cells with the same features stand together. `where` is a number of processes on this machine, 1: this process; or
    the address of a Dask cluster. CacheError where no scheduler answers, it has no workers, or it went away.
    """
    if where == 1:
        try:
            yield from _run_here(cells)
        finally:
            _resident.cache_clear()
        return
    from distributed import Client, LocalCluster

    with ExitStack() as opened:
        if isinstance(where, str):
            client = opened.enter_context(connect(where))
            work = partial(_on_cluster, run_cell)
        else:
            threads, log_level = max(1, min(torch.get_num_threads(), cores() // where)), logger.getEffectiveLevel()
            local: dict[str, Any] = {"dashboard_address": ":0", "memory_limit": 0, "silence_logs": logging.ERROR}
            cluster = opened.enter_context(LocalCluster(where, threads_per_worker=1, **local))
            client = opened.enter_context(Client(cluster, set_as_default=False))
            work = partial(_in_process, run_cell, threads, where, log_level)
        workers = client.scheduler_info(n_workers=-1)["workers"].values()
        resources = {"GPU": 1} if any("GPU" in worker["resources"] for worker in workers) else None
        for cell, outcome in run_tasks(client, work, cells, resources=resources):
            yield cell, f"its process died: {reason(outcome)}" if isinstance(outcome, Exception) else outcome


def _on_cluster(work: Callable[[Cell, Resident], Evaluation | str], cell: Cell) -> Evaluation | str:
    from distributed import get_worker

    with _ONE_AT_A_TIME:
        found = work(cell, Resident())
    return f"{found} (worker {get_worker().name})" if isinstance(found, str) else found


def _in_process(
    work: Callable[[Cell, Resident], Evaluation | str], threads: int, processes: int, level: int, cell: Cell
) -> Evaluation | str:
    """Do a cell in one of so many processes, which logs as its parent does; its features stay in memory."""
    torch.set_num_threads(threads)
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logger.setLevel(level)
    return work(cell, _resident(cell.features, processes))


@lru_cache(1)
def _resident(features: str, processes: int) -> Resident:
    """Return the arrays that cells with these features leave in memory for the next ones of this process."""
    return Resident(processes)


def _sets_of_variants(cache: FeatureCache, plan: Plan) -> dict[str, Sets]:
    """Return each variant's feature sets; refuse what cannot be trained or evaluated, each fault once."""
    found: dict[str, Sets] = {}
    faults: dict[str, list[str]] = {}
    for variant in plan.variants:
        try:
            found[variant.name] = fitting_sets(cache, variant.recipe, dict.fromkeys(("train", "val", plan.split)))
        except RecipeError as error:
            faults.setdefault(str(error), []).append(variant.label)
    if faults:
        several = {text: f"{' and '.join(of)}: " if len(of) < len(plan.variants) else "" for text, of in faults.items()}
        raise RecipeError("; ".join(f"{of}{text}" for text, of in several.items()))
    idle: dict[str, list[str]] = {}
    for variant in plan.variants:
        recipe = fitted(variant.recipe, *map(feature_facts, found[variant.name]))
        for key, warning in without_effect(variant.values, recipe).items():
            idle.setdefault(key, []).append(warning)
    for key, warnings in idle.items():
        if len(warnings) == sum(key in normalised(variant.values) for variant in plan.variants):
            logger.warning(warnings[0])
    if plan.views and all(sets[0].views == 1 for sets in found.values()):
        raise RunError(f"{cache.url} has one view of each image; extract it with --views, or leave --views out")
    return found


def _untrained(plan: Plan, sets_of: dict[str, Sets], hubness: bool, device: str) -> Iterator[Entry]:
    for sets in {str(set_names(sets)): sets for sets in sets_of.values()}.values():
        views = plan.views and sets[0].views > 1
        if found := evaluate_untrained(sets, plan.split, device=device, views=views, hubness=hubness):
            for result, corrected in found.tables:
                yield Entry(found.runs[0], {}, 0, found.stores[0], result, views=found.views[0], hubness=corrected)


def _outcomes(cells: Sequence[Cell], jobs: int | str) -> dict[str, Evaluation | str]:
    """Return by run every cell's evaluation or the sentence that it ended in; those not finished are trained."""
    outcomes: dict[str, Evaluation | str] = {}
    outcomes |= {cell.run: found for cell in cells if (found := cell.evaluation()) is not None}
    if outcomes:
        logger.info("cells finished already: %d of %d", len(outcomes), len(cells))
    left = [cell for cell in cells if cell.run not in outcomes]
    left.sort(key=lambda cell: cell.features)
    began = time.monotonic()
    for cell, outcome in run_all(left, jobs) if left else ():
        outcomes[cell.run] = outcome
        at = f"cell {len(outcomes)}/{len(cells)}, {time.monotonic() - began:.0f} s: {cell.title}"
        if isinstance(outcome, str):
            logger.warning("%s: failed: %s", at, outcome)
        else:
            logger.info("%s: %s", at, ", ".join(map(_in_short, outcome.results)))
    return outcomes


def _in_short(result: Result) -> str:
    """Return the RSUM of a protocol, or, if it has none, the first number of both directions."""
    if result.rsum is not None:
        return f"RSUM {result.rsum:.2f}"
    (name, there), (_, back) = (next(iter(getattr(result, way).items())) for way in WAYS)
    return f"{name} {there:.2f} / {back:.2f}"
