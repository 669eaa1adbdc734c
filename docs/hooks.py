"""Fills the pages of the reference from the code, and makes those of Python's names and of the notebooks."""

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import click
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import xret
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
PARTED = ("nn", "similarities", "losses")  # modules whose every name has a page of its own
NOTEBOOKS = {"loop": "Notebook: the loop in Python", "aggregator": "Notebook: your own aggregator"}


def on_config(config: MkDocsConfig) -> None:
    """Put the generated pages into the menu."""
    menu = {title: pages for section in config.nav if isinstance(section, dict) for title, pages in section.items()}
    pages: dict[str, list[dict[str, str]]] = {}
    for section, title, path, _ in _names():
        pages.setdefault(section, []).append({title: path})
    names = [*pages.pop(""), *({f"xret.{section}": own} for section, own in pages.items())]
    reference = menu["Reference"]
    reference[reference.index("reference/python.md")] = {"Python": ["reference/python.md", *names]}
    menu["Tutorials"] += [{title: f"tutorials/notebook-{name}.md"} for name, title in NOTEBOOKS.items()]


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the generated pages."""
    for _, _, path, text in _names():
        files.append(File.generated(config, path, content=text))
    for name in NOTEBOOKS:
        text = _notebook(Path(config.docs_dir, "notebooks", f"{name}.ipynb"))
        files.append(File.generated(config, f"tutorials/notebook-{name}.md", content=text))


def on_page_markdown(markdown: str, **_: object) -> str:
    """Replace each mark by what the code has, and a notebook by its page."""
    markdown = re.sub(r"\(notebooks/(\w+)\.ipynb\)", r"(tutorials/notebook-\1.md)", markdown)
    for mark, lines in (("<!-- recipe keys -->", _tables), ("<!-- commands -->", _commands), ("<!-- names -->", _list)):
        markdown = markdown.replace(mark, "\n".join(lines())) if mark in markdown else markdown
    return markdown


def _names() -> Iterator[tuple[str, str, str, str]]:
    """Yield the pages of what Python has: section of the menu, title, path and text."""
    alone = "    options: {heading_level: 1}\n"
    for name in sorted(xret.__all__, key=str.lower):
        path, module = f"reference/python/{name}.md", getattr(xret, name)
        if name in PARTED:
            text = f"# xret.{name}\n\n::: xret.{name}\n    options: {{members: false, show_root_heading: false}}\n"
            yield name, f"xret.{name}", path, text
            for part in sorted(name for name in vars(module) if name[0] != "_"):
                yield name, part, f"reference/python/{name}/{part}.md", f"::: xret.{name}.{part}\n{alone}"
        else:
            yield "", f"xret.{name}", path, f"::: xret.{name}\n{alone}"


def _list() -> Iterator[str]:
    """Yield a table of Python's names, each with the first sentence about it."""
    yield from ("| name | |", "|---|---|")
    for _, title, path, _ in _names():
        holder, name = (
            (xret, title[5:]) if title.startswith("xret.") else (getattr(xret, Path(path).parent.name), title)
        )
        about = inspect.getdoc(getattr(holder, name)).partition("\n\n")[0].replace("\n", " ").replace("|", "\\|")
        yield f"| [`{title}`]({path.removeprefix('reference/')}) | {about} |"


def _notebook(path: Path) -> str:
    """Return a notebook as a page; the badge, a picture of another server, becomes a link."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    texts = ("".join(cell["source"]) for cell in cells)
    pairs = zip(cells, texts, strict=True)
    page = "\n\n".join(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```" for cell, text in pairs)
    return re.sub(r"\[!\[(.*?)\]\(.*?\)\]", r"[\1]", page)


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
