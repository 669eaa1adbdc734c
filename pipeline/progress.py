"""Progress on standard error: tqdm's bar on a terminal, a line every few seconds elsewhere; nothing with --quiet."""

import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from tqdm import tqdm

_SECONDS = 5.0  # between two lines
_LINE = "{desc}: {n_fmt}/{total_fmt}{unit}"
_silent = ContextVar("silent", default=False)
_log = logging.getLogger("xret")


def hidden() -> bool | None:
    """Return what tqdm's `disable` takes: True with ``--quiet``, else None, which hides a bar without a terminal."""
    return True if _silent.get() or _log.level > logging.INFO else None


@contextmanager
def silent() -> Iterator[None]:
    """Show no progress of what this thread begins inside."""
    token = _silent.set(True)
    try:
        yield
    finally:
        _silent.reset(token)


def in_notebook() -> bool:
    """Return whether this is a notebook, which shows bars although it is no terminal."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(shell, "kernel")


class Progress:
    """Counts items of work, from any thread; use as a context manager.

    `unit` is what an item is, in the plural; ``bytes`` are shown as kB and the like. What was `done` before does not
    count in the rate.
    """

    def __init__(self, title: str, total: int, unit: str, done: int = 0) -> None:
        scaled = unit == "bytes"
        self._how: dict[str, Any] = {"total": total, "initial": done, "unit_scale": scaled}
        self._how["unit"] = "B" if scaled else f" {unit}"
        self._title, self._count, self._lock = title, done, threading.Lock()

    def __enter__(self) -> "Progress":
        self._began, self._bar, self._hidden = time.monotonic(), None, hidden()
        if sys.stderr.isatty():
            self._bar = tqdm(desc=self._title, dynamic_ncols=True, disable=self._hidden, **self._how)
        else:
            self._print()
        return self

    def update(self, items: int) -> None:
        """Count `items` more as done."""
        with self._lock:
            self._count += items
            if self._bar is not None:
                self._bar.update(items)
            elif time.monotonic() - self._printed >= _SECONDS:
                self._print()

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
        elif self._shown != self._count:
            self._print()

    def _print(self) -> None:
        self._printed, self._shown = time.monotonic(), self._count
        if self._hidden:
            return
        elapsed = self._printed - self._began
        form = _LINE if self._count == self._how["initial"] else _LINE + ", {rate_noinv_fmt}, {remaining} left"
        line = tqdm.format_meter(self._count, elapsed=elapsed, prefix=self._title, bar_format=form, **self._how)
        print(line, file=sys.stderr, flush=True)
