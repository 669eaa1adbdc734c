"""Progress on standard error: a bar on a terminal, a line every few seconds elsewhere."""

import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from .wording import in_bytes


class Progress:
    """Counts items of work; use as a context manager.

    Args:
        title: what is being done, in a word or two; it may be changed.
        total: how many items there are in all.
        unit: what an item is, in the plural (``images``); ``bytes`` are shown as kB and the like.
        done: how many of them were done before; they do not count in the rate.
        seconds: between two lines where standard error is not a terminal.
        leave: whether the full bar stays on the terminal.
    """

    def __init__(
        self, title: str, total: int, unit: str, done: int = 0, seconds: float = 5.0, leave: bool = True
    ) -> None:
        self.title, self.total, self.unit, self.seconds, self.leave = title, total, unit, seconds, leave
        self.first = self.count = done
        self.notes: Sequence[str] = ("",)
        self._bar: tqdm[Any] | None = None

    def __enter__(self) -> "Progress":
        self._began = self._spoke = time.monotonic()
        self._lock = threading.Lock()
        if sys.stderr.isatty():
            is_bytes = self.unit == "bytes"
            self._bar = tqdm(
                desc=self.title,
                total=self.total,
                initial=self.first,
                unit="B" if is_bytes else f" {self.unit}",
                unit_scale=is_bytes,
                leave=self.leave,
                dynamic_ncols=True,
            )
        else:
            self._speak()
        return self

    def update(self, items: int, *notes: str) -> None:
        """Count `items` more as done, from any thread.

        Of `notes`, one thing told at several lengths, the longest first, a bar shows the last, a line the first.
        """
        with self._lock:
            self.count += items
            self.notes = notes or ("",)
            if self._bar is not None:
                self._bar.set_description(self.title, refresh=False)
                self._bar.set_postfix_str(self.notes[-1], refresh=False)
                self._bar.update(items)
            elif time.monotonic() - self._spoke >= self.seconds:
                self._speak()

    def keep(self, line: str) -> None:
        """Print a line that stays; on a terminal above the bar."""
        with self._lock:
            self._spoke, self._told = time.monotonic(), (self.count, self.notes)
            tqdm.write(line, file=sys.stderr)
            sys.stderr.flush()

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
        elif self._told != (self.count, self.notes):
            self._speak()

    @property
    def rate(self) -> float:
        """Items a second since the start."""
        return (self.count - self.first) / max(time.monotonic() - self._began, 1e-9)

    def _speak(self) -> None:
        self._spoke, self._told = time.monotonic(), (self.count, self.notes)
        of_bytes = self.unit == "bytes"
        done = (
            f"{in_bytes(self.count)} of {in_bytes(self.total)}"
            if of_bytes
            else f"{self.count}/{self.total} {self.unit}"
        )
        line = f"{self.title}: {done}"
        if self.count > self.first:
            left = (self.total - self.count) / self.rate
            rate = in_bytes(self.rate) if of_bytes else f"{self.rate:.1f} {self.unit}"
            line += f", {rate}/s, {left:.0f} s left"
        print(line + (f", {self.notes[0]}" if self.notes[0] else ""), file=sys.stderr, flush=True)
