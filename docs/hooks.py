"""Fills `reference/recipe-keys.md` and `reference/cli.md` from the code."""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import click

from xret.cli import main
from xret.heads.modules.adapters import ADAPTERS, KINDS
from xret.heads.modules.aggregators import AGGREGATORS
from xret.heads.modules.losses import LOSSES
from xret.heads.modules.similarity import SIMILARITIES
from xret.heads.recipes.blocks import SECTIONS
from xret.heads.recipes.schema import fields

PARTS = {
    "Adapters": (ADAPTERS, f"adapter.KIND, for the kinds {', '.join(KINDS)}"),
    "Aggregators": (AGGREGATORS, "aggregator.image` and `aggregator.text"),
    "Similarities": (SIMILARITIES, "similarity"),
    "Losses": (LOSSES, "loss.NAME, each also with a `weight"),
}


def on_page_markdown(markdown: str, **_: object) -> str:
    """Replace each mark by what the code has."""
    for mark, lines in (("<!-- recipe keys -->", _tables), ("<!-- commands -->", _commands)):
        markdown = markdown.replace(mark, "\n".join(lines())) if mark in markdown else markdown
    return markdown


def _commands(command: click.Command = main, words: tuple[str, ...] = ("xret",)) -> Iterator[str]:
    """Yield what `--help` prints of a command and of those below it."""
    context = click.Context(command, info_name=" ".join(words))
    yield from (f"{'#' * (len(words) + 1)} {' '.join(words)}", "", "```", *context.get_usage()[7:].splitlines(), "```")
    for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
        example = paragraph.removeprefix("\b\n")
        yield from ("", "```", example, "```") if example != paragraph else ("", paragraph)
    records = [param.get_help_record(context) for param in command.get_params(context) if param.name != "help"]
    yield from ("", "| option | |", "|---|---|") if any(records) else ()
    for record in filter(None, records):
        yield "| `{}` | {} |".format(*(part.replace("|", "\\|") for part in record))
    yield ""
    for name, inner in sorted(getattr(command, "commands", {}).items()):
        yield from _commands(inner, (*words, name))


def _tables() -> Iterator[str]:
    for name, section in SECTIONS.items():
        yield from (
            "",
            f"## `{name}`",
            "",
            section.__doc__.strip(),
            "",
            "| key | value | default | |",
            "|---|---|---|---|",
        )
        comments = _comments(section)
        for key, field in fields(section).items():
            yield _row(f"{name}.{key}", field, comments.get(key, ""))
    for title, (registry, path) in PARTS.items():
        yield from ("", f"## {title}", "", f"Keys of `{path}`.")
        for name, part in registry.items():
            rows = [_row(key, field, "") for key, field in fields(part).items()]
            yield from ("", f"### `{name}`", "", f"{registry.when[name][0].upper()}{registry.when[name][1:]}.", "")
            yield from (["| key | value | default | |", "|---|---|---|---|", *rows] if rows else ["It has no keys."])


def _row(key: str, field: Any, comment: str) -> str:
    default = (
        "null"
        if field.default is None
        else str(field.default).lower()
        if field.default in (True, False)
        else field.default
    )
    return f"| `{key}` | {_kind(field.type)} | `{default}` | {comment} |"


def _kind(kind: Any) -> str:
    """Return an annotation in words."""
    if get_origin(kind) is Annotated:
        inner, bound = get_args(kind)
        return f"{_kind(inner)}, {bound.text}"
    if get_origin(kind) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(kind))
    if kind is type(None):
        return "null"
    if get_origin(kind) is list:
        return "a list"
    if get_args(kind) or get_origin(kind) is Union:
        return " or ".join(map(_kind, get_args(kind)))
    return {int: "whole number", float: "number", bool: "true or false", str: "text"}[kind]


def _comments(section: type) -> dict[str, str]:
    """Return the comments of a dataclass by field: those on its lines, and the heading above it."""
    lines = textwrap.dedent(inspect.getsource(section)).splitlines()
    found, heading, last = {}, "", 0
    for node in ast.parse("\n".join(lines)).body[0].body:  # type: ignore[attr-defined]
        above = [line.strip()[2:] for line in lines[last : node.lineno - 1] if line.strip().startswith("# ")]
        heading, last = " ".join(above) or heading, node.end_lineno
        if isinstance(node, ast.AnnAssign):
            beside = [
                line.partition("  # ")[2] or line.strip().partition(" # ")[2] for line in lines[node.lineno - 1 : last]
            ]
            text = " ".join(filter(None, [heading, *beside]))
            found[node.target.id] = re.sub(r"\|", r"\\|", text)  # type: ignore[union-attr]
    return found
