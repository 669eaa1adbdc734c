"""What a training tells while it runs: its log, with a bar, and hooks for steps and epochs.

TensorBoard and Weights & Biases are such hooks.
"""

import logging
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ...pipeline.errors import RunError
from ...pipeline.progress import in_notebook
from ..evaluation.metrics import Recalls
from ..runs.run import Run

LOG = "train.log"
_log = logging.getLogger("xret")


class Callback:
    """Base of what `xret.train(..., callbacks=[...])` calls; a hook does nothing unless it is overridden.

    What a hook raises ends the training, which can be resumed.
    """

    def on_begin(self, run: Run, step: int, epochs: Sequence[Mapping[str, Any]]) -> None:
        """Take notice of a training that begins in a folder.

        `step` steps were taken before, where it is resumed, and `epochs` are the lines of `metrics.jsonl` so far.
        """

    def on_step(self, step: int, values: Mapping[str, float]) -> None:
        """Take notice of a step, counted from 1: its loss `Le`, each term `Le/TERM` and the learning rate `lr`."""

    def on_epoch(self, epoch: int, step: int, values: Mapping[str, float]) -> None:
        """Take notice of a complete epoch, counted from 1, after the step of that number; its state is being written.

        `values` are those of the validation: `rsum`, `r1 r5 r10 medr` image to text and `r1i …` text to image.
        """

    def on_end(self, error: BaseException | None) -> None:
        """Take notice of the end, also of one by an error."""


class _Log(Callback):
    def on_epoch(self, epoch: int, step: int, values: Mapping[str, float]) -> None:
        self.on_step(step, {"epoch": epoch, **values})


class TensorBoard(_Log):
    """Event files in the run's folder `tensorboard`; what a stop left after the last saved step is taken back."""

    def on_begin(self, run: Run, step: int, epochs: Sequence[Mapping[str, Any]]) -> None:
        """Open the event file."""
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(run.path / "tensorboard"), purge_step=step + 1)

    def on_step(self, step: int, values: Mapping[str, float]) -> None:
        """Write the values."""
        for tag, value in values.items():
            self.writer.add_scalar(tag, value, step)

    def on_end(self, error: BaseException | None) -> None:
        """Close the event file."""
        self.writer.close()


class WeightsAndBiases(_Log):
    """A run of Weights & Biases, in the project `xret`, named as the folder."""

    def on_begin(self, run: Run, step: int, epochs: Sequence[Mapping[str, Any]]) -> None:
        """Begin the session, or go on with it."""
        import wandb  # type: ignore[import-not-found, unused-ignore]

        how = {"project": "xret", "name": run.path.name, "dir": run.path, "config": run.recipe.to_dict()}
        self.session = wandb.init(**how, resume="auto")

    def on_step(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values."""
        self.session.log(dict(values), step=step)

    def on_end(self, error: BaseException | None) -> None:
        """End the session."""
        self.session.finish(exit_code=0 if error is None else 1)


LOGS: dict[str, type[Callback]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}  # of `runtime.log`


def require_log(kind: str) -> None:
    """Raise RunError if what `runtime.log` names is not installed."""
    if kind != "none" and find_spec(kind) is None:
        raise RunError(f"runtime.log={kind} needs the package {kind}: `pip install {kind}`, or take runtime.log=none")


def step_values(values: Sequence[float], terms: Sequence[str], lr: float) -> dict[str, float]:
    """Return what `Callback.on_step` is told, by the tags of VSE++'s code and its descendants."""
    return {"Le": values[0], "lr": lr, **{f"Le/{term}": v for term, v in zip(terms, values[1:], strict=True)}}


def epoch_values(table: Recalls) -> dict[str, float]:
    """Return what `Callback.on_epoch` is told."""
    found: dict[str, float] = {"rsum": table.rsum}
    for values, suffix in ((table.image_to_text, ""), (table.text_to_image, "i")):
        found |= {f"{name.lower().replace('@', '')}{suffix}": value for name, value in values.items()}
    return found


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
