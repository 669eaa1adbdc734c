"""The log of a training: a bar, lines for `logging`, `train.log` in the run's folder, TensorBoard, Weights & Biases."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ...pipeline.errors import RunError
from ..evaluation.metrics import Recalls
from ..runs.run import Run

LOG = "train.log"
Record = Callable[[dict[str, float], int], None]
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
        epochs, items, done = amount
        self.epochs = epochs
        shown = title is not None and _log.isEnabledFor(logging.INFO) and done < epochs * items
        hidden = None if shown else True  # None: hidden where there is no terminal
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
        _log.log(logging.INFO if self.title == "" else logging.DEBUG, short)
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


def require_log(kind: str) -> None:
    """Raise RunError if what `runtime.log` names is not installed."""
    if kind != "none" and find_spec(kind) is None:
        raise RunError(f"runtime.log={kind} needs the package {kind}: `pip install {kind}`, or take runtime.log=none")


@contextmanager
def event_log(kind: str, run: Run, step: int) -> Iterator[Record]:
    """Give a function that records named values at a step; what was recorded after `step` is taken back.

    `kind` is ``none``, ``tensorboard`` (in the run's folder) or ``wandb`` (project ``xret``, named as the folder).
    """
    if kind == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(str(run.path / "tensorboard"), purge_step=step + 1) as writer:

            def add(values: dict[str, float], at: int) -> None:
                for tag, value in values.items():
                    writer.add_scalar(tag, value, at)

            yield add
    elif kind == "wandb":
        import wandb  # type: ignore[import-not-found, unused-ignore]

        how = {"project": "xret", "name": run.path.name, "dir": run.path, "config": run.recipe.to_dict()}
        with wandb.init(**how, resume="auto") as session:
            yield lambda values, at: session.log(values, step=at)
    else:
        yield lambda values, at: None


def step_tags(values: Sequence[float], terms: Sequence[str], lr: float) -> dict[str, float]:
    """Return the tags of a step, those of VSE++'s code and its descendants: the loss, followed by its terms."""
    return {"Le": values[0], "lr": lr, **{f"Le/{term}": v for term, v in zip(terms, values[1:], strict=True)}}


def epoch_tags(epoch: int, table: Recalls) -> dict[str, float]:
    """Return the tags of a validation: `r1 r5 r10 medr` image to text, `r1i …` text to image, and `rsum`."""
    tags: dict[str, float] = {"epoch": epoch, "rsum": table.rsum}
    for values, suffix in ((table.image_to_text, ""), (table.text_to_image, "i")):
        tags |= {f"{name.lower().replace('@', '')}{suffix}": value for name, value in values.items()}
    return tags
