"""The command line: A command parses, calls one function and prints."""

import errno
import io
import json
import logging
import shlex
import signal
import sys
import warnings
from typing import Any, NoReturn

import click

from ..pipeline import errors
from ..pipeline.errors import XretError
from ..pipeline.wording import printable
from .cache import cache
from .demo import demo
from .eval import eval_, report
from .export import export, index
from .extract import extract, import_
from .fit import fit
from .memory import keep_freed_memory
from .parsing import typed
from .recipes import list_, recipes
from .search import search, serve
from .series import ablate, tune
from .train import average, finetune, train_head

_WORDS = "xret.words"  # key of what was typed after ``xret``
_COMPUTE = ("ablate", "demo", "extract", "finetune", "fit", "train-head", "tune")  # long, in a process of their own
ANYWHERE = ("--json", "-v", "--verbose", "-q", "--quiet")  # options of ``xret`` that may also follow the command
_LEVELS = {None: logging.INFO, True: logging.DEBUG, False: logging.WARNING}


class Interrupted(click.ClickException):
    """Somebody pressed Ctrl-C."""

    exit_code = 128 + signal.SIGINT  # as a shell says it


class Lines(logging.Handler):
    """Writes what the library logs to standard error, beside its progress bars and safe for a terminal."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record as a line."""
        from tqdm import tqdm

        tqdm.write(printable(self.format(record)), file=sys.stderr)


class Commands(click.Group):
    """Ends a user's mistake in one sentence on standard error: exit code 1 for a failure, 2 for wrong usage."""

    def main(self, *args: Any, **how: Any) -> Any:
        """Run the command line; what a terminal cannot show is escaped, as ``\\u2026`` on one of Latin-1."""
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        return super().main(*args, **how)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Remember what was typed, and move the options of ``xret`` itself before the command."""
        ctx.meta[_WORDS] = list(args)
        end = args.index("--") if "--" in args else len(args)  # what follows is no option
        options, others = ([word for word in args[:end] if (word in ANYWHERE) == wanted] for wanted in (True, False))
        try:
            return super().parse_args(ctx, options + others + args[end:])
        except click.UsageError as error:
            return _end(error, as_json="--json" in options)

    def invoke(self, ctx: click.Context) -> object:
        """Run the command; with ``--json`` an error is ``{"error": sentence}``."""
        words = ctx.meta[_WORDS]
        # When two writes fail, Zarr raises one error, and asyncio logs the other.
        logging.getLogger("asyncio").addFilter(lambda record: "was never retrieved" not in record.getMessage())
        logger = logging.getLogger("xret")
        logger.setLevel(_LEVELS[ctx.params.get("verbose")])
        logger.handlers = [Lines()]
        if _name(self, words) in _COMPUTE:
            keep_freed_memory()
        errors.on_command_line = True
        try:
            return super().invoke(ctx)
        except XretError as error:
            failure = click.ClickException(printable(str(error)))
        except click.ClickException as error:
            failure = error
        except OSError as error:
            if error.errno == errno.EPIPE or error.strerror is None:
                raise
            where = f" ({error.filename})" if error.filename else ""
            full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            way = "; make room, and run the same command again" if full else ""
            failure = click.ClickException(f"{error.strerror}{where}{way}")
        except KeyboardInterrupt:
            warnings.filterwarnings("ignore", ".* was never awaited", RuntimeWarning)  # what Zarr was about to write
            failure = Interrupted(f"stopped by Ctrl-C; run again `{shlex.join(_again(self, words))}`")
        finally:
            errors.on_command_line = False
        return _end(failure, as_json=bool(ctx.params.get("as_json")))


def _end(failure: click.ClickException, *, as_json: bool) -> NoReturn:
    """Raise a failure, which click prints, or print it as JSON and exit."""
    if not as_json:
        raise failure
    click.echo(json.dumps({"error": failure.format_message()}), err=True)
    sys.exit(failure.exit_code)


def _again(commands: click.Group, words: list[str]) -> list[str]:
    """Return the words that resume what was stopped, or do it again."""
    command = commands.commands.get(_name(commands, words))
    resumes = command is not None and any(option.name == "resume" for option in command.params)
    return [typed(), *words, *(["--resume"] if resumes and "--resume" not in words else [])]


def _name(commands: click.Group, words: list[str]) -> str:
    """Return the name of the command in what was typed; an empty text if there is none."""
    return next((word for word in words if word in commands.commands), "")


_HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 120, "show_default": True}


@click.group(cls=Commands, context_settings=_HELP)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON value instead of text; errors too.")
@click.option(
    "-v/-q",
    "--verbose/--quiet",
    "verbose",
    default=None,
    help="More about each epoch, or no progress. train.log of a run always has everything.",
)
@click.version_option(package_name="xret")
def main(**_: object) -> None:
    """Cache frozen features once, train image-text retrieval heads in minutes.

    \b
    xret demo                                              # the whole loop
    xret fit photos captions.csv --out holiday             # on your pictures
    xret extract rsicd --data-root DIR --store rsicd.zarr  # features, once
    xret train-head rsicd.zarr --recipe setdiv --out run   # a head on them
    xret eval run                                          # its table

    --json, -v and -q may follow any command.

    This line in ~/.bashrc completes commands and options by Tab; for other shells, zsh_source or fish_source:

    \b
    eval "$(_XRET_COMPLETE=bash_source xret)"
    """


_STAGES = (demo, fit, extract, import_, cache, train_head, finetune, eval_, average, ablate, tune)
_AROUND_THEM = (recipes, list_, report, search, export, index, serve)
for command in (*_STAGES, *_AROUND_THEM):
    inner = command.commands.values() if isinstance(command, click.Group) else ()
    for each in (command, *inner):  # click keeps the names of the first call, which may be without the group
        each.context_settings.update(_HELP)
    main.add_command(command)
