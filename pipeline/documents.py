"""YAML and JSON; a key that stands twice in a mapping is refused, because one of its values would be lost."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

import yaml

from .errors import ManifestError, XretError
from .wording import reason

_BLOCK = 1 << 20  # characters of a JSON file that are read together
_SPACES = " \t\n\r"
_AFTER = tuple(",:]}" + _SPACES)  # what may follow a value in JSON


class DocumentError(ValueError):
    """A text is not valid YAML or JSON; the message is a phrase, with the line where known."""


@contextmanager
def reading(
    place: object, advice: str = "restore it", errors: type[Exception] | tuple[type[Exception], ...] = OSError
) -> Iterator[None]:
    """Raise ManifestError where what lies at a place cannot be read, or is not of its form.

    `errors` are those that reading it raises; Exception: a library raises anything on damage.
    """
    try:
        yield
    except XretError:
        raise
    except UnicodeDecodeError as error:
        raise ManifestError(f"{place}: this is not UTF-8 ({error.reason}); save it as UTF-8.") from error
    except DocumentError as error:
        form = "JSON" if str(place).endswith(".json") else "YAML"
        raise ManifestError(f"{place}: this is not valid {form} ({error}); correct it.") from error
    except errors as error:
        gone = isinstance(error, FileNotFoundError)
        what = "there is no such file" if gone else f"this cannot be read ({reason(error)})"
        raise ManifestError(f"{place}: {what}; {advice}.") from error


def read_yaml(path: Path) -> Any:
    """Return the content of a YAML file; OSError, or DocumentError if it is not valid or names a key twice."""
    try:
        return yaml.load(path.read_bytes().decode("utf-8-sig"), _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise DocumentError(f"{where}{error.problem}") from error
    except (yaml.YAMLError, ValueError, LookupError, RecursionError) as error:  # of values that do not fit their tags
        raise DocumentError(" ".join(str(error).split())) from error


def read_json(path: Path) -> Any:
    """Return the content of a JSON file; errors as of `read_yaml`."""
    return parse_json(path.read_bytes())


def parse_json(text: str | bytes) -> Any:
    """Return the content of a JSON text; DocumentError if it is not valid, or names a key twice."""
    try:
        return json.loads(text, object_pairs_hook=_mapping)
    except (ValueError, RecursionError) as error:
        raise DocumentError(str(error)) from error


def json_items(path: Path) -> Iterator[tuple[str, int | None, Any]]:
    """Yield the keys of the mapping in a JSON file, each with None and its value; of a list an empty one.

    After that come the items of the list, each with the key and its number. The file is read in blocks. A document that
    is no mapping gives nothing. Errors as of `read_json`.
    """
    with path.open("rb") as file:
        encoding = json.detect_encoding(file.read(4))
    try:
        with path.open(encoding=encoding, errors="surrogatepass") as text:
            yield from _Blocks(text).items()
    except (ValueError, RecursionError) as error:
        if isinstance(parse_json(path.read_bytes()), dict):  # which says where it is not valid
            raise DocumentError(str(error)) from error


class _Blocks:
    """A JSON text, of which a block is in memory at a time, from the place `at` on."""

    def __init__(self, file: TextIO) -> None:
        self.file, self.text, self.at = file, "", 0

    def items(self) -> Iterator[tuple[str, int | None, Any]]:
        """Yield what `json_items` does; ValueError: the text is not valid, or no mapping."""
        keys = set[str]()
        self._require("{")
        for _ in self._members("}"):
            key = self._value()
            if not isinstance(key, str) or key in keys:
                raise ValueError(f"{key!r} is no key, or stands twice")
            keys.add(key)
            self._require(":")
            is_list = self._take("[")
            yield key, None, [] if is_list else self._value()
            for number, _ in enumerate(self._members("]")) if is_list else ():
                yield key, number, self._value()
        if (self.text[self.at :] + self.file.read()).strip(_SPACES):
            raise ValueError("something stands after the end")

    def _members(self, end: str) -> Iterator[None]:
        """Pause before each member of a list or mapping that has begun, which is then to be read."""
        closed = self._take(end)
        while not closed:
            yield
            closed = self._take(end)
            if not closed:
                self._require(",")

    def _require(self, mark: str) -> None:
        if not self._take(mark):
            raise ValueError(f"{self.text[self.at]!r} stands where {mark!r} is expected")

    def _take(self, mark: str) -> bool:
        """Pass over spaces, and over a mark if it comes next."""
        while not self.text[self.at : self.at + 1].strip(_SPACES):
            self.at += 1
            if self.at >= len(self.text):
                self._read_on()
        taken = self.text[self.at] == mark
        self.at += taken
        return taken

    def _value(self) -> Any:
        self._take("")
        while True:
            with suppress(json.JSONDecodeError):  # it goes on in the next block
                value, end = _DECODER.raw_decode(self.text, self.at)
                if self.text[end : end + 1] in _AFTER:  # else a number may go on
                    self.at = end
                    return value
            self._read_on()

    def _read_on(self) -> None:
        """Read a block, or as much as a long value has already."""
        rest = self.text[self.at :]
        more = self.file.read(max(_BLOCK, len(rest)))
        if not more:
            raise ValueError("it ends too early")
        self.text, self.at = rest + more, 0


def _mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        keys = [key for key, _ in pairs]
        raise DocumentError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} stands twice in a mapping")
    return mapping


_DECODER = json.JSONDecoder(object_pairs_hook=_mapping)


class _Loader(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                problem = f"the key {key.value!r} stands twice in a mapping"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            seen.add(key.value)
        return node


# Whole numbers are those of YAML 1.2: to PyYAML 024 is 20, and 1:30 is 90.
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in known if not tag.endswith(":int")]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"[-+]?[0-9][0-9_]*$"), list("-+0123456789"))
_Loader.add_constructor("tag:yaml.org,2002:int", lambda _, node: int(node.value))
_Loader.add_constructor("tag:yaml.org,2002:timestamp", yaml.SafeLoader.construct_yaml_str)  # type: ignore[type-var]  # a name may be a date
