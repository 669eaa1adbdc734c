"""What a parameter of a part may be."""

from typing import Any, get_args


def at_least(part: str, smallest: int, **values: float) -> None:
    """Raise ValueError where a value is below `smallest`, naming it and the part that it belongs to."""
    for name, value in values.items():
        if value < smallest:
            raise ValueError(f"{part}: {name} is {value}, but must be at least {smallest}")


def above(part: str, bound: int, **values: float) -> None:
    """Raise ValueError where a value is not above `bound`, naming it and the part that it belongs to."""
    for name, value in values.items():
        if not value > bound:
            raise ValueError(f"{part}: {name} is {value}, but must be above {bound}")


def one_of(part: str, kind: Any, **values: str) -> None:
    """Raise ValueError where a value is none of those that the `Literal` type `kind` lists."""
    for name, value in values.items():
        if value not in get_args(kind):
            raise ValueError(f"{part}: {name} is '{value}', but must be one of {', '.join(get_args(kind))}")
