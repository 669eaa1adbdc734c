"""Progress on standard error: a bar on a terminal, a line every few seconds elsewhere."""

import sys
import threading
import time
from typing import NoReturn

from tqdm import tqdm


class Progress:
    """Counts items of work; use as a context manager.

    Args:
        title: what is being done, in a word or two.
        total: how many items there are in all.
        unit: what an item is, in the plural (``images``).
        done: how many of them were done before; they do not count in the rate.
        seconds: between two lines where standard error is not a terminal.
    """

    def __init__(self, title: str, total: int, unit: str, done: int = 0, seconds: float = 5.0) -> None:
        self.title, self.total, self.unit, self.seconds = title, total, unit, seconds
        self.first = self.count = done
        self.note = ""
        self._bar: tqdm[NoReturn] | None = None

    def __enter__(self) -> "Progress":
        self._began = self._spoke = time.monotonic()
        self._lock = threading.Lock()
        if sys.stderr.isatty():
            self._bar = tqdm(total=self.total, initial=self.first, desc=self.title, unit=f" {self.unit}")
        else:
            self._speak()
        return self

    def update(self, items: int, note: str = "") -> None:
        """Count `items` more as done, from any thread; `note` is shown after the rate."""
        with self._lock:
            self.count += items
            self.note = note
            if self._bar is not None:
                self._bar.set_postfix_str(note, refresh=False)
                self._bar.update(items)
            elif time.monotonic() - self._spoke >= self.seconds:
                self._speak()

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
        elif self._told != (self.count, self.note):
            self._speak()

    @property
    def rate(self) -> float:
        """Items a second since the start."""
        return (self.count - self.first) / max(time.monotonic() - self._began, 1e-9)

    def _speak(self) -> None:
        self._spoke, self._told = time.monotonic(), (self.count, self.note)
        line = f"{self.title}: {self.count}/{self.total} {self.unit}"
        if self.count > self.first:
            left = (self.total - self.count) / self.rate
            line += f", {self.rate:.1f} {self.unit}/s, {left:.0f} s left"
        print(line + (f", {self.note}" if self.note else ""), file=sys.stderr, flush=True)
