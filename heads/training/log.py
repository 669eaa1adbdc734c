"""The log of a training: a bar, lines for `logging`, and `train.log` in the run's folder."""

import logging
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ...pipeline.progress import in_notebook

LOG = "train.log"
_log = logging.getLogger("xret")


class TrainLog:
    """The log of one training; use as a context manager.

    An epoch is a line of level INFO, or DEBUG where the training has a `title`, since it is one of several; notes are
    warnings. The bar is shown on a terminal where INFO is.

    Args:
        folder: the run's.
        amount: how many epochs there are to be, the items of one, and how many items of all were done before.
        unit: ``image`` or ``caption``.
        title: what the bar begins with; None: there is no bar.
    """

    def __init__(self, folder: Path, amount: tuple[int, int, int], unit: str, title: str | None = "") -> None:
        self.folder, self.title = folder, title
        self.level = logging.INFO if title == "" else logging.DEBUG  # of what is no warning
        epochs, items, done = amount
        self.epochs = epochs
        # Nobody sets levels of logging in a notebook; None: hidden where there is no terminal.
        notebook = in_notebook() and _log.level == logging.NOTSET
        shown = title is not None and (notebook or _log.isEnabledFor(logging.INFO)) and done < epochs * items
        hidden = (False if notebook else None) if shown else True
        self.bar = tqdm(total=epochs * items, initial=done, unit=f" {unit}s", leave=not title, disable=hidden)

    def __enter__(self) -> "TrainLog":
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        self.bar.close()
        if error is not None:
            self.write("stopped by Ctrl-C" if isinstance(error, KeyboardInterrupt) else f"ended: {error!r}")

    def step(self, epoch: int, items: int, values: Sequence[float]) -> None:
        """Show a step of `epoch`, from 0: how many more items, and the loss followed by its terms."""
        if not self.bar.disable:
            self.bar.set_description_str(f"{self.title and f'{self.title}, '}epoch {epoch + 1}/{self.epochs}", False)
            self.bar.set_postfix_str(describe(values, ()), False)
            self.bar.update(items)

    def epoch(self, line: dict[str, Any], best_epoch: int, best_rsum: float) -> None:
        """Log a complete epoch: its line of metrics.jsonl, and the best epoch so far with its validation RSUM."""
        values, terms = [line["loss"], *line["parts"].values()], list(line["parts"])
        best = "the best so far" if best_epoch == line["epoch"] else f"best {best_rsum:.1f} in epoch {best_epoch}"
        end = f"val RSUM {line['rsum']:.1f}, {best}, {line['seconds']:.1f} s"
        title = f"epoch {line['epoch']}/{self.epochs}"
        long = f"{title}: {describe(values, terms)}, lr {line['lr']:.3g}, {end}"
        short = long if _log.isEnabledFor(logging.DEBUG) else f"{title}: {describe(values, ())}, {end}"
        if not self.bar.disable and self.level == logging.INFO and not _log.isEnabledFor(self.level):
            self.bar.write(short, sys.stderr)
        _log.log(self.level, short)
        self.write(long)

    def say(self, sentence: str, level: int = logging.WARNING) -> None:
        """Log a sentence."""
        _log.log(level, sentence)
        self.write(sentence)

    def write(self, line: str) -> None:
        """Append a line to `train.log`, with the time; a log that cannot be written stops no training."""
        with suppress(OSError), (self.folder / LOG).open("a", encoding="utf-8") as file:
            file.write(f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} {line}\n")


def describe(values: Sequence[float], terms: Sequence[str]) -> str:
    """Return the loss, and the terms that are named."""
    inner = ", ".join(f"{term} {part:.4f}" for term, part in zip(terms, values[1:], strict=False))
    return f"loss {values[0]:.4f}" + (f" ({inner})" if inner else "")
