"""Which values a part takes, read off its constructor, and whether nested values fit.

A schema is a nested dictionary of `Field`s. Checking gathers every fault, each with its dotted path.
"""

import inspect
import types
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from ...pipeline.errors import nearest

REQUIRED = object()


class Min(NamedTuple):
    """The smallest value that a parameter may have; stands in an `Annotated` type."""

    value: float


class Between(NamedTuple):
    """The smallest and the largest value that a parameter may have; stands in an `Annotated` type."""

    value: float
    largest: float


class Above(NamedTuple):
    """What a parameter must be above; stands in an `Annotated` type."""

    value: float


class Field(NamedTuple):
    """A value: its annotation, and its default or `REQUIRED`."""

    type: Any
    default: Any


def fields(part: type) -> dict[str, Field]:
    """Return the parameters of a part: the arguments of its constructor that have a default.

    A trailing underscore, there because the name is a word of Python, is left out.
    """
    hints = get_type_hints(part.__init__, include_extras=True)  # type: ignore[misc]
    parameters = inspect.signature(part).parameters.values()
    return {p.name.rstrip("_"): Field(hints[p.name], p.default) for p in parameters if p.default is not p.empty}


def takes(part: type, argument: str) -> bool:
    """Return whether a part's constructor has an argument of this name."""
    return argument in inspect.signature(part).parameters


def get(values: Any, path: str) -> Any:
    """Return what lies at a dotted path, or None."""
    for key in path.split("."):
        values = values.get(key) if isinstance(values, Mapping) else None
    return values


def check(values: Any, schema: Mapping[str, Any], faults: list[str]) -> dict[str, Any]:
    """Return `values` completed by the schema's defaults.

    Args:
        values: nested.
        schema: nested dictionaries of `Field`s. A block that knows its `name` alone is that of a part whose name is
            wrong: what else may stand there is not known and not complained of.
        faults: what does not fit is appended here, with the nearest right key or value.
    """
    return _check(values, schema, "", faults, _paths(schema))


def _paths(schema: Mapping[str, Any], path: str = "") -> list[str]:
    found = []
    for key, entry in schema.items():
        found += [f"{path}{key}"] if isinstance(entry, Field) else _paths(entry, f"{path}{key}.")
    return found


def _check(values: Any, schema: Mapping[str, Any], path: str, faults: list[str], paths: list[str]) -> dict[str, Any]:
    values = {} if values is None else values
    if not isinstance(values, Mapping):
        faults.append(f"{path.rstrip('.')} must be a block with the keys {', '.join(schema)}, not {values!r}")
        return {}
    complete: dict[str, Any] = {}
    for key, entry in schema.items():
        if not isinstance(entry, Field):
            complete[key] = _check(values.get(key), entry, f"{path}{key}.", faults, paths)
        elif key in values:
            try:
                complete[key] = convert(values[key], entry.type)
            except ValueError as error:
                faults.append(f"{path}{key} {error}")
        elif entry.default is REQUIRED:
            faults.append(f"{path}{key} is missing")
        else:
            complete[key] = entry.default
    if list(schema) == ["name"] and not complete:
        return complete
    for key in values:
        if key not in schema:
            elsewhere = [known for known in paths if known.rpartition(".")[2] == str(key)]
            hint = f" (did you mean '{elsewhere[0]}'?)" if elsewhere else nearest(str(key), list(schema))
            faults.append(f"{path}{key} is not a key{hint or ': there are ' + ', '.join(schema)}")
    return complete


def convert(value: Any, kind: Any) -> Any:
    """Return `value` as its annotation wants it. Text is read as a number where one is wanted: YAML 1.1 takes 1e-3
    for text, and a setting is text always.

    Raises:
        ValueError: what the value must be.
    """
    if get_origin(kind) is Annotated:
        inner, bound = get_args(kind)
        value = convert(value, inner)
        if isinstance(bound, Above):
            if not value > bound.value:
                raise ValueError(f"must be above {bound.value}, not {value!r}")
        elif isinstance(bound, Between) and not bound.value <= value <= bound.largest:
            raise ValueError(f"must be between {bound.value} and {bound.largest}, not {value!r}")
        elif value < bound.value:
            raise ValueError(f"must be {bound.value} or more, not {value!r}")
        return value
    if get_origin(kind) in (Union, types.UnionType):
        messages = []
        for option in sorted(get_args(kind), key=lambda option: option is str):  # text last: it takes anything
            try:
                return convert(value, option)
            except ValueError as error:
                messages.append(str(error).removeprefix("must be ").rpartition(", not ")[0])
        raise ValueError(f"must be {' or '.join(messages)}, not {value!r}")
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        for choice in choices:
            if value == choice or str(value) == str(choice):
                return choice
        names = [str(choice) for choice in choices]
        raise ValueError(f"must be one of {', '.join(names)}, not {value!r}{nearest(str(value), names)}")
    if kind is type(None):
        if value is None or str(value).lower() in ("null", "none"):
            return None
        raise ValueError(f"must be null, not {value!r}")
    if kind is bool:
        text = str(value).lower()
        if text in ("true", "false"):
            return text == "true"
        raise ValueError(f"must be true or false, not {value!r}")
    if kind is int or kind is float:
        try:
            number = kind(value) if isinstance(value, str) or (kind is float and type(value) is int) else value
        except ValueError:
            number = None
        if type(number) is kind and abs(number) < float("inf"):
            return number
        raise ValueError(f"must be {'a whole number' if kind is int else 'a number'}, not {value!r}")
    if kind is str and not isinstance(value, str):
        raise ValueError(f"must be text, not {value!r}")
    return value
