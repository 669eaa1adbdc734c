"""What a training shows while it runs: a bar, a line an epoch that stays, and the log in the run's folder."""

import sys
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from tqdm import tqdm

from ...pipeline.progress import Progress
from ...pipeline.reading.batches import Batches
from ...pipeline.wording import printable
from ..evaluation.evaluation import FEW, too_few
from ..evaluation.metrics import chance_rsum
from ..recipes.blocks import Recipe
from ..runs.info import RunInfo, versions

LOG = "train.log"
Level = Literal["quiet", "bar", "epochs", "terms"]
_LEVELS: tuple[Level, ...] = ("quiet", "bar", "epochs", "terms")
_SECONDS = 30.0  # between two lines within an epoch where there is no terminal


@dataclass(frozen=True)
class Shown:
    """How much of a training is shown on standard error; its log has all of it in any case.

    Attributes:
        level: ``quiet``: notes alone; ``bar``: a bar that goes when the training ends; ``epochs``: also a line an
            epoch that stays; ``terms``: with the terms of the loss and the learning rate.
        title: what the bar begins with, where one training is not the only one.
    """

    level: Level = "epochs"
    title: str = ""

    @classmethod
    def of(cls, verbose: bool | None, usual: Level, title: str = "") -> "Shown":
        """Return what `verbose` asks for: more than `usual` (``-v``), nothing (``-q``) or, where it is None, that."""
        if verbose is None:
            return cls(usual, title)
        return cls(_LEVELS[_LEVELS.index(usual) + 1] if verbose else "quiet", title)


EACH_EPOCH = Shown()


class Display:
    """The display of one training; use as a context manager.

    Args:
        shown: how much.
        folder: the run's, where the log is; None: this process shows and writes nothing.
        epochs: how many there are to be.
        unit: ``image`` or ``caption``.
        items: of that unit in an epoch.
        done: of all, before.
    """

    def __init__(self, shown: Shown, folder: Path | None, epochs: int, unit: str, items: int, done: int) -> None:
        self.shown, self.folder, self.epochs, self.items = shown, folder, epochs, items
        self.progress = None
        if folder is not None and shown.level != "quiet":
            leave = shown.level != "bar"
            self.progress = Progress("", epochs * items, f"{unit}s", done, _SECONDS, leave)
            self.progress.title = self._title(min(done // items, epochs - 1))

    def __enter__(self) -> "Display":
        if self.progress is not None:
            self.progress.__enter__()
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if self.progress is not None:
            self.progress.__exit__()
        if isinstance(error, KeyboardInterrupt):
            self.log("stopped by Ctrl-C")
        elif error is not None:
            self.log(f"ended: {printable(f'{type(error).__name__}: {error}')}")

    def begin(self, info: RunInfo, recipe: Recipe, epoch: int, steps: int, split: Batches, val: Batches) -> None:
        """Write into the log what is trained on what, by which versions, from which step on.

        Where the validation split `val` is too small to tell anything, or the training split too small for the batches,
        that is shown as well.
        """
        where = f"goes on after epoch {epoch}, step {steps}," if epoch or steps else "begins"
        sets = ", ".join(name for names in info.sides.values() for name in names)
        made = ", ".join(f"{name} {version}" for name, version in versions().items())
        on = f"{info.store} ({sets}), features {split.placement}, on {split.device}, seed {info.seed}"
        self.log(f"{where} {recipe.name} on {on}; {made}")
        for sentence in filter(None, (part.placed for part in split.parts)):
            self.log(sentence)
        if val.images < FEW:
            chance = chance_rsum(torch.as_tensor(val.caption_image), val.images, "full")
            self._keep(f"val: {too_few(val.images)} to tell which epoch is best; chance has RSUM {chance:.1f}.")
        if self.items < recipe.data.batch_size:
            size, unit = f"{recipe.data.batch_size:,}", recipe.data.unit
            self._keep(f"data.batch_size={size} takes all {self.items:,} {unit}s at once: an epoch is a single step.")

    def _keep(self, sentence: str) -> None:
        """Log a sentence, and show it where epochs are shown."""
        self.log(sentence)
        if self.progress is not None and self.shown.level != "bar":
            self.progress.keep(sentence)

    def step(self, epoch: int, items: int, values: Tensor | list[float], terms: list[str]) -> None:
        """Show a step, or the end of an epoch: how many more items, and the loss with its terms, ``[1 + T]``.

        Args:
            epoch: counted from 0.
            items: more of them.
            values: the loss and its terms.
            terms: their names.
        """
        if self.progress is not None:
            self.progress.title = self._title(epoch)
            self.progress.update(items, describe(values, terms), describe(values, []))

    def epoch(self, line: dict[str, Any], best_epoch: int, best_rsum: float) -> None:
        """Show an epoch that is complete.

        Args:
            line: its line of metrics.jsonl.
            best_epoch: so far, counted from 1.
            best_rsum: its validation RSUM.
        """
        values, terms = [line["loss"], *line["parts"].values()], list(line["parts"])
        best = "the best so far" if best_epoch == line["epoch"] else f"best {best_rsum:.1f} in epoch {best_epoch}"
        end = f"val RSUM {line['rsum']:.1f}, {best}, {line['seconds']:.1f} s"
        title = f"epoch {line['epoch']}/{self.epochs}"
        long = f"{title}: {describe(values, terms)}, lr {line['lr']:.3g}, {end}"
        if self.progress is not None and self.shown.level in ("epochs", "terms"):
            self.progress.keep(long if self.shown.level == "terms" else f"{title}: {describe(values, [])}, {end}")
        self.log(long)

    def note(self, sentence: str) -> None:
        """Say something on standard error, also where the rest is quiet."""
        if self.folder is not None:
            tqdm.write(sentence, file=sys.stderr)
            self.log(sentence)

    def log(self, line: str) -> None:
        """Append a line to the log, with the time; a log that cannot be written stops no training."""
        if self.folder is not None:
            with suppress(OSError), (self.folder / LOG).open("a", encoding="utf-8") as file:
                file.write(f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} {line}\n")

    def _title(self, epoch: int) -> str:
        return f"{self.shown.title and f'{self.shown.title}, '}epoch {epoch + 1}/{self.epochs}"


def describe(values: Tensor | list[float], terms: list[str]) -> str:
    """Return the loss, and the terms that are named."""
    loss, *parts = values.tolist() if isinstance(values, Tensor) else values
    inner = ", ".join(f"{term} {part:.4f}" for term, part in zip(terms, parts, strict=False))
    return f"loss {loss:.4f}" + (f" ({inner})" if inner else "")
