"""Bounds of parameters: declared in a signature, checked when a part is made, and read by recipes."""

import inspect
import json
from pathlib import Path
from typing import Annotated, Literal, get_args, get_type_hints

import pytest

from xret.heads.modules.adapters import ADAPTERS
from xret.heads.modules.aggregators import AGGREGATORS
from xret.heads.modules.losses import LOSSES
from xret.heads.modules.parts import Bound, Count, Part, Positive, Share, at_least, between
from xret.heads.modules.similarity import SIMILARITIES

GOLDEN = Path(__file__).parents[2] / "golden"
REGISTRIES = (ADAPTERS, AGGREGATORS, LOSSES, SIMILARITIES)
PARTS = sorted({part for registry in REGISTRIES for part in registry.values()}, key=lambda part: part.__name__)


class Example(Part):
    def __init__(
        self,
        dim: int = 0,
        *,
        slots: Count = 1,
        scale: Positive = 1.0,
        dropout: Share = 0.0,
        size: Annotated[int, between(2, 4)] | None = None,
        global_: Literal["mean", "max"] = "mean",
    ) -> None:
        super().__init__()
        self.slots = slots


class Derived(Example):
    def __init__(self, rate: Annotated[float, at_least(0)] = 0.0, slots: int = 1) -> None:
        super().__init__(slots=slots)


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        (Example, {"slots": 0}, "Example: slots is 0, but must be at least 1"),
        (Example, {"scale": 0.0}, "Example: scale is 0.0, but must be above 0"),
        (Example, {"scale": float("nan")}, "Example: scale is nan, but must be above 0"),
        (Example, {"dropout": -0.1}, "Example: dropout is -0.1, but must be between 0 and 1"),
        (Example, {"size": 5}, "Example: size is 5, but must be between 2 and 4"),
        (Example, {"global_": "last"}, "Example: global is 'last', but must be one of mean, max"),
        (Derived, {"rate": -1.0}, "Derived: rate is -1.0, but must be at least 0"),
        (Derived, {"slots": 0}, "Derived: slots is 0, but must be at least 1"),
    ],
)
def test_a_value_out_of_bounds_is_refused(part, value, message):
    with pytest.raises(ValueError, match="must be") as caught:
        part(**value)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "value",
    [{"slots": 1}, {"scale": 1e-9}, {"dropout": 1}, {"size": 2}, {"size": None}, {"global_": "max"}],
)
def test_a_value_within_bounds_is_taken(value):
    assert Example(**value).slots == 1


def bounds():
    """Every parameter of every part that has a bound or choices, with a value that it does not admit."""
    for part in PARTS:
        for name, kind in get_type_hints(part.__init__, include_extras=True).items():
            for option in (kind, *get_args(kind)):
                if any(isinstance(metadata, Bound) for metadata in getattr(option, "__metadata__", ())):
                    yield part, name, -1
                elif getattr(option, "__origin__", None) is Literal:
                    yield part, name, "nothing"


@pytest.mark.parametrize(
    ("part", "name", "value"), list(bounds()), ids=lambda value: getattr(value, "__name__", str(value))
)
def test_every_declared_bound_is_checked(part, name, value):
    required = [p for p in inspect.signature(part).parameters.values() if p.default is p.empty]
    with pytest.raises(ValueError, match=f"^{part.__name__}: {name.rstrip('_')} is .* but must be "):
        part(*[8] * len(required), **{name: value})


def described(part):
    """What a recipe that names a part alone means, and what bounds its parameters; what a part states of itself."""
    kinds = get_type_hints(part.__init__, include_extras=True)
    values = {
        name: [parameter.default, *getattr(kinds[name], "__metadata__", [[""]])[0][:1]]
        for name, parameter in inspect.signature(part).parameters.items()
        if parameter.default is not parameter.empty
    }
    stated = {name for base in part.__mro__ if issubclass(base, Part) for name in vars(base) if name[0] != "_"}
    return {name: value for name in stated if isinstance(value := getattr(part, name), bool)} | values


def test_parts_are_what_recipes_were_written_for():
    recorded = json.loads((GOLDEN / "parts.json").read_text("utf-8"))
    found = {part.__name__: described(part) for part in PARTS}
    assert recorded.items() <= found.items()  # no recipe was written for a new part


@pytest.mark.parametrize("parts", REGISTRIES, ids=lambda parts: parts.role)
def test_a_class_is_found_by_its_name(parts):
    for part in parts.values():
        assert parts.class_of(part.__name__, "xret.nn") is part
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        parts.class_of("Nothing", "xret.nn")
