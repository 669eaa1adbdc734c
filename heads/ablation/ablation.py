"""An ablation: every variant of a recipe with every seed is a run, in one folder. It can be stopped and continued.

OUT/ablation.json             what is varied, of which data set
OUT/VARIANT/seed=N/           a run, and its `eval.json`, the result of `evaluate`, with which the cell is finished
OUT/VARIANT/seed=N.failed     the sentence that a cell ended in; it is tried again by the same command
OUT/VARIANT/seed=N.log        what a cell of several at once had to say
"""

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, groupby
from pathlib import Path
from typing import Any

from ...pipeline.cache.feature_cache import FeatureCache
from ...pipeline.device import pick_device
from ...pipeline.errors import RecipeError
from ...pipeline.files import write_text
from ...pipeline.reading.joined_sets import parts_of
from ..evaluation.evaluation import Result, evaluate_untrained
from ..evaluation.metrics import WAYS
from ..evaluation.paper_rows import row_of
from ..model import Facts, facts_of_each, feature_facts
from ..runs.features import require_views
from ..runs.info import as_told
from ..runs.run import Run
from ..series.checks import cache_of_series, claimed, complete_sets, require_buildable
from ..series.cluster import on_cluster
from ..series.processes import Series, at_once, in_processes, in_turn, load_features
from ..training.preparation import on_sets_of
from .cells import Cell, Outcome, run_cell
from .plan import Plan, Value, Variant, read_grid
from .table import Entry, Line, as_text, summarise


@dataclass(frozen=True)
class Ablation:
    """What `ablate` finds; ``str`` shows it as a table.

    Attributes:
        entries: of each cell, one a protocol; a failed cell has one, without numbers.
        source: the paper's table, of a grid.
        untrained: of the frozen encoders by themselves, where their features lie in one space; one a protocol.
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
        return tuple(entry for entry in self.entries if entry.status == "failed")

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return the entries as JSON has them."""
        return [asdict(entry) for entry in (*self.untrained, *self.entries)]

    def __str__(self) -> str:
        failures = [f"failed: {entry.label}, seed {entry.seed}: {entry.error}" for entry in self.failed]
        return "\n".join([*([self.source] if self.source else []), as_text(self.lines), *failures])


def ablate(
    store: str,
    plan: Plan,
    out: str | Path,
    *,
    seeds: int = 1,
    device: str = "auto",
    split: str | None = None,
    jobs: int = 1,
    scheduler: str | None = None,
    views: bool = False,
    verbose: bool | None = None,
) -> Ablation:
    """Train and evaluate every variant of a plan with every seed, but for those that are finished in `out`.

    A cell that is interrupted goes on after its last complete epoch. One that fails is recorded, does not stop the
    others, and is tried again the next time. `xret.ablate` explains the other arguments.

    Args:
        plan: of `make_plan`.
        out: the folder of all runs; it belongs to one plan and data set, to which values and seeds may be added.
        seeds: how many; they are counted from 0.
        jobs: cells at once, each in a process of its own, as torch has one generator a process. They share one copy
            of the features, as cells one after another do. On a CPU they need cores, see `processes.at_once`.
        scheduler: the address of a Dask cluster that trains the cells. Its workers must reach `store` and `out` by the
            same names. A worker process trains one cell at a time.
        verbose: show a line an epoch beside a bar and a line a cell; or, where it is False, none of it.

    Raises:
        RecipeError: `seeds` is below 1; or a variant does not fit the feature sets, all of them at once, before
            anything is trained.
        CacheError: the store or the cluster cannot be used.
        RunError: `out` belongs to something else, or is in use; or the generation on which it was begun was freed.
    """
    if seeds < 1:
        raise RecipeError(f"seeds must be at least 1, not {seeds}")
    if scheduler is None:
        jobs = at_once(jobs, pick_device(device))
    root = Path(out).resolve()
    cache = cache_of_series(store, [root / "ablation.json"], quiet=verbose is False)
    split = split or plan.split
    plan = _on_own_sets(plan, root, cache)
    facts, in_views = _check(cache, plan, split, views)
    untrained = tuple(_untrained(cache, plan, split, device, views))
    with claimed(root, "ablation", cache.known_by | plan.description, "wait until it has ended"):
        cells = []
        for variant in plan.variants:
            for seed in range(seeds):
                run = root / variant.name / f"seed={seed}"
                if (run / "run.json").is_file():
                    Run(run).refuse_difference(facts[variant.name] | {"seed": seed}, variant.recipe)
                how = split, device, variant.name in in_views, verbose
                cells.append((variant, Cell(str(run), cache.address, variant.recipe, seed, *how)))
        outcomes = _outcomes(root, [cell for _, cell in cells], jobs, scheduler, quiet=verbose is False)
    row = _only_row(plan)
    entries = (_entries(variant, cell, outcomes[cell.run], cache.dataset, row) for variant, cell in cells)
    return Ablation(tuple(chain.from_iterable(entries)), plan.source, untrained)


def _untrained(cache: FeatureCache, plan: Plan, split: str, device: str, views: bool) -> Iterator[Entry]:
    """Yield what the frozen encoders of each pair of feature sets in the plan reach without a head."""
    seen = set()
    for variant in plan.variants:
        sets = complete_sets(cache, variant.recipe, (split,))
        names = sets[0].name, sets[1].name
        several = views and sets[0].views > 1
        if names not in seen and (found := evaluate_untrained(sets, split, device=device, views=several)):
            for result in found.results:
                yield _entry(({}, found.runs[0], 0), cache.url, result, None, found.views[0])
        seen.add(names)


def _outcomes(
    root: Path, cells: Sequence[Cell], jobs: int, scheduler: str | None, *, quiet: bool
) -> dict[str, Outcome]:
    """Return every cell's outcome by its run; those that are not finished are trained."""
    outcomes: dict[str, Outcome] = {cell.run: found for cell in cells if (found := cell.evaluation()) is not None}
    # Features in memory are given back before others are read, so that a cell finds the room that it would have alone.
    waiting = sorted((cell for cell in cells if cell.run not in outcomes), key=_features)
    waiting = [replace(cell, count=f"cell {at}/{len(cells)}") for at, cell in enumerate(waiting, len(outcomes) + 1)]
    if outcomes and not quiet:
        print(f"cells finished already: {len(outcomes)} of {len(cells)}", file=sys.stderr)
    began = time.monotonic()

    def record(cell: Cell, outcome: Outcome) -> None:
        outcomes[cell.run] = outcome
        failed = Path(f"{cell.run}.failed")
        if isinstance(outcome, str):
            write_text(failed, f"{outcome}\n")
            said = f"failed: {outcome}"
        else:
            failed.unlink(missing_ok=True)
            said = ", ".join(_in_short(result) for result in outcome.results)
        if isinstance(outcome, str) or not quiet:
            at = f"cell {len(outcomes)}/{len(cells)}, {time.monotonic() - began:.0f} s"
            print(f"{at}: {cell.title}: {said}", file=sys.stderr, flush=True)

    def series(cells: Sequence[Cell]) -> Series[Cell, Outcome]:
        left = iter(cells)
        return Series(lambda: next(left, None), run_cell, record, record)

    if scheduler is not None:
        if waiting:
            on_cluster(series(waiting), scheduler, str(root), all_at_once=True)
        return outcomes
    for _, group in groupby(waiting, _features):
        same = list(group)
        if jobs > 1:
            in_processes(series(same), jobs, load_features(same))
        else:
            in_turn(series(same))
    return outcomes


def _in_short(result: Result) -> str:
    """Return the RSUM of a protocol, or, where it has none, the first number of both directions."""
    if result.rsum is not None:
        return f"RSUM {result.rsum:.2f}"
    (name, there), (_, back) = (next(iter(getattr(result, way).items())) for way in WAYS)
    return f"{name} {there:.2f} / {back:.2f}"


def _features(cell: Cell) -> tuple[str, str]:
    return str(cell.recipe.data.image), str(cell.recipe.data.text)


def _on_own_sets(plan: Plan, root: Path, cache: FeatureCache) -> Plan:
    """Return the plan with the feature sets of its earlier cells, where it means them; the store may have more now."""
    first, variants = next(iter(sorted(root.glob("*/seed=*/run.json"))), None), []
    for one in plan.variants:
        file = next(iter(sorted((root / one.name).glob("seed=*/run.json"))), first)
        variants.append(one if file is None else replace(one, recipe=on_sets_of(Run(file.parent), one.recipe, cache)))
    return replace(plan, variants=tuple(variants))


def _check(cache: FeatureCache, plan: Plan, split: str, views: bool) -> tuple[dict[str, dict[str, Any]], set[str]]:
    """Return by variant which samples and feature sets its runs are of, and which are evaluated in several views.

    What cannot be trained or evaluated is refused.
    """
    facts: dict[str, dict[str, Any]] = {}
    in_views: set[str] = set()
    faults: dict[str, list[str]] = {}  # a sentence, and the labels of the variants that it is true of
    for variant in plan.variants:
        image_set, caption_set = complete_sets(cache, variant.recipe, ("train", "val", split))
        if views and image_set.views > 1:
            in_views.add(variant.name)
        image_facts, text_facts = feature_facts(image_set), feature_facts(caption_set)
        sentences = _other_kinds(plan, variant, cache.url, image=image_facts, text=text_facts)
        try:
            require_buildable(variant.recipe, image_facts, text_facts)
        except RecipeError as error:
            sentences = sentences or [str(error)]
        for sentence in sentences:
            faults.setdefault(sentence, []).append(variant.label)
        facts[variant.name] = {
            "manifest_sha256": cache.manifest_sha256,
            "image_set": as_told([part.name for part in parts_of(image_set)]),
            "text_set": as_told([part.name for part in parts_of(caption_set)]),
            "also": None,
        }
    if views and not in_views:
        require_views(image_set)
    if faults:
        of_all = len(plan.variants)
        said = (f"{' and '.join(own)}: {text}" if len(own) < of_all else text for text, own in faults.items())
        raise RecipeError("; ".join(said))
    return facts, in_views


def _other_kinds(plan: Plan, variant: Variant, url: str, **facts: Facts) -> list[str]:
    """Return a sentence for each side whose features are of another kind than the recipe holds its paper's values for.

    A grid's recipes differ in their names alone: what is said names the grid, so that it is the same for all its cells.
    """
    recipe, system = variant.recipe, variant.recipe.name.split("/")[0]
    grid = None if variant.baseline else plan.description["grid"]
    replaceable = recipe.name != system and (grid is None or _takes_another(read_grid(grid), variant))
    owner = f"recipe '{recipe.name}'" if grid is None else f"grid '{grid}'"
    other = f"take --{'baseline' if variant.baseline else 'recipe'} {system}, or add " if replaceable else "add "
    sentences = []
    for side, of_side in facts.items():
        wanted, sets = getattr(recipe.data, f"{side}_kind"), facts_of_each(of_side)
        if wanted is not None and (strange := [found.kind for found in sets if found.kind != wanted]):
            several = len(sets) > 1 or any(f"data.{side}" in axis for axis in plan.axes)
            sentences.append(
                f"{owner} holds its paper's values for {side} features of kind '{wanted}', and those of {url} are of "
                f"kind '{strange[0]}'; {other}--set data.{side}_kind={'null' if several else strange[0]}"
            )
    return sentences


def _takes_another(grid: dict[str, Any], variant: Variant) -> bool:
    """Return whether ``--recipe`` replaces the recipe of a grid's cell."""
    return "recipe" in grid and not any("recipe" in cell for cell in grid["cells"] if cell["label"] == variant.label)


def _entries(variant: Variant, cell: Cell, outcome: Outcome, dataset: str, row: str | None) -> Iterator[Entry]:
    """Yield what became of a cell; `row` is the paper's where no row is of the data set."""
    first = variant.values, variant.label, cell.seed
    if isinstance(outcome, str):
        yield Entry(*first, "failed", cell.run, cell.split, error=outcome)
        return
    for result in outcome.results:
        own = row_of(dataset, result.protocol) or row
        paper = {"row": own, **variant.paper[own]} if own in variant.paper else None
        yield _entry(first, cell.run, result, paper, outcome.views[0])


def _entry(
    first: tuple[dict[str, Value], str, int], run: str, result: Result, paper: dict[str, Any] | None, views: int
) -> Entry:
    """Return the entry of a result over so many views; `first` is what the variant sets, its label and the seed."""
    return Entry(
        *first,
        "done",
        run,
        result.split,
        result.protocol,
        result.rsum,
        result.image_to_text,
        result.text_to_image,
        result.log_circular_variance,
        paper,
        ties=result.ties,
        images=result.images,
        views=views,
    )


def _only_row(plan: Plan) -> str | None:
    """Return the paper's row where it is the only one; it may be shown, with its name, for another data set."""
    rows = {row for variant in plan.variants for row in variant.paper}
    return rows.pop() if len(rows) == 1 else None
