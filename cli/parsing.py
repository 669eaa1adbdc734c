"""How options that several commands have are read, and refused before any work begins."""

import json
import re
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from ..heads.recipes.names import lineage, recipe_names
from ..heads.recipes.settings import settings_of
from ..pipeline.errors import CacheError
from ..pipeline.files import require_run, require_store, require_writable
from ..pipeline.wording import printable

_WEIGHTS = "HUB_ID|DIR|FILE"
_Command = TypeVar("_Command", bound=Callable[..., Any])


def typed() -> str:
    """Return how a shell finds this command: ``xret``, or its path, as in a clone, whose environment is not active."""
    program = sys.argv[0]
    return program if Path(program).name == "xret" and shutil.which("xret") is None else "xret"


def show(value: Any, lines: str | Iterable[str]) -> None:
    """Print the result of a command: the value as JSON after ``--json``, else the lines, safe for a terminal."""
    if click.get_current_context().find_root().params.get("as_json"):
        click.echo(json.dumps(value))
        return
    for line in lines.split("\n") if isinstance(lines, str) else lines:
        click.echo(printable(line))


def comma_list(_ctx: click.Context, _parameter: click.Parameter, value: str | None) -> tuple[str, ...]:
    """Split a comma-separated option into its non-empty parts."""
    return tuple(part.strip() for part in (value or "").split(",") if part.strip())


def key_values(_ctx: click.Context, parameter: click.Parameter, value: tuple[str, ...]) -> dict[str, str]:
    """Return ``KEY=VALUE`` options by key."""
    pairs = {}
    for word in value:
        key, equals, text = (part.strip() for part in word.partition("="))
        if not (key.strip(". ") and equals and text):
            raise click.BadParameter(f"'{word}' must have the form {parameter.metavar}")
        if key in pairs:
            raise click.BadParameter(f"{key} is given twice")
        pairs[key] = text
    return pairs


_COMMA = re.compile(r",(?![^\[\]]*\])")  # none within brackets: [words, bert] is one value


def key_choices(ctx: click.Context, parameter: click.Parameter, value: tuple[str, ...]) -> dict[str, list[str]]:
    """Return the values of ``KEY=V1,V2`` options by key; a list in brackets is one value."""
    choices = {}
    for key, text in key_values(ctx, parameter, value).items():
        choices[key] = [part.strip() for part in _COMMA.split(text)]
        if not all(choices[key]):
            raise click.BadParameter(f"'{key}={text}' must have the form {parameter.metavar}")
        if text.count("[") != text.count("]"):
            raise click.BadParameter(f"'{key}={text}' has half of a pair of brackets")
    return choices


def workers(_ctx: click.Context, _parameter: click.Parameter, value: str | None) -> int | str | None:
    """Return a number of workers, or the address of a Dask scheduler."""
    if value is None or re.match("(tcp|tls|ucx|wss?)://.", value):
        return value
    if not value.isdecimal() or int(value) < 1:
        raise click.BadParameter(f"'{value}' is neither a number nor the address of a Dask scheduler")
    return int(value)


class Output(click.Path):
    """What a command writes. It may lie below folders that are not there yet: they are made with it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path, or refuse it where nothing can be written there."""
        path: Any = super().convert(value, param, ctx)
        require_writable(path, param.opts[-1] if param else "path")
        return path


class _There(click.Path):
    """What a command reads, which is looked for before anything is imported that takes a second."""

    def __init__(self, check: Callable[[str], None]) -> None:
        super().__init__()
        self._check = check

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path or URL; the error of the check where it is none."""
        path: Any = super().convert(value, param, ctx)
        self._check(path)
        return path


def _require_run_or_store(path: str) -> None:
    try:
        require_store(path)
    except CacheError:
        require_run(path)


def _require_run_or_id(path: str) -> None:
    if Path(path).exists() or not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", path):  # a name that may be the hub's
        require_run(path)


RUN, STORE = _There(require_run), _There(require_store)
RUN_OR_STORE, RUN_OR_ID = _There(_require_run_or_store), _There(_require_run_or_id)
FOLDER = click.Path(path_type=Path, file_okay=False, exists=True)  # to read from
NEW_FOLDER = Output(path_type=Path)  # whether it may be there already is the command's to say
NEW_FILE = Output(path_type=Path, dir_okay=False)


def settings_option(what: str) -> Callable[[_Command], _Command]:
    """Return the option ``--set``, whose value is a dictionary; `what` its help says it changes."""
    how: Any = {"multiple": True, "callback": lambda _ctx, _parameter, value: settings_of(value)}
    return click.option("--set", "settings", metavar="KEY=VALUE", help=f"Change a value {what}; repeatable.", **how)


def together(*options: Callable[[_Command], _Command]) -> Callable[[_Command], _Command]:
    """Return several options, in their order, as one."""

    def add(command: _Command) -> _Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


device_option = click.option("--device", default="auto", help="auto, cpu or cuda.")
seed_option = click.option("--seed", default=0, type=click.IntRange(0, 2**63 - 1), help="Same seed, same numbers.")
split_option = click.option("--split", default="test", help="The split to use.")
part_option = click.option(
    "--split",
    show_default="all",
    callback=lambda _ctx, _parameter, value: None if value == "all" else value,
    help="The split of the store to use, in place of all of it.",
)
store_option = click.option("--store", type=STORE, help="The feature store, if it has moved since RUN was trained.")
other_store_option = click.option(
    "--store", type=STORE, help="Another feature store of the same encoders; by default each run's own."
)
hubness_option = click.option("--hubness", is_flag=True, help="Hold back items that answer too many queries (QB-Norm).")
data_root_option = click.option(
    "--data-root", type=FOLDER, help="The folder of the images, or the one that the manifest's paths start from."
)
trust_option = click.option(
    "--trust", is_flag=True, help="Run the code of a run or checkpoint that came from elsewhere, and unpickle weights."
)
weights_options = together(
    click.option("--visual-weights", metavar=_WEIGHTS, help="The image encoder's weights, if they have moved."),
    click.option("--text-weights", metavar=_WEIGHTS, help="The text encoder's weights, if they have moved."),
    trust_option,
)
# For commands that write the embeddings of a run.
embedding_options = together(
    store_option,
    part_option,
    click.option(
        "--dims",
        type=click.IntRange(min=1),
        help="Reduce embeddings to this many dimensions by a rotation; for cosine similarities.",
    ),
    click.option(
        "--dtype",
        type=click.Choice(["float32", "int8"]),
        default="float32",
        help="The type of embeddings, or of weights (--to onnx); int8 takes one byte a number.",
    ),
    hubness_option,
    trust_option,
    device_option,
)


class _Recipe(click.Path):
    """A recipe's file, or its name, which Tab completes."""

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Return the bundled recipes that begin so, beside files."""
        names = [name for name in recipe_names() if name.startswith(incomplete)]
        return [*map(CompletionItem, names), *super().shell_complete(ctx, param, incomplete)]


RECIPE = _Recipe()


def recipe_option(*, required: bool) -> Callable[[_Command], _Command]:
    """Return the option ``--recipe``; click itself would take the last of several."""

    def one(_ctx: click.Context, _parameter: click.Parameter, value: tuple[str, ...]) -> str | None:
        if len(value) > 1:
            raise click.BadParameter(f"give one, not {' and '.join(value)}; `xret ablate --baseline` takes others")
        for name in value:
            lineage(name)  # refuses a name that there is not
        return value[0] if value else None

    how: Any = {"required": required, "multiple": True, "callback": one, "metavar": "NAME|FILE", "type": RECIPE}
    return click.option("--recipe", help="A name that `xret recipes` lists, or a YAML file.", **how)
