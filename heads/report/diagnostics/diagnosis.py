"""All diagnostics of one run, as plain data."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ....pipeline.cache.feature_cache import FeatureCache
from ....pipeline.device import pick_device, within_memory
from ....pipeline.errors import CacheError, XretError
from ....pipeline.reading.reattachment import image_folder
from ....pipeline.reading.reencoding import encode_captions, encode_images
from ...evaluation.metrics import Ties
from ...evaluation.scoring import compare
from ...model import Model
from ...runs.encoders import find_image_encoder, find_text_encoder
from ...runs.features import open_store, split_of_run
from ...runs.run import Run
from .circular_variance import circular_variance
from .coefficients import gpo_coefficients
from .cost import cost
from .crops import crops
from .elements import elements
from .embedded import Embedded, embed_split
from .regions import find_manifest, read_regions
from .uncertainty import uncertainty

REASONS = {  # why there is nothing; that of the crops differs
    "circular_variance": "the embeddings are no sets of several elements",
    "elements": "the embeddings are no sets of several elements",
    "uncertainty": "the embeddings are no Gaussians",
    "gpo": "no aggregator is a GPO with coefficients of its own",
}


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
) -> dict[str, Any]:
    """Look into a run: what its embeddings are like on a split.

    Args:
        run: a run folder.
        store: the feature cache to look at; None: the one that the run was trained on.
        split: which images and captions.
        ties: how equal scores are counted; see `metrics.recall`.
        device: ``auto``, ``cpu`` or ``cuda``.
        data_root: where the data set's images and caption file are; None: no crops are made.
        visual_weights: of the image encoder, where they came from a file; for crops.
        text_weights: of the text encoder, if it is not bert-base-uncased; for crops.

    Returns:
        Numbers, texts, lists and mappings with these keys. What there is nothing to say of is None, and ``reasons``
        says why.

        - ``circular_variance``: of sets, see `circular_variance.circular_variance`.
        - ``elements``: of sets, see `elements.elements`.
        - ``uncertainty``: of Gaussians, and of sets drawn from them, see `uncertainty.uncertainty`.
        - ``crops``: uncertainty against ambiguity, and the binary selection task, see `crops.crops`; for data sets
          with ``regions``.
        - ``gpo``: ``{"image", "text"}``, see `coefficients.gpo_coefficients`.
        - ``cost``: see `cost.cost`.
        - ``reasons``: ``{key: why it is None}``.

    Raises:
        RunError: the run, the store's feature sets or the split do not fit.
        CacheError: the store cannot be read.
    """
    target = pick_device(device)
    opened = Run(run)
    cache = open_store(opened, store)
    with within_memory(target):
        model = opened.model(target)
        embedded = embed_split(model, split_of_run(opened, cache, split, model, target))
    return diagnose_embedded(
        opened, model, cache, embedded, ties=ties, data_root=data_root, visual_weights=visual_weights,
        text_weights=text_weights,
    )  # fmt: skip


@torch.no_grad()
def diagnose_embedded(
    run: Run,
    model: Model,
    cache: FeatureCache,
    embedded: Embedded,
    *,
    ties: Ties = "pessimistic",
    data_root: str | Path | None = None,
    visual_weights: str | None = None,
    text_weights: str | None = None,
) -> dict[str, Any]:
    """Look into an opened run whose `model` has embedded a split of a store; the rest as for `diagnose`."""
    device = next(model.parameters()).device
    reasons = dict(REASONS)
    with within_memory(device):
        found = _of_sets(model, embedded, ties)
        found["uncertainty"] = uncertainty(embedded)
        try:
            root = None if data_root is None else Path(data_root)
            found["crops"] = _crops(run, model, cache, embedded, root, (visual_weights, text_weights), device, ties)
        except XretError as error:  # the rest is worth having
            found["crops"], reasons["crops"] = None, str(error)
        found["gpo"] = _gpo(model, embedded)
        found["cost"] = cost(embedded.image.embedding, embedded.text.embedding, model.similarity)
    return found | {"reasons": {key: why for key, why in reasons.items() if found[key] is None}}


def _of_sets(model: Model, embedded: Embedded, ties: Ties) -> dict[str, Any]:
    images, captions = embedded.image.embedding, embedded.text.embedding
    if not (
        isinstance(images, Tensor)
        and isinstance(captions, Tensor)
        and images.ndim == captions.ndim == 3
        and max(images.shape[1], captions.shape[1]) > 1
    ):
        return {"circular_variance": None, "elements": None}

    def compare_some(some: Tensor, others: Tensor) -> Tensor:
        return compare(model, some, others, embedded.texts)

    return {
        "circular_variance": circular_variance(images, captions),
        "elements": elements(images, captions, embedded.caption_image, compare_some, ties),
    }


def _crops(
    run: Run,
    model: Model,
    cache: FeatureCache,
    embedded: Embedded,
    data_root: Path | None,
    weights: tuple[str | None, str | None],
    device: torch.device,
    ties: Ties,
) -> dict[str, Any]:
    """Make crops of the split's images; any error says why there are none."""
    if data_root is None:
        raise CacheError("crops are cut out of the images; say where these are with --data-root DIR")
    inside = set(embedded.file_names)
    everywhere = read_regions(find_manifest(cache.dataset, data_root).captions)
    regions = {name: listed for name, listed in everywhere.items() if name in inside}
    folder = image_folder(cache, data_root)
    where = str(device)
    image_encoder = find_image_encoder(run, lambda: cache, weights[0], where)
    text_encoder = find_text_encoder(run, lambda: cache, weights[1], where)
    return crops(
        model,
        folder,
        regions,
        partial(encode_images, *image_encoder, where),
        partial(encode_captions, *text_encoder, where),
        ties,
    )


def _gpo(model: Model, embedded: Embedded) -> dict[str, Any] | None:
    found = {
        "image": gpo_coefficients(model.image, embedded.image.length),
        "text": gpo_coefficients(model.text, embedded.text.length),
    }
    return found if any(found.values()) else None
