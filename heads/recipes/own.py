"""Parts of one's own: ``module:Class`` in a recipe, where a bundled part's name may stand.

The module is a file beside the recipe (or a run's `recipe.yaml`) or in the working folder, or it is installed. A
resolved recipe holds the digest of its file as ``code``; a run keeps a copy of a file beside its `recipe.yaml`.
"""

import importlib
import importlib.util
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from torch import nn

from ...pipeline.errors import RecipeError, nearest
from ...pipeline.wording import raised, reason
from ..modules.registry import Registry

P = TypeVar("P", bound=nn.Module)
Sources = Mapping[str, str]  # the file of each module; an empty text: it is installed, and imported by its name


def part_of(registry: Registry[P], name: str, sources: Sources) -> type[P]:
    """Return the part that a recipe names, bundled or of one's own; RecipeError where it is no such part."""
    module, own, kind = name.partition(":")
    if not own:
        return registry[name]
    found = _module(module, sources[module], digest_of(module, sources[module]))
    part = getattr(found, kind, None)
    if not isinstance(part, type):
        classes = [key for key, value in vars(found).items() if isinstance(value, type)]
        raise RecipeError(f"{found.__file__} has no class '{kind}'{nearest(kind, classes)}")
    if not issubclass(part, registry.base):
        raise RecipeError(
            f"{found.__file__}: {kind} is no {registry.role}: it must derive from {registry.public}."
            f"{registry.base.__name__}"
        )
    return part


def sources_of(names: Iterable[str], folders: Sequence[Path], known: Sources) -> dict[str, str]:
    """Return where the modules of these names are: where it is known, or in the folders, or elsewhere.

    RecipeError where a module is nowhere, or a name is not of the form ``module:Class``.
    """
    found = dict(known)
    for name in names:
        module = name.partition(":")[0]
        if module in found:
            continue
        if not all(map(str.isidentifier, name.replace(":", ".").split("."))):
            raise RecipeError(f"'{name}' is no part of one's own; write module:Class, such as mine:Focal")
        file = file_of(module)
        there = [folder / file for folder in (*folders, Path.cwd()) if (folder / file).is_file()]
        if not there and not _is_installed(module):
            raise RecipeError(
                f"there is no module '{module}' for its part of one's own: put {file} beside the recipe or into the"
                " folder that you work in, or install it"
            )
        found[module] = str(there[0].resolve()) if there else ""
    return found


def digest_of(module: str, file: str) -> str:
    """Return the SHA-256 of a module's file; RecipeError where it cannot be read."""
    try:
        spec = None if file else importlib.util.find_spec(module)
        return sha256(Path(file or (spec and spec.origin) or "").read_bytes()).hexdigest()
    except OSError as error:
        raise RecipeError(f"the module '{module}' of a part of one's own cannot be read ({reason(error)})") from error


def file_of(module: str) -> Path:
    """Return the relative path of a module's file."""
    return Path(*module.split(".")).with_suffix(".py")


@lru_cache(64)  # a changed file is another module: runs with two versions of one live side by side
def _module(module: str, file: str, digest: str) -> ModuleType:
    name = f"{module}_{digest[:12]}"
    try:
        if not file:
            return importlib.import_module(module)
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None, "it ends with .py"
        made = sys.modules[name] = importlib.util.module_from_spec(spec)  # as an import does: types are looked up there
        spec.loader.exec_module(made)
    except Exception as error:  # whatever its lines do
        sys.modules.pop(name, None)
        raise RecipeError(f"{file or module} cannot be imported ({raised(error)})") from error
    return made


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # of its package
        return False
