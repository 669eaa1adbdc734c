"""All diagnostics of one run."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...pipeline.device import within_memory
from ...pipeline.errors import RunError, XretError
from ...pipeline.wording import printable
from ..evaluation.metrics import Ties, require_ties
from ..evaluation.number_table import NumberTable
from ..evaluation.own_model import Embedder
from ..evaluation.scoring import Ranker, Scored, compare, embed_split
from .crops import crop_tables
from .elements import element_tables
from .embeddings import coefficient_tables, cost_table, uncertainty_tables

Tables = dict[str, NumberTable]


@dataclass(frozen=True)
class Diagnosis:
    """What a run's embeddings are like on a split; ``str`` prints it."""

    tables: Tables  # by name
    reasons: dict[str, str]  # why something is missing, by "elements", "uncertainty", "coefficients" or "crops"

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return asdict(self)

    def __str__(self) -> str:
        missing = "\n".join(printable(f"not shown: {what}: {why}") for what, why in self.reasons.items())
        return "\n\n".join([*map(str, self.tables.values()), missing]).strip()


@torch.no_grad()
def diagnose(
    run: str | Path | Embedder,
    *,
    store: str | Path | None = None,
    split: str = "test",
    ties: Ties = "pessimistic",
    data_root: str | Path | None = None,
    visual_genome: str | Path | None = None,
    features: str = "auto",
    device: str = "auto",
    trust: bool = False,
) -> Diagnosis:
    """Look into a run or a user-defined model: what its embeddings are like on a split.

    Arguments and errors are those of `evaluate`. Crops are made of the data set in `data_root`, the folder of its
    manifest, images and caption file, or of the JSON files and pictures in a folder of `visual_genome`.
    """
    require_ties(ties)
    if data_root is not None and visual_genome is not None:
        raise RunError("--data-root and --visual-genome are two places that crops are cut from; leave one out")
    seen = embed_split(Ranker(run, store=store, features=features, device=device, trust=trust), split)
    head = seen.ranker.run is not None and seen.ranker.run.info.average is None
    root, genome = (None if folder is None else Path(folder) for folder in (data_root, visual_genome))
    questions: dict[str, tuple[Callable[[], Tables], str]] = {
        "cost": (partial(cost_table, seen), ""),
        "elements": (partial(_elements, seen, ties), "the embeddings are no sets of several elements"),
        "uncertainty": (partial(uncertainty_tables, seen), "the embeddings are no Gaussians"),
        "coefficients": (
            partial(coefficient_tables, seen) if head else Tables,
            "it is no single head with a GPO that has coefficients of its own",
        ),
        "crops": (partial(crop_tables, seen, root, ties, genome), ""),
    }
    tables, reasons = Tables(), {}
    with within_memory(seen.ranker.device):
        for name, (answer, reason) in questions.items():
            try:
                if answered := answer():
                    tables |= answered
                else:
                    reasons[name] = reason
            except XretError as error:  # the rest is worth having
                reasons[name] = str(error)
    return Diagnosis(tables, reasons)


def _elements(seen: Scored, ties: Ties) -> Tables:
    images, captions = seen.image.embedding, seen.text.embedding
    if not (isinstance(images, Tensor) and isinstance(captions, Tensor) and seen.is_set):
        return {}
    return element_tables(
        images, captions, seen.caption_image, lambda some, others: compare(seen.model, some, others, seen.texts), ties
    )
