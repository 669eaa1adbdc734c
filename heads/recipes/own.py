"""User-defined parts: ``module:Class`` wherever a recipe names a part.

The module is a file beside the recipe (or a run's `recipe.yaml`) or in the working folder, or it is installed. A
resolved recipe holds the digest of its file as ``code``; a run keeps a copy of a file beside its `recipe.yaml`.

Code that somebody sent runs only where it is trusted. `remember` notes what was trained with here, by a file for each
module and digest in the user's state folder, which no run can bring along.
"""

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from ...pipeline.errors import RecipeError, nearest
from ...pipeline.wording import raised, reason
from ..modules.parts import Registry

P = TypeVar("P")
Sources = Mapping[str, str]  # the file of each module; an empty text: it is installed, and imported by its name
_here: set[str] = set()  # what this process has trained with, where no note can be written


def part_of(registry: Registry[P], name: str, sources: Sources) -> type[P]:
    """Return the part that a recipe names, bundled or user-defined; RecipeError where it is no such part."""
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
            raise RecipeError(f"'{name}' names no part; write module:Class, such as mine:Focal")
        found[module] = _find(module, folders)
        if not found[module] and not _is_installed(module):
            raise RecipeError(
                f"there is no module '{module}': put {file_of(module)} beside the recipe or into the working folder, or"
                " install it"
            )
    return found


def known_sources(title: str, names: Sequence[str], folders: Sequence[Path], recorded: Mapping[str, str]) -> Sources:
    """Return `sources_of` names that came with a run, if all were trained with here; import none of them before.

    `recorded` are the digests that came along, by module. RecipeError, which begins with `title`, where a file is
    unknown, or not the recorded one.
    """
    foreign = []
    for module in dict.fromkeys(name.partition(":")[0] for name in names):
        file, known = _find(module, folders), recorded.get(module)
        digest = digest_of(module, file) if file else known
        if f"{module} {digest}" not in _noted() or known not in (None, digest):
            foreign.append(file or module)
    if foreign:
        raise RecipeError(
            f"{title} brings code of its own, which was not trained with here or has changed since: read"
            f" {' and '.join(foreign)}, and run it with --trust (in Python trust=True), in `xret train-head` for good"
        )
    return sources_of(names, folders, {})


def remember(code: Mapping[str, str]) -> None:
    """Note that modules with these digests are trained with here; for this process alone, if there is no place."""
    for note in map(" ".join, code.items()):
        try:
            (folder := _notes()).mkdir(parents=True, exist_ok=True)
            (folder / note).touch()
        except (OSError, RuntimeError):  # the latter where there is no home
            _here.add(note)


def digest_of(module: str, file: str) -> str:
    """Return the SHA-256 of a module's file; RecipeError where it cannot be read."""
    try:
        spec = None if file else importlib.util.find_spec(module)
        return sha256(Path(file or (spec and spec.origin) or "").read_bytes()).hexdigest()
    except OSError as error:
        raise RecipeError(f"the module '{module}' cannot be read ({reason(error)})") from error


def file_of(module: str) -> Path:
    """Return the relative path of a module's file."""
    return Path(*module.split(".")).with_suffix(".py")


def _find(module: str, folders: Sequence[Path]) -> str:
    """Return the file of a module in the folders or the working folder; an empty text where there is none."""
    there = (folder / file_of(module) for folder in (*folders, Path.cwd()))
    return next((str(file.resolve()) for file in there if file.is_file()), "")


def _notes() -> Path:
    state = Path(os.environ.get("XDG_STATE_HOME", ""))
    return (state if state.is_absolute() else Path.home() / ".local" / "state") / "xret" / "code"


def _noted() -> set[str]:
    try:
        return _here.union(note.name for note in _notes().iterdir())
    except (OSError, RuntimeError):
        return _here


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
        lacking = error.name if isinstance(error, ImportError) else None
        beside = lacking and _find(lacking, [Path(file).parent])
        advice = f"; a run keeps one file of a part: move what it needs of {lacking} into it" if beside else ""
        raise RecipeError(f"{file or module} cannot be imported ({raised(error)}){advice}") from error
    return made


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # of its package
        return False
