"""All diagnostics of one run."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...pipeline.device import pick_device, within_memory
from ...pipeline.errors import CacheError, XretError
from ...pipeline.reading.joined_sets import are_upright
from ...pipeline.reading.reattachment import find_pictures
from ...pipeline.reading.reencoding import encode_captions_by_all, encode_images_by_all
from ...pipeline.wording import printable
from ..evaluation.metrics import Ties, require_ties
from ..evaluation.number_table import NumberTable, Rows
from ..evaluation.scoring import Embedded, compare, embed_split, open_run
from ..runs.encoders import find_image_encoders, find_text_encoders
from .coefficients import coefficient_tables
from .cost import cost
from .crops import Images, crop_tables
from .elements import element_tables
from .regions import regions_in
from .uncertainty import uncertainty_tables

Tables = dict[str, NumberTable]


@dataclass(frozen=True)
class Diagnosis:
    """What a run's embeddings are like on a split; ``str`` prints it.

    Attributes:
        tables: by name.
        reasons: why something is missing, by ``elements``, ``uncertainty``, ``coefficients`` or ``crops``.
    """

    tables: Tables
    reasons: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return asdict(self)

    def __str__(self) -> str:
        missing = "\n".join(printable(f"not shown: {what}: {why}") for what, why in self.reasons.items())
        return "\n\n".join([*map(str, self.tables.values()), missing]).strip()


@torch.no_grad()
def diagnose(
    run: str | Path,
    *,
    store: str | None = None,
    split: str = "test",
    ties: Ties = "pessimistic",
    data_root: str | Path | None = None,
    device: str = "auto",
) -> Diagnosis:
    """Look into a run: what its embeddings are like on a split.

    Args:
        run: a run folder.
        store: the feature cache to look at; None: the one that the run was trained on.
        split: which images and captions.
        ties: how equal scores are counted; see `metrics.recall`.
        data_root: the folder of the data set's manifest, images and caption file; None: no crops are made.
        device: ``auto``, ``cpu`` or ``cuda``.

    Raises:
        RunError: the run, the store's feature sets or the split do not fit.
        CacheError: the store cannot be read.
    """
    require_ties(ties)
    seen = embed_split(open_run(run, store), split, pick_device(device))
    questions: dict[str, tuple[Callable[[], Tables], str]] = {
        "cost": (partial(_cost, seen), ""),
        "elements": (partial(_elements, seen, ties), "the embeddings are no sets of several elements"),
        "uncertainty": (partial(uncertainty_tables, seen), "the embeddings are no Gaussians"),
        "coefficients": (partial(coefficient_tables, seen), "no aggregator is a GPO with coefficients of its own"),
        "crops": (partial(_crops, seen, ties, data_root), ""),
    }
    tables, reasons = Tables(), {}
    with within_memory(seen.scores.similarity.device):
        for name, (answer, reason) in questions.items():
            try:
                if found := answer():
                    tables |= found
                else:
                    reasons[name] = reason
            except XretError as error:  # the rest is worth having
                reasons[name] = str(error)
    return Diagnosis(tables, reasons)


def _cost(seen: Embedded) -> Tables:
    found = cost(seen.image.embedding, seen.text.embedding, seen.model.similarity)
    rows: Rows = [["multiply-accumulates", found.macs_a_pair]]
    for what, shape in (("an image", found.image), ("a caption", found.text)):
        rows.append([f"shape of {what}", " × ".join(f"{size:,}" for size in shape)])
    return {"cost": NumberTable("What comparing one image with one caption costs.", ["of a pair", "value"], rows)}


def _elements(seen: Embedded, ties: Ties) -> Tables:
    images, captions = seen.image.embedding, seen.text.embedding
    if not (isinstance(images, Tensor) and isinstance(captions, Tensor) and seen.is_set):
        return {}
    return element_tables(
        images, captions, seen.scores.caption_image, lambda a, b: compare(seen.model, a, b, seen.scores.texts), ties
    )


def _crops(seen: Embedded, ties: Ties, data_root: str | Path | None) -> Tables:
    if data_root is None:
        raise CacheError("crops are cut out of the images; name their folder with --data-root DIR")
    root, inside, where, cache = (
        Path(data_root),
        set(seen.scores.file_names),
        str(seen.scores.similarity.device),
        seen.ranker.cache,
    )
    regions = {name: listed for name, listed in regions_in(cache.dataset, root).items() if name in inside}
    image_encoders = find_image_encoders(seen.run, lambda: cache, None, where)
    text_encoders = find_text_encoders(seen.run, lambda: cache, None, where)
    return crop_tables(
        seen.model,
        Images(find_pictures(cache, root), are_upright(seen.batches.image_set)),
        regions,
        partial(encode_images_by_all, image_encoders, where),
        partial(encode_captions_by_all, text_encoders, where),
        ties,
    )
