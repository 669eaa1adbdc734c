"""The parts of a head by the names that recipes use. A part registers itself: its file is all there is to add.

@AGGREGATORS.register("k-max", "the mean of the k largest values: between mean and maximum")
class KMax(Aggregator): ...
"""

from collections.abc import Callable, Iterable
from importlib import import_module
from pkgutil import iter_modules
from typing import Generic, TypeVar

P = TypeVar("P")
T = TypeVar("T", bound=type)


class Registry(dict[str, type[P]], Generic[P]):
    """The parts that do one job, by name.

    Args:
        role: the job, such as ``aggregator``.
        base: the class that all of them derive from.
        public: the module that offers them.

    Attributes:
        when: by name, when to take a part, for ``xret list``.
    """

    def __init__(self, role: str, base: type[P], public: str) -> None:
        super().__init__()
        self.role, self.base, self.public = role, base, public
        self.when: dict[str, str] = {}

    def register(self, name: str, when: str) -> Callable[[T], T]:
        """Return a decorator that registers a class; `when` says in a line when to take it."""

        def register(part: T) -> T:
            self[name], self.when[name] = part, when
            return part

        return register

    def class_of(self, name: str, module: str) -> type[P]:
        """Return the part whose class has this name; AttributeError of `module` where there is none."""
        for part in self.values():
            if part.__name__ == name:
                return part
        raise AttributeError(f"module {module!r} has no attribute {name!r}")


def import_all(package: str, path: Iterable[str]) -> None:
    """Import every module of a package, whereby its parts register."""
    for module in iter_modules(path):
        import_module(f"{package}.{module.name}")
