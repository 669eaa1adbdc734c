"""Which values a part takes, read off its constructor, and whether nested values fit.

A schema is a nested dictionary of `Field`s. Checking gathers every fault, each with its dotted path.
"""

import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from keyword import iskeyword
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from ...pipeline.errors import nearest
from ...pipeline.wording import some_of
from .settings import value_of

REQUIRED = object()
SetNames = str | list[str]  # of one feature set, or of several that differ
Conditions = Mapping[str, tuple[str, Sequence[Any]]]  # of keys that count only with these values of another key


class Field(NamedTuple):
    """A value: its annotation, its default or `REQUIRED`, and with which values of another key it counts."""

    type: Any
    default: Any
    condition: tuple[str, Sequence[Any]] | None = None


@lru_cache(256)
def fields(part: type) -> Mapping[str, Field]:
    """Return the parameters of a part: the arguments of its constructor that have a default.

    A trailing underscore, there because the name is a word of Python, is left out. `used_with` of the class has the
    `Conditions` of those that do not always count. ValueError where one has no type that a recipe can hold.
    """
    conditions: Conditions = getattr(part, "used_with", {})
    hints = get_type_hints(part.__init__, include_extras=True)  # type: ignore[misc]
    found = [p for p in inspect.signature(part).parameters.values() if p.default is not p.empty]
    for p in found:
        if not _is_plain(hints.get(p.name)):
            raise ValueError(f"its parameter '{p.name}' needs a type that a recipe can hold: int, float, bool or str")
    names = (name if iskeyword(name := p.name.removesuffix("_")) else p.name for p in found)
    return {name: Field(hints[p.name], p.default, conditions.get(name)) for name, p in zip(names, found, strict=True)}


def conditions_of(schema: Mapping[str, Any]) -> Conditions:
    """Return with which values of another key those count that do not always, by dotted keys."""
    conditional = {key: entry.condition for key, entry in flat(schema).items() if entry.condition}
    return {key: (f"{key.rpartition('.')[0]}.{other}", values) for key, (other, values) in conditional.items()}


def used(values: Mapping[str, Any], conditions: Conditions) -> dict[str, Any]:
    """Return nested values without the keys that do not count beside the others."""
    there = flat(values)

    def counts(key: str) -> bool:
        other, chosen = conditions.get(key, (key, ()))
        return other == key or (there[other] in chosen and counts(other))

    def pruned(block: Mapping[str, Any], path: str = "") -> dict[str, Any]:
        counting = [key for key in block if counts(f"{path}{key}")]
        return {key: pruned(v, f"{path}{key}.") if isinstance(v := block[key], Mapping) else v for key in counting}

    return pruned(values)


def _is_plain(kind: Any) -> bool:
    if get_origin(kind) is Annotated:
        return _is_plain(get_args(kind)[0])
    if get_origin(kind) in (Union, types.UnionType) and kind not in _PLAIN:
        return all(map(_is_plain, get_args(kind)))
    return get_origin(kind) is Literal or any(kind == known for known in _PLAIN)


def sizes(part: type, dim: int = 0, vocabulary_size: int = 0) -> dict[str, int]:
    """Return the widths of embeddings and vocabularies that a loss's constructor has to be given."""
    wanted = inspect.signature(part).parameters
    given = {"dim": dim, "vocabulary_size": vocabulary_size}
    return {name: size for name, size in given.items() if name in wanted and wanted[name].default is wanted[name].empty}


def get(values: Any, path: str) -> Any:
    """Return what lies at a dotted path, or None."""
    for key in path.split("."):
        values = values.get(key) if isinstance(values, Mapping) else None
    return values


def check(
    values: Any, schema: Mapping[str, Any], faults: list[str], path: str = "", known: Sequence[str] = ()
) -> dict[str, Any]:
    """Return nested `values`, those below `path`, completed by the schema's defaults.

    What does not fit is appended to the `faults`, with the nearest right key or value, of all that are `known`. A block
    that has its `name` alone is that of a part whose name is wrong: nobody knows what else it may hold.
    """
    if not isinstance(values, Mapping | None):
        faults.append(f"{path.rstrip('.')} must be a block with the keys {', '.join(schema)}, not {values!r}")
        return {}
    values, complete = values or {}, dict[str, Any]()
    given = flat(values)
    known = known or sorted(flat(schema), key=lambda key: key not in given)  # a key that is in use is meant sooner
    for key, entry in schema.items():
        if not isinstance(entry, Field):
            complete[key] = check(values.get(key), entry, faults, f"{path}{key}.", known)
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
            elsewhere = [f" (did you mean '{other}'?)" for other in known if other.rpartition(".")[2] == str(key)]
            near = nearest(str(key), list(schema)).replace("'", f"'{path}", 1)
            hints = [*elsewhere, *filter(None, [near]), f": there are {', '.join(schema)}"]
            faults.append(f"{path}{key} is not a key{hints[0]}")
    return complete


def convert(value: Any, kind: Any) -> Any:
    """Return `value` as its annotation wants it; ValueError, which says what it must be, where it does not fit.

    Text is read as a number where one is wanted: YAML 1.1 takes 1e-3 for text.
    """
    if get_origin(kind) is Annotated:
        inner, bound = get_args(kind)
        value = convert(value, inner)
        if not bound.admits(value):
            raise ValueError(f"must be {bound.text}, not {value!r}")
        return value
    if get_origin(kind) in (Union, types.UnionType) and kind not in _PLAIN:
        return _any_of(value, get_args(kind))
    if get_origin(kind) is Literal:
        choices = {str(choice): choice for choice in get_args(kind)}
        if str(value) not in choices:
            hint = nearest(str(value), list(choices))
            raise ValueError(f"must be one of {', '.join(choices)}, not {value!r}{hint}")
        return choices[str(value)]
    wanted, read = _PLAIN[kind]
    try:
        return read(value)
    except (ValueError, OverflowError):
        raise ValueError(f"must be {wanted}, not {value!r}") from None


def _any_of(value: Any, options: tuple[Any, ...]) -> Any:
    """Return `value` as the first of these annotations that it fits; text comes last, since it takes anything."""
    wanted = []
    for option in sorted(options, key=lambda option: option is str):
        try:
            return convert(value, option)
        except ValueError as error:
            wanted.append(str(error).removeprefix("must be ").rpartition(", not ")[0])
    raise ValueError(f"must be {' or '.join(wanted)}, not {value!r}")


def _of(kind: Any) -> Callable[[Any], Any]:
    """Return what reads a value of a type: a whole number may be written as 3.0, and any number as text."""

    def read(value: Any) -> Any:
        value = None if str(value).lower() == "none" else value_of(value)
        if kind is int and type(value) is float and value.is_integer():
            value = int(value)
        if type(value) is not kind and not (kind is float and type(value) is int):
            raise ValueError
        if kind is float and not abs(value) < float("inf"):
            raise ValueError
        return None if value is None else kind(value)

    return read


def _text(value: Any) -> str:
    if not isinstance(value, str | int | float):
        raise ValueError
    return str(value)


def _set_names(value: Any) -> str | list[str]:
    """Read a name, a list of names, or a list as a setting writes it: ``a,b`` or ``[a, b]``; one alone is a text."""
    names = value
    if isinstance(value, str):
        inner = value[1:-1] if value.startswith("[") and value.endswith("]") else value
        names = [name.strip(" '\"") for name in inner.split(",")]
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise ValueError
    if len(set(names)) < max(len(names), 1) or (len(names) > 1 and "auto" in names):
        raise ValueError
    return names[0] if len(names) == 1 else list(names)


_PLAIN: dict[Any, tuple[str, Callable[[Any], Any]]] = {
    types.NoneType: ("null", _of(types.NoneType)),
    bool: ("true or false", _of(bool)),
    int: ("a whole number", _of(int)),
    float: ("a number", _of(float)),
    str: ("text", _text),
    SetNames: ("auto, the name of a feature set, or several different names such as [A, B]", _set_names),
    SetNames | None: (
        "null, a kind of features, or several different ones such as [A, B]",
        lambda value: None if value is None else _set_names(value),
    ),
}


def difference(then: dict[str, Any], now: dict[str, Any], ignored: Sequence[str] = ()) -> str:
    """Return in which dotted keys, but for those `ignored`, nested values differ; an empty text where in none."""
    before, after = flat(then), flat(now)
    differing = [
        f"{key} is {before.get(key, 'absent')} there and {after.get(key, 'absent')} now"
        for key in sorted({*before, *after})
        if before.get(key) != after.get(key) and key not in ignored
    ]
    return "; ".join(some_of(differing, 5))


def flat(values: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Return nested values by their dotted keys."""
    out: dict[str, Any] = {}
    for key, value in values.items():
        out |= flat(value, f"{path}{key}.") if isinstance(value, Mapping) else {f"{path}{key}": value}
    return out
