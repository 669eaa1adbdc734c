"""YAML and JSON that anybody may have written: read within bounds, and held against what they should say."""

import gc
import json
import reprlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import yaml

_DEEPEST = 64  # lists and mappings inside one another
_LARGEST_YAML, _LARGEST_JSON = 1 << 20, 1 << 31  # bytes of a file
_MOST_NODES = 100_000  # of a YAML, each as often as aliases repeat it
_LONGEST_NUMBER = 40  # characters
_TAG = "tag:yaml.org,2002:"
_PLAIN = [f"{_TAG}{name}" for name in ("null", "bool", "int", "float", "str", "seq", "map")]


class DocumentError(ValueError):
    """A text is not valid YAML or JSON, or beyond the bounds; the message is a phrase, with the line where known."""


def read_yaml(path: Path) -> Any:
    """Return the content of a YAML file; a date in it is a text.

    Raises:
        OSError: it cannot be read.
        DocumentError: as of `parse_yaml`, or it is too large.
    """
    return parse_yaml(_bytes(path, _LARGEST_YAML))


def read_json(path: Path) -> Any:
    """Return the content of a JSON file.

    Raises:
        OSError: it cannot be read.
        DocumentError: as of `parse_json`, or it is too large.
    """
    return parse_json(_bytes(path, _LARGEST_JSON))


def parse_yaml(text: bytes) -> Any:
    """Return the content of a YAML text in UTF-8.

    Raises:
        DocumentError: it is not valid, names a key twice, is too deep, or its aliases make it too large.
    """
    try:
        content = yaml.load(text.decode("utf-8-sig"), _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise DocumentError(f"{where}{error.problem}") from error
    except RecursionError as error:
        raise DocumentError(_TOO_DEEP) from error
    except (yaml.YAMLError, ValueError, LookupError) as error:  # the last two of values that do not fit their tags
        raise DocumentError(" ".join(str(error).split())) from error
    _require_shallow(content)
    return content


def parse_json(text: str | bytes) -> Any:
    """Return the content of a JSON text.

    Raises:
        DocumentError: it is not valid, names a key twice, or is too deep.
    """
    collecting = gc.isenabled()
    gc.disable()  # it looks through all that was read again and again, for twice the time of the rest
    try:
        content = json.loads(text, object_pairs_hook=_mapping)
        _require_shallow(content)
        return content
    except RecursionError as error:
        raise DocumentError(_TOO_DEEP) from error
    except ValueError as error:
        raise DocumentError(str(error)) from error
    finally:
        if collecting:
            gc.enable()


_TOO_DEEP = f"more than {_DEEPEST} lists and mappings lie inside one another"


Rule = tuple[str, Callable[[Any], bool]]  # what a value must be, for a message, and the test of that
TEXT: Rule = ("a text", lambda value: isinstance(value, str))


def fault(values: Mapping[str, Any], rules: Mapping[str, Rule], optional: Mapping[str, Rule]) -> str:
    """Return what is wrong with the first value that breaks its rule or is missing; an empty text if all is well."""
    for key, (expected, fits) in {**rules, **optional}.items():
        if key in values and not fits(values[key]):
            return f"'{key}' is {reprlib.repr(values[key])}, not {expected}"
        if key in rules and key not in values:
            return f"'{key}' is missing"
    return ""


def _bytes(path: Path, most: int) -> bytes:
    if path.stat().st_size > most:
        raise DocumentError(f"it has more than {most:,} bytes")
    return path.read_bytes()


def _mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        keys = [key for key, _ in pairs]
        raise DocumentError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} stands twice in a mapping")
    return mapping


def _require_shallow(content: Any) -> None:
    level = [content]
    for _ in range(_DEEPEST):
        values = (one.values() if isinstance(one, dict) else one for one in level if isinstance(one, (dict, list)))
        level = [inner for of_one in values for inner in of_one if isinstance(inner, (dict, list))]
        if not level:
            return
    raise DocumentError(_TOO_DEEP)


class _Loader(yaml.SafeLoader):
    """Makes texts, numbers, lists and mappings only, and counts what aliases repeat before anything is made of it."""

    yaml_constructors: ClassVar[dict[Any, Any]] = {
        tag: make for tag, make in yaml.SafeLoader.yaml_constructors.items() if tag in (*_PLAIN, None)
    }

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.yaml_implicit_resolvers = {
            first: [(tag, form) for tag, form in forms if tag in _PLAIN or tag == f"{_TAG}merge"]
            for first, forms in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }
        self._depth = self._nodes = 0
        self._sizes: dict[yaml.Node | None, int] = {}  # of what an alias may repeat

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        mark, before = self.peek_event().start_mark, self._nodes  # type: ignore[no-untyped-call]
        repeated = self.check_event(yaml.AliasEvent)
        self._depth += 1
        if self._depth > _DEEPEST + 1:  # a value in the deepest of them
            raise yaml.MarkedYAMLError(problem=_TOO_DEEP, problem_mark=mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if repeated and node not in self._sizes:
            raise yaml.MarkedYAMLError(problem="an alias lies inside of what it repeats", problem_mark=mark)
        self._nodes += self._sizes[node] if repeated else 1
        if self._nodes > _MOST_NODES:
            raise yaml.MarkedYAMLError(problem=f"it holds more than {_MOST_NODES:,} values", problem_mark=mark)
        self._sizes[node] = self._nodes - before
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if (key.tag, key.value) in seen:
                problem = f"the key {key.value!r} stands twice in a mapping"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            seen.add((key.tag, key.value))
        return node

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> str:
        text = super().construct_scalar(node)
        if node.tag in (f"{_TAG}int", f"{_TAG}float") and len(text) > _LONGEST_NUMBER:
            raise yaml.MarkedYAMLError(problem="a number is too long", problem_mark=node.start_mark)
        return text
