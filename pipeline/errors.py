"""What can go wrong. Every message says what, where and what to do, in one sentence.

It names options as the command line has them. Where no command runs, ``--data-root DIR`` reads ```data_root=DIR```, as
arguments of Python are named. What stands in backticks stays.
"""

import difflib
import re
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

on_command_line = False  # whether a command runs
_OPTION = re.compile(r"`[^`]*`|(?<![\w-])--([a-z]+(?:-[a-z]+)*)(?: ((?:hf:)?[A-Z]{2}\w*(?:,\w+)*|none)(?![\w=]))?")
_ARGUMENTS = {"set": "settings", "baseline": "baselines", "save": "files", "not": "unlike"}  # with another name


class XretError(Exception):
    """A failure that the message explains to the user: the command line prints it and exits with 1."""

    def __str__(self) -> str:
        def argument(match: re.Match[str]) -> str:
            if match[1] is None:
                return match[0]
            name = _ARGUMENTS.get(match[1], match[1].replace("-", "_"))
            return f"`{name}={match[2]}`" if match[2] else f"`{name}`"

        return super().__str__() if on_command_line else _OPTION.sub(argument, super().__str__())


class ManifestError(XretError, ValueError):
    """A manifest, or a file or folder of pictures or captions that it names, cannot be used."""


class SampleError(XretError):
    """One image or caption cannot be read or encoded; `--on-error skip` records it and goes on."""

    def __init__(self, sample: str, reason: str) -> None:
        super().__init__(f"{sample}: {reason}")
        self.sample = sample
        self.reason = reason

    def __reduce__(self) -> tuple[type["SampleError"], tuple[str, str]]:
        return SampleError, (self.sample, self.reason)  # it travels from a Dask worker


class EncoderError(XretError, ValueError):
    """An encoder or its weights cannot be used."""


class VectorsError(XretError, ValueError):
    """A file of word vectors cannot be used."""


class CacheError(XretError):
    """A feature store cannot be opened, does not fit, or is damaged."""


class StoreError(XretError):
    """An object store does not answer, or refuses; what lies there may be sound."""


class OutputError(XretError):
    """The output of a command cannot be written where it should be."""


class DeviceError(XretError, ValueError):
    """The device is missing."""


class RecipeError(XretError, ValueError):
    """A recipe has unknown or wrong keys; the message lists all of them at once."""


class RunError(XretError):
    """A run folder cannot be written or read, or training cannot go on."""


class OutOfMemory(RunError):
    """The memory of the host or of a device is too small."""


class NotFinite(RunError):
    """The loss or the similarities of a training are not finite."""

    def __init__(self, sentence: str, seen: str | None = None) -> None:
        super().__init__(sentence)
        self.seen = seen or sentence  # without what to do about it in a run of its own


class QueryError(XretError, ValueError):
    """What is searched for, or how, makes no sense for this run or gallery."""


def nearest(word: str, known: list[str]) -> str:
    """Return `` (did you mean 'x'?)`` for the known word nearest to `word`, or an empty string."""
    match = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f" (did you mean '{match[0]}'?)" if match else ""


def require_packages(
    needs: str, packages: Mapping[str, str], extra: str, error: type[XretError] = RunError, instead: str = ""
) -> None:
    """Raise `error` where one of the packages, module by pip's name, is not installed; an `extra` of xret installs it.

    In the sentence `needs` stands before them, as ``a plot needs``, and `instead`, what else can be done, at its end.
    """
    missing = [name for name, module in packages.items() if find_spec(module) is None]
    if missing:
        raise error(f"{needs} {' and '.join(missing)}; install with `pip install 'xret[{extra}]'`{instead}")


def require_pyarrow(error: type[XretError], needs: str, instead: str = "") -> Any:
    """Return pyarrow with its modules ``ipc`` and ``parquet``; arguments and error as of `require_packages`."""
    require_packages(needs, {"pyarrow": "pyarrow"}, "parquet", error, instead)
    for module in ("pyarrow.ipc", "pyarrow.parquet"):
        import_module(module)
    return import_module("pyarrow")
