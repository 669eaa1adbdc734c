"""Numbers in messages, as people read them."""


def counted(number: int, thing: str) -> str:
    """Return a number with its noun: ``1 shard``, ``2,048 shards``."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def in_bytes(size: float) -> str:
    """Return a number of bytes: ``4.7 GB``, ``8.1 MB``, ``0.5 kB``."""
    unit, name = next(((u, name) for u, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")) if size >= u), (1e3, "kB"))
    return f"{size / unit:,.1f} {name}"


def in_time(seconds: float) -> str:
    """Return a length of time: ``6.5 hours``, ``2.0 minutes``, ``0.4 seconds``."""
    unit, name = next(((u, name) for u, name in ((3600, "hours"), (60, "minutes")) if seconds >= u), (1, "seconds"))
    return f"{seconds / unit:,.1f} {name}"


def some_of(lines: list[str], most: int = 3) -> list[str]:
    """Return the first few lines, and in place of the rest how many more there are."""
    return lines if len(lines) <= most else [*lines[:most], f"and {len(lines) - most:,} more"]
