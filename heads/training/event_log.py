"""TensorBoard and Weights & Biases, where they are installed and asked for.

Tags are those of VSE++'s code and its descendants: `Le` and `lr` at each step, `r1 r5 r10 medr` (image to text),
`r1i r5i r10i medri` (text to image) and `rsum` at the end of an epoch.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from ...pipeline.errors import RunError
from ..evaluation.metrics import Recalls
from ..runs.run import Run

Record = Callable[[dict[str, float], int], None]


def require_log(kind: str) -> None:
    """Raise RunError if what `runtime.log` names is not installed."""
    if kind != "none" and find_spec(kind) is None:
        raise RunError(f"runtime.log={kind} needs the package {kind}: `pip install {kind}`, or take runtime.log=none")


@contextmanager
def event_log(kind: str, run: Run, step: int) -> Iterator[Record]:
    """Give a function that records named values at a step.

    Args:
        kind: ``none``, ``tensorboard`` (in the run's folder) or ``wandb`` (project ``xret``, named as the folder).
        run: the run.
        step: how many steps are done; what a killed training recorded after them is taken back.
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

        with wandb.init(
            project="xret", name=run.path.name, dir=run.path, config=run.recipe.to_dict(), resume="auto"
        ) as session:
            yield lambda values, at: session.log(values, step=at)
    else:
        yield lambda values, at: None


def step_tags(values: list[float], terms: list[str], lr: float) -> dict[str, float]:
    """Return the tags of a step: the loss, followed by its terms."""
    return {"Le": values[0], "lr": lr, **{f"Le/{term}": v for term, v in zip(terms, values[1:], strict=True)}}


def epoch_tags(epoch: int, table: Recalls) -> dict[str, float]:
    """Return the tags of a validation."""
    tags: dict[str, float] = {"epoch": epoch, "rsum": table.rsum}
    for values, suffix in ((table.image_to_text, ""), (table.text_to_image, "i")):
        tags |= {f"{name.lower().replace('@', '')}{suffix}": value for name, value in values.items()}
    return tags
