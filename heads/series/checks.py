"""What is refused before the first of many trainings begins, and what their folder is for."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ...pipeline.cache.feature_cache import FeatureCache
from ...pipeline.cache.storage.lease import locked
from ...pipeline.documents import read_json
from ...pipeline.errors import CacheError, RunError
from ...pipeline.reading.joined_sets import parts_of
from ...pipeline.wording import printable
from ..model import Facts, build_losses, build_model
from ..recipes.blocks import Recipe
from ..runs.config import difference
from ..runs.features import Sets, open_generation, sets_named
from ..runs.run import MAY_CHANGE, write_json

VERSION = 1


def cache_of_series(store: str, files: Sequence[Path], *, quiet: bool = False) -> FeatureCache:
    """Open the cache that a series trains on: the current generation, or that with which it was begun.

    Args:
        store: its URL; one that names a generation is opened as it is.
        files: the ``WHAT.json`` of the series, as far as they are there; see `claimed`.
        quiet: do not say that a later generation is the current one.

    Raises:
        CacheError: it cannot be opened.
        RunError: it no longer has that generation.
    """
    cache = FeatureCache.open(store)
    file = next((file for file in files if file.exists()), None)
    if file is None:
        return cache
    try:
        found = read_json(file)
        wanted, samples = int(found.get("generation", 1)), str(found["manifest_sha256"])
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        return cache  # `claimed` will say it
    begun = open_generation(store, wanted, samples, f"{file.parent} was begun", "take another --out")
    if begun.generation != cache.generation and not quiet:
        said = f"{file.parent} goes on with generation {begun.generation} of {store}, on which it was begun."
        print(printable(said), file=sys.stderr)
    return begun


def complete_sets(cache: FeatureCache, recipe: Recipe, splits: Sequence[str]) -> Sets:
    """Return the feature sets that a recipe names.

    Raises:
        CacheError: none or several fit, the store lacks one of `splits`, or its features are not complete.
    """
    sets = sets_named(cache, recipe)
    for needed in dict.fromkeys(splits):
        if needed not in cache.splits:
            raise CacheError(f"{cache.url} has no split '{needed}'; it has {', '.join(cache.splits)}")
        for features in (*parts_of(sets[0]), *parts_of(sets[1])):
            if not features.complete(needed):
                raise CacheError(
                    f"{cache.url}: split '{needed}' of {features.name} is not complete; run the same "
                    "`xret extract` again"
                )
    return sets


def require_buildable(recipe: Recipe, image: Facts, text: Facts) -> None:
    """Raise RecipeError where no head can be made of a recipe for features with these facts; it takes no memory."""
    with torch.device("meta"):
        build_model(recipe, image, text)
        build_losses(recipe, text)


@contextmanager
def claimed(
    root: Path,
    what: str,
    description: dict[str, Any],
    busy: str,
    understood: Callable[[dict[str, Any]], dict[str, Any]] = lambda found: found,
) -> Iterator[None]:
    """Make a folder, keep other processes out of it, and write down in ``WHAT.json`` what it is for.

    Args:
        root: the folder.
        what: ``ablation`` or ``tuning``.
        description: what stays the same as long as the folder is used; of a recipe in it, what no number depends on
            may change.
        busy: what to do where another process is at work there.
        understood: makes what an earlier version wrote comparable.

    Raises:
        RunError: it cannot be made, or is in use; it holds something else, or its description is damaged or differs.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"{root} cannot be made: {error.strerror}; take another --out") from error
    with locked(root, RunError(f"another {what} is at work in {root}; {busy}")):
        _claim(root, what, description, understood)
        yield


def _claim(
    root: Path, what: str, description: dict[str, Any], understood: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    """Write down what a folder is for, or refuse to use it for something else; as of `claimed`."""
    file = root / f"{what}.json"
    own = {"format": f"xret-{what}", "version": VERSION, **description}
    if not file.exists():
        if any(root.iterdir()):
            raise RunError(f"{root} is not empty and holds no {what}; take another --out")
        write_json(file, own)
        return
    try:
        found = understood(read_json(file))
        differing = difference(found, own, [f"recipe.{key}" for key in MAY_CHANGE])
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise RunError(f"{file} is damaged; take another --out") from error
    if found.get("name") != own.get("name"):  # of another recipe hardly any key is the same
        differing = f"name is {found.get('name')} there and {own.get('name')} now"
    if differing:
        raise RunError(f"{root} belongs to another {what}: {differing}; take another --out")
