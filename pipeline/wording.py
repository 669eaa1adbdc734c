"""Numbers in messages, as people read them."""

_BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_TIMES = ((3600, "hours"), (60, "minutes"), (1, "seconds"))


def counted(number: int, thing: str) -> str:
    """Return a number with its noun: ``1 shard``, ``2,048 shards``."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def in_bytes(size: float) -> str:
    """Return a number of bytes: ``4.7 GB``, ``8.1 MB``, ``0.5 kB``."""
    return _in_units(size, _BYTES)


def in_time(seconds: float) -> str:
    """Return a length of time: ``6.5 hours``, ``2.0 minutes``, ``0.4 seconds``."""
    return _in_units(seconds, _TIMES)


def _in_units(number: float, units: tuple[tuple[float, str], ...]) -> str:
    """Return a number in the largest of the units, given from the largest, of which it is about one at least."""
    unit, name = next((of for of in units if number >= 0.9999 * of[0]), units[-1])
    return f"{number / unit:,.1f} {name}"


def some_of(lines: list[str], most: int = 3) -> list[str]:
    """Return the first few lines, and how many more there are instead of the rest."""
    return lines if len(lines) <= most else [*lines[:most], f"and {len(lines) - most:,} more"]
