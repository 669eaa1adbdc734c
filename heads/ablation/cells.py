"""The cells of an ablation: how one is trained and evaluated."""

import socket
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from ...pipeline.documents import read_json
from ...pipeline.errors import NotFinite, XretError
from ...pipeline.reading.placement import Resident
from ...pipeline.wording import reason
from ..evaluation.evaluation import Evaluation, evaluate
from ..recipes.blocks import Recipe
from ..runs.run import write_json
from ..series.processes import one_at_a_time
from ..training.display import Shown
from ..training.training import train


@dataclass(frozen=True)
class Cell:
    """A variant with a seed: all that whoever trains it must know.

    The path of `run` is absolute, and `store` is the address of a generation, so that all cells learn from one.
    """

    run: str
    store: str
    recipe: Recipe
    seed: int
    split: str
    device: str
    views: bool = False  # whether it is evaluated by the mean over all views of an image
    verbose: bool | None = None  # how much of its training is shown, see `display.Shown`
    count: str = ""  # what its bar begins with: ``cell 1/2``

    @property
    def title(self) -> str:
        """The cell as a line of progress names it."""
        return unquote("/".join(Path(self.run).parts[-2:]))

    def evaluation(self) -> Evaluation | None:
        """Return the evaluation of a finished cell, or None."""
        try:
            found = Evaluation.of_one(read_json(Path(self.run) / "eval.json"))
        except (OSError, ValueError, KeyError, TypeError):
            return None
        other = (found.views[0] > 1) != self.views or any(result.split != self.split for result in found.results)
        return None if other or not found.results else found


Outcome = Evaluation | str  # what a finished cell came to, or the sentence that it ended in


def run_cell(cell: Cell, resident: Resident | None = None) -> Outcome:
    """Train a cell, or go on with it, and evaluate it; where that fails, return the sentence.

    `resident` has the features that other cells have in memory.
    """
    run = Path(cell.run)
    if not (run.parents[1] / "ablation.json").is_file():
        return f"{run.parents[1]} is missing on {socket.gethostname()}: --out must be a folder that all workers share"
    with one_at_a_time:
        try:
            shown = Shown.of(cell.verbose, "bar", cell.count)
            train(
                cell.store,
                cell.recipe,
                run,
                device=cell.device,
                seed=cell.seed,
                resume=True,
                resident=resident,
                shown=shown,
            )
            evaluation = evaluate(run, store=cell.store, split=cell.split, device=cell.device, views=cell.views)
            write_json(run / "eval.json", evaluation.to_dict())
        except NotFinite as error:
            return error.seen
        except XretError as error:
            return str(error)
        except Exception as error:  # whatever happens to one cell, the others are trained
            return f"{type(error).__name__}: {reason(error)}"
    return evaluation
