"""All diagnostics of one run."""

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ....pipeline.device import within_memory
from ....pipeline.errors import CacheError, XretError
from ....pipeline.reading.reattachment import find_pictures
from ....pipeline.reading.reencoding import encode_captions_by_all, encode_images_by_all
from ...evaluation.metrics import Ties
from ...evaluation.scoring import compare
from ...runs.encoders import find_image_encoders, find_text_encoders
from ..views import View, open_views
from .circular_variance import CircularVariance, circular_variance
from .coefficients import Coefficients, gpo_coefficients
from .cost import Cost, cost
from .crops import Crops, Images, crops
from .elements import Elements, elements
from .regions import find_manifest, read_regions
from .uncertainty import Uncertainty, uncertainty

REASONS = {  # why there is nothing; that of the crops differs
    "circular_variance": "the embeddings are no sets of several elements",
    "elements": "the embeddings are no sets of several elements",
    "uncertainty": "the embeddings are no Gaussians",
    "gpo": "no aggregator is a GPO with coefficients of its own",
}


@dataclass(frozen=True)
class Diagnosis:
    """What a run's embeddings are like on a split; `reasons` says, by name, why something is None.

    Attributes:
        circular_variance, elements: of sets.
        uncertainty: of Gaussians, and of sets drawn from them.
        crops: uncertainty against ambiguity, and the binary selection task; for data sets with ``regions``.
        gpo: coefficients of GPO.
        cost: of comparing a pair.
    """

    circular_variance: CircularVariance | None
    elements: Elements | None
    uncertainty: Uncertainty | None
    crops: Crops | None
    gpo: Coefficients | None
    cost: Cost
    reasons: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return asdict(self)


def diagnose(
    run: str | Path,
    *,
    store: str | None = None,
    split: str = "test",
    ties: Ties = "pessimistic",
    device: str = "auto",
    data_root: str | Path | None = None,
    visual_weights: str | None = None,
    text_weights: str | None = None,
) -> Diagnosis:
    """Look into a run: what its embeddings are like on a split.

    Args:
        run: a run folder.
        store: the feature cache to look at; None: the one that the run was trained on.
        split: which images and captions.
        ties: how equal scores are counted; see `metrics.recall`.
        device: ``auto``, ``cpu`` or ``cuda``.
        data_root: where the data set's images and caption file are; None: no crops are made.
        visual_weights: of the image encoder, where they came from a file; for crops.
        text_weights: of the text encoder, if they have moved; for crops.

    Raises:
        RunError: the run, the store's feature sets or the split do not fit.
        CacheError: the store cannot be read.
    """
    (view,) = open_views([run], store, split, device)
    return diagnose_view(view, ties, data_root, visual_weights, text_weights)


@torch.no_grad()
def diagnose_view(
    view: View,
    ties: Ties = "pessimistic",
    data_root: str | Path | None = None,
    visual_weights: str | None = None,
    text_weights: str | None = None,
) -> Diagnosis:
    """Look into an opened run; arguments as for `diagnose`."""
    reasons, found = dict(REASONS), dict[str, Any]()
    images, captions, model = view.image, view.text, view.model
    with within_memory(view.device):
        found |= _of_sets(view, ties)
        found["uncertainty"] = uncertainty(view.scores, images.uncertainty, captions.uncertainty)
        try:
            found["crops"] = _crops(view, ties, data_root, visual_weights, text_weights)
        except XretError as error:  # the rest is worth having
            found["crops"], reasons["crops"] = None, str(error)
        gpo = Coefficients(gpo_coefficients(model.image, images.length), gpo_coefficients(model.text, captions.length))
        found["gpo"] = gpo if gpo.image or gpo.text else None
        found["cost"] = cost(images.embedding, captions.embedding, model.similarity)
    return Diagnosis(**found, reasons={key: why for key, why in reasons.items() if found[key] is None})


def _of_sets(view: View, ties: Ties) -> dict[str, Any]:
    images, captions = view.image.embedding, view.text.embedding
    if not (isinstance(images, Tensor) and isinstance(captions, Tensor) and view.is_set):
        return {"circular_variance": None, "elements": None}

    def compare_some(some: Tensor, others: Tensor) -> Tensor:
        return compare(view.model, some, others, view.scores.texts)

    return {
        "circular_variance": circular_variance(images, captions),
        "elements": elements(images, captions, view.scores.caption_image, compare_some, ties),
    }


def _crops(
    view: View, ties: Ties, data_root: str | Path | None, visual_weights: str | None, text_weights: str | None
) -> Crops:
    """Make crops of the split's images; any error says why there are none."""
    if data_root is None:
        raise CacheError("crops are cut out of the images; say where these are with --data-root DIR")
    root, inside, where = Path(data_root), set(view.scores.file_names), str(view.device)
    manifest = find_manifest(view.cache.dataset, root)
    if manifest.captions is None:
        raise CacheError(f"crops need regions, which stand in a JSON of captions, and {manifest.path} names none")
    everywhere = read_regions(manifest.captions)
    regions = {name: listed for name, listed in everywhere.items() if name in inside}
    pictures = Images(find_pictures(view.cache, root), view.upright)
    image_encoders = find_image_encoders(view.run, lambda: view.cache, visual_weights, where)
    text_encoders = find_text_encoders(view.run, lambda: view.cache, text_weights, where)
    return crops(
        view.model,
        pictures,
        regions,
        partial(encode_images_by_all, image_encoders, where),
        partial(encode_captions_by_all, text_encoders, where),
        ties,
    )
