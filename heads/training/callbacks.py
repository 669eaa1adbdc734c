"""What a training tells while it runs: hooks for steps and epochs. TensorBoard and Weights & Biases are such."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from ...pipeline.errors import RunError
from ..evaluation.metrics import Recalls
from ..runs.run import Run


class Callback:
    """Base of what `xret.train(..., callbacks=[...])` calls; a hook does nothing unless it is overridden.

    What a hook raises ends the training, which can be resumed.
    """

    def on_begin(self, run: Run, step: int, epochs: Sequence[Mapping[str, Any]]) -> None:
        """Take notice of a training that begins.

        Args:
            run: its folder.
            step: how many steps were taken before, where it is resumed.
            epochs: the lines of `metrics.jsonl` of the epochs before.
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
