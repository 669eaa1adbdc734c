"""Numbers and foreign texts in messages, as people read them."""

import re
from collections.abc import Sequence

# Control characters, by which a text could command a terminal, turns of direction, and halves of pairs.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Return a text that may come from a stranger as a terminal can show it on one line: its white space as spaces."""
    return _UNPRINTABLE.sub(lambda match: " " if match[0].isspace() else repr(match[0])[1:-1], text)


def reason(error: BaseException) -> str:
    """Return what the system says of an error, else the first line of its message or its type, to stand in brackets."""
    said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return _first_line(said) or type(error).__name__


def raised(error: BaseException) -> str:
    """Return an error's type and the first line of its whole message, where no one knows which file it is about."""
    return ": ".join(filter(None, [type(error).__name__, _first_line(str(error))]))


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0].rstrip(".:")


def counted(number: int, thing: str) -> str:
    """Return a number with its noun: ``1 shard``, ``2,048 shards``."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def in_bytes(size: float) -> str:
    """Return a number of bytes: ``4.7 GB``, ``8.1 MB``, ``0.5 kB``."""
    return _in_units(size, ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")))


def in_time(seconds: float) -> str:
    """Return a length of time: ``6.5 hours``, ``2.0 minutes``, ``0.4 seconds``."""
    return _in_units(seconds, ((3600, "hours"), (60, "minutes"), (1, "seconds")))


def _in_units(number: float, units: tuple[tuple[float, str], ...]) -> str:
    """Return a number in the first unit of which it is about one at least; the units fall."""
    unit, name = next((of for of in units if number >= 0.9999 * of[0]), units[-1])
    return f"{number / unit:,.1f} {name}"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table for a terminal: the first column aligned to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        ).rstrip()
        for row in rows
    ]


def some_of(lines: list[str], most: int = 3) -> list[str]:
    """Return the first few lines, and how many more there are instead of the rest."""
    return lines if len(lines) <= most else [*lines[:most], f"and {len(lines) - most:,} more"]
