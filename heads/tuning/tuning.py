"""Tuning: many trials of a recipe on one cache, of which the best is kept. It can be stopped and continued.

OUT/tuning.json        what is tuned: samples, feature sets, the recipe in full, the space, the seed
OUT/journal.log        Optuna's journal: the trials, their values and the validation RSUM of each epoch
OUT/trials/NUMBER/     the run of a trial that is not over
OUT/best/              the run of the best trial
OUT/best.yaml          its recipe
OUT/result.json        what it reaches on the test split, looked at once all trials are over
OUT/trials.csv         the table of all trials
OUT/importance.png     which keys decide

Of several recipes each has a folder OUT/RECIPE like that, and OUT/comparison.csv compares those of the last command.
"""

import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from ...pipeline.cache.feature_cache import FeatureCache
from ...pipeline.device import pick_device
from ...pipeline.documents import read_json
from ...pipeline.errors import RecipeError, RunError
from ...pipeline.files import write_text
from ...pipeline.reading.joined_sets import parts_of
from ...pipeline.versions import require_packages
from ...pipeline.wording import aligned, counted, rows_as_csv
from ..evaluation.evaluation import Evaluation, evaluate
from ..evaluation.metrics import Ties, require_ties
from ..model import feature_facts
from ..recipes.blocks import Recipe
from ..recipes.names import recipe_names
from ..recipes.recipe import key_of, load_recipe, resolve
from ..runs.config import flat
from ..runs.features import on_own_sets, require_views
from ..runs.info import as_told
from ..runs.run import WEIGHTS, write_json
from ..series.checks import cache_of_series, claimed, complete_sets, require_buildable
from ..series.cluster import on_cluster
from ..series.processes import at_once, in_processes, in_turn, load_features
from ..training.preparation import checked_seed
from .space import Space, make_space, recipe_of
from .table import Trial, Tuned, Tuning, as_csv, plot

if TYPE_CHECKING:
    from .study import Study

_SPLITS = ("train", "val", "test")


class _Planned(NamedTuple):
    """A recipe that shall be tuned, checked."""

    name: str  # as the user wrote it
    root: Path
    recipe: Recipe  # as it was loaded
    on_sets: Recipe  # with the feature sets that the tuning was begun with in the place of auto
    space: Space
    description: dict[str, Any]


def tune(
    store: str,
    recipes: Sequence[str],
    out: str | Path,
    *,
    trials: int = 50,
    space: Sequence[str] = (),
    settings: Sequence[str] = (),
    ties: Ties = "pessimistic",
    views: bool = False,
    seed: int = 0,
    device: str = "auto",
    jobs: int = 1,
    scheduler: str | None = None,
    plotted: bool = False,
    verbose: bool | None = None,
) -> Tuning:
    """Tune recipes on a feature cache, each with the same number of trials; the best run of each is kept.

    The sampler is Optuna's TPE, the pruner `trials.Halving`. The test split is looked at when all trials are over.

    Args:
        store: the feature cache.
        recipes: bundled names or paths of YAML files.
        out: the folder; it belongs to one recipe, space, seed and data set, to which trials may be added. Of several
            recipes each has one in it.
        trials: of each recipe all together, pruned ones included.
        space: what is varied beside the bundled space, or in its place; see `space.make_space`.
        settings: ``KEY=VALUE``, for all trials.
        ties: see `metrics.recall`; on the test split.
        views: there, take the mean over all cached views of an image; validation is of the first.
        seed: of every run, and of what is drawn.
        device: ``auto``, ``cpu`` or ``cuda``.
        plotted: draw the importance of the keys.
        jobs, scheduler, verbose: as of `ablation.ablate`, of trials.

    Raises:
        RecipeError: `trials` is below 1, there is no such seed; or a recipe, its space or the feature sets do not fit,
            all faults at once, before anything is trained.
        CacheError: the store or the cluster cannot be used.
        RunError: there is no such rule for ties, Optuna is missing, `out` is in use or of something else or freed
            samples, or has more trials of one of several recipes; or no trial was trained.
    """
    _require(plotted)
    if trials < 1:
        raise RecipeError(f"trials must be at least 1, not {trials}")
    seed = checked_seed(seed)
    require_ties(ties)
    if scheduler is None:
        jobs = at_once(jobs, pick_device(device))
    from .study import Study

    roots = _roots(recipes, Path(out).resolve())
    found, failed = [], []
    cache = cache_of_series(store, [root / "tuning.json" for root in roots], quiet=verbose is False)
    plans = _plans(cache, recipes, roots, space, settings, seed, views)
    comparison = Path(out).resolve() / "comparison.csv"
    with ExitStack() as held:
        for plan in plans:
            busy = "wait until it has ended, or stop it and use --jobs, which trains several trials at once"
            held.enter_context(claimed(plan.root, "tuning", plan.description, busy, _understood))
        studies = [
            Study(
                plan.root,
                cache.address,
                plan.on_sets,
                settings,
                plan.space,
                seed=seed,
                device=device,
                trials=trials,
                verbose=verbose,
            )
            for plan in plans
        ]
        if len(plans) > 1:
            _require_as_many(studies)
            _forget(comparison)
        for plan, study in zip(plans, studies, strict=True):
            if verbose is not False:
                _say_space(plan)
            if verbose is not False and (done := len(study.results)):
                print(f"trials finished already: {done} of {max(done, trials)}", file=sys.stderr, flush=True)
            _train(study, jobs, scheduler)
            write_text(plan.root / "trials.csv", as_csv(study.results), RunError)
            if not any(trial.status == "done" for trial in study.results):  # the other recipes are tuned all the same
                failed.append(_none_done(study))
                continue
            found.append(_tuned(plan, study, ties, views, device))
            if plotted:
                _draw(plan, found[-1].trials)
    if not found:
        raise RunError("; ".join(failed))
    tuning = Tuning(tuple(found), tuple(failed))
    if len(plans) > 1:
        write_text(comparison, rows_as_csv(tuning.comparison()), RunError)
    return tuning


def _require(plotted: bool) -> None:
    """Refuse a tuning without the packages that it needs."""
    require_packages("tuning needs", {"Optuna": "optuna"}, "tune")
    if plotted:
        require_packages("--plot needs", {"matplotlib": "matplotlib", "scikit-learn": "sklearn"}, "report")


def _roots(recipes: Sequence[str], out: Path) -> list[Path]:
    """Return the folder of each recipe."""
    if not recipes:
        raise RecipeError("name a --recipe to tune")
    roots = [out] if len(recipes) == 1 else [out / _folder(name) for name in recipes]
    if len(set(roots)) < len(roots):
        raise RecipeError(f"two of the recipes {', '.join(recipes)} have one name, and would share a folder")
    if len(recipes) > 1 and (out / "tuning.json").exists():
        raise RunError(f"{out} belongs to the tuning of a single recipe; take another --out")
    return roots


def _plans(
    cache: FeatureCache,
    recipes: Sequence[str],
    roots: Sequence[Path],
    space: Sequence[str],
    settings: Sequence[str],
    seed: int,
    views: bool,
) -> list[_Planned]:
    """Check all recipes and their spaces; raise all faults at once."""
    plans, faults = [], []
    for name, root in zip(recipes, roots, strict=True):
        try:
            recipe = load_recipe(name, settings)
            on_sets = _on_own_sets(recipe, root, cache)
            sets = complete_sets(cache, on_sets, _SPLITS)
            if views:
                require_views(sets[0])
            facts = feature_facts(sets[0]), feature_facts(sets[1])
            require_buildable(recipe, *facts)
            own = make_space(recipe, *facts, space, settings)
        except RecipeError as error:
            faults.append(str(error))
            continue
        description = {
            "name": recipe.name,
            **cache.known_by,
            "image_set": as_told([part.name for part in parts_of(sets[0])]),
            "text_set": as_told([part.name for part in parts_of(sets[1])]),
            "seed": seed,
            "space": {key: str(dimension) for key, dimension in own.items()},
            "recipe": recipe.to_dict(),
            "settings": [setting for setting in settings if key_of(setting) not in flat(recipe.to_dict())] or None,
        }
        plans.append(_Planned(name, root, recipe, on_sets, own, description))
    if faults:
        raise RecipeError("; ".join(dict.fromkeys(faults)))
    return plans


def _folder(recipe: str) -> str:
    return recipe.replace("/", "-") if recipe in recipe_names() else Path(recipe).stem


def _on_own_sets(recipe: Recipe, root: Path, cache: FeatureCache) -> Recipe:
    """Return the recipe with the feature sets that a tuning was begun with, where it means them."""
    try:
        found = read_json(root / "tuning.json")
        image, text = found.get("image_set"), found.get("text_set")
    except (OSError, ValueError, AttributeError):  # `claimed` will say it
        return recipe
    return on_own_sets(recipe, cache, image=image, text=text)


def _require_as_many(studies: "Sequence[Study]") -> None:
    """Raise RunError where a recipe has more trials than all shall have: they would be compared unequally."""
    study = max(studies, key=lambda study: len(study.results))
    if (done := len(study.results)) > study.trials:
        raise RunError(
            f"{study.root} has {done} trials already, and recipes are compared on equal numbers of trials: give "
            f"--trials {done} or more"
        )


def _forget(comparison: Path) -> None:
    """Remove the comparison that an earlier command left: it is of fewer trials."""
    try:
        comparison.unlink(missing_ok=True)
    except OSError as error:
        raise RunError(f"{comparison} cannot be replaced: {error.strerror}; take another --out") from error


def _understood(found: dict[str, Any]) -> dict[str, Any]:
    """Return a description with its recipe resolved again: a later version may know more keys."""
    return found | {"recipe": resolve(found["recipe"]).to_dict()}


def _draw(plan: _Planned, trials: tuple[Trial, ...]) -> None:
    """Draw which keys decide; where too few trials know it, say so, for the tuning is done."""
    from .study import importances

    try:
        plot(importances(trials, plan.space), plan.root / "importance.png")
    except RunError as error:
        print(f"importance.png is left out: {error}", file=sys.stderr)


def _say_space(plan: _Planned) -> None:
    lines = aligned([[f"  {key}", str(dimension)] for key, dimension in plan.space.items()])
    print("\n".join([f"space of {plan.name}:", *lines]), file=sys.stderr, flush=True)


def _train(study: "Study", jobs: int, scheduler: str | None) -> None:
    """Train the trials that are left."""
    if not study.left:
        return
    series = study.begin()
    if scheduler is not None:
        on_cluster(series, scheduler, str(study.root), all_at_once=False)
    elif jobs > 1:
        in_processes(series, jobs, load_features([study.any_job()]))
    else:
        in_turn(series)


def _none_done(study: "Study") -> str:
    """Return the sentence that says that no trial of a study came to its end."""
    first = next((trial.error for trial in study.results if trial.error), "")
    return f"none of the trials in {study.root} could be trained to its end; the first: {first}"


def _tuned(plan: _Planned, study: "Study", ties: Ties, views: bool, device: str) -> Tuned:
    """Write down the best trial of a study, and look at the test split."""
    trials = study.results
    done = (trial for trial in trials if trial.status == "done")
    best = max(done, key=lambda trial: (trial.rsum, -trial.number))
    _write_recipe(plan, best, study)
    run = plan.root / "best"
    if not (run / WEIGHTS).is_file():
        raise RunError(
            f"{run} has lost its weights; remove what is left of it, and make it again: `xret train-head "
            f"{quote(study.store)} --recipe {quote(str(plan.root / 'best.yaml'))} --seed {study.seed} "
            f"--out {quote(str(run))}`"
        )
    evaluation = _result(plan.root, best, study.store, ties, views, device)
    space = {key: str(dimension) for key, dimension in plan.space.items()}
    return Tuned(plan.name, str(plan.root), space, trials, best, evaluation)


def _write_recipe(plan: _Planned, best: Trial, study: "Study") -> None:
    recipe = recipe_of(plan.recipe, study.settings, best.values).to_dict()
    head = (
        f"# {plan.name}, tuned: trial {best.number} of {plan.root.name}, validation RSUM {best.rsum:.2f}\n"
        f"# with --seed {study.seed} on {study.store}\n"
    )
    text = head + yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True)
    write_text(plan.root / "best.yaml", text, RunError)


def _result(root: Path, best: Trial, store: str, ties: Ties, views: bool, device: str) -> Evaluation:
    """Return the best run's result on the test split; it is computed once, and written with where the run is now."""
    file = root / "result.json"
    facts = {"trial": best.number, "validation_rsum": best.rsum, "ties": ties, "values": best.values}
    evaluation = _known(file, facts, views)
    if evaluation is None:
        _say_replaced(file, facts)
        evaluation = evaluate(root / "best", store=store, split="test", ties=ties, device=device, views=views)
    evaluation = replace(evaluation, runs=(str(root / "best"),))
    write_json(file, facts | evaluation.to_dict())
    return evaluation


def _say_replaced(file: Path, facts: dict[str, Any]) -> None:
    """Say on stderr where the file's result is of the same run, with other views or another rule for ties."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        found = read_json(file)
        if found["trial"] == facts["trial"] and found["values"] == facts["values"]:
            how = f"{counted(found['views'], 'view')}, ties {found['ties']}"
            print(f"Note: {file} is written anew; it held the result with {how}.", file=sys.stderr, flush=True)


def _known(file: Path, facts: dict[str, Any], views: bool) -> Evaluation | None:
    """Return the result that a file holds; None where there is none, or one of other facts or views."""
    try:
        found = read_json(file)
        if {key: found[key] for key in facts} == facts and (found["views"] > 1) == views:
            return Evaluation.of_one(found)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None
