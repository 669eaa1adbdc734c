"""The parts of a head: what their parameters may be, and their names in recipes. A part's file is all there is to add.

    @AGGREGATORS.register("k-max", "the mean of the k largest values: between mean and maximum")
    class KMax(Aggregator):
        def __init__(self, local_dim: int, dim: int, *, k: Few = 2) -> None: ...

A signature alone says what a parameter may be: `KMax(8, 8, k=0)` raises ValueError, "KMax: k is 0, but must be between
1 and 1024". Recipes read the same annotations, so that all faults of a file are found at once.
"""

import functools
import inspect
import types
from collections.abc import Callable, Iterable
from importlib import import_module
from pkgutil import iter_modules
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from torch import nn

P = TypeVar("P")
T = TypeVar("T", bound=type)


class Bound(NamedTuple):
    """Which numbers a parameter may be; stands in an `Annotated` type.

    Attributes:
        text: follows "must be" in a message.
        admits: whether a number may be the parameter's.
    """

    text: str
    admits: Callable[[float], bool]


def at_least(smallest: float) -> Bound:
    """Bound a parameter from below, inclusively."""
    return Bound(f"at least {smallest}", lambda value: value >= smallest)


def above(bound: float) -> Bound:
    """Bound a parameter from below, exclusively."""
    return Bound(f"above {bound}", lambda value: value > bound)


def between(smallest: float, largest: float) -> Bound:
    """Bound a parameter from both sides, inclusively."""
    return Bound(f"between {smallest} and {largest}", lambda value: smallest <= value <= largest)


Count = Annotated[int, at_least(1)]
Epochs = Annotated[int, at_least(0)]
# What memory grows with is refused before it is taken:
Few = Annotated[int, between(1, 1 << 10)]  # slots, steps, samples and the like
Deep = Annotated[int, between(1, 1 << 6)]  # layers
Width = Annotated[int, between(1, 1 << 14)]
Positive = Annotated[float, above(0)]
Factor = Annotated[float, between(0, 1_000_000)]  # products of several still fit into float32
Share = Annotated[float, between(0, 1)]
Rate = Annotated[float, between(0, 0.95)]  # of what is dropped: something must be left


class Part(nn.Module):
    """A part of a head: its constructor raises ValueError for a value that its annotations do not admit."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "__init__" in vars(cls):
            cls.__init__ = _checking(cls.__init__)  # type: ignore[method-assign]


def _checking(init: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(init)

    @functools.wraps(init)
    def checking(part: Part, *positional: Any, **named: Any) -> None:
        kinds = get_type_hints(init, include_extras=True)
        for name, value in signature.bind(part, *positional, **named).arguments.items():
            if wanted := _wanted(value, kinds.get(name)):
                raise ValueError(f"{type(part).__name__}: {name.rstrip('_')} is {value!r}, but must be {wanted}")
        init(part, *positional, **named)

    return checking


def _wanted(value: Any, kind: Any) -> str:
    """Return what a value must be where its annotation does not admit it; an empty text where it does."""
    if get_origin(kind) is Literal:
        return "" if value in get_args(kind) else f"one of {', '.join(map(str, get_args(kind)))}"
    if get_origin(kind) is Annotated:
        (bound,) = kind.__metadata__
        return "" if bound.admits(value) else bound.text
    if get_origin(kind) in (Union, types.UnionType) and value is not None:
        return " or ".join(filter(None, (_wanted(value, option) for option in get_args(kind))))
    return ""


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
