"""Evaluation: embed a split, compare all with all, count ranks.

Everything is computed in float32. Captions of identical text and features are scored once, so that their ties are
exact; `metrics` says how ties are counted. Several runs make an ensemble: the mean of their similarities (SetDiv,
rows marked with a dagger).
"""

import math
import sys
from collections.abc import Iterable
from collections.abc import Sequence as Several
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..pipeline.batches import Batches
from ..pipeline.cache import FeatureCache
from ..pipeline.device import pick_device, within_memory
from ..pipeline.errors import RunError, nearest
from . import metrics
from .embedding import Embedding, Sequence, concatenate, each
from .model import Model
from .run import Run
from .run_features import open_store, split_of_run
from .similarity import in_blocks

PROTOCOLS = ("full", "1k-folds")
FOLDED = 5000  # images that 1k-folds is defined for
BATCH = 256  # samples embedded in one go


def evaluate(
    runs: Several[str | Path],
    *,
    store: str | None = None,
    split: str = "test",
    protocol: str = "auto",
    ties: metrics.Ties = "pessimistic",
    device: str = "auto",
) -> dict[str, Any]:
    """Evaluate a run, or several as an ensemble.

    Args:
        runs: run folders.
        store: the feature cache to evaluate on; None: the one that the first run was trained on.
        split: which images.
        protocol: ``full``, ``1k-folds``, or ``auto``: what the data set's manifest says, without those that do not
            apply to these images, as long as another does.
        ties: ``pessimistic``, ``optimistic`` or ``mean``; see `metrics.recall`.
        device: ``auto``, ``cpu`` or ``cuda``.

    Returns:
        ``{"run", "store", "results"}`` with one result a protocol: ``{"split", "protocol", "images", "captions",
        "skipped", "ties", "image_to_text": {"R@1", "R@5", "R@10", "medr"}, "text_to_image": the same, "rsum",
        "log_circular_variance"}``, recalls in percent. ``run`` is a list where there are several; the circular
        variance is null for them, and for embeddings that are no sets.

    Raises:
        RunError: a run, the store's feature sets, the split or the protocol do not fit.
    """
    target = pick_device(device)
    opened = [Run(path) for path in runs]
    cache = open_store(opened[0], store)
    protocols = cache.protocols if protocol == "auto" else (protocol,)
    for name in protocols:
        if name not in PROTOCOLS:
            raise RunError(f"there is no protocol '{name}'{nearest(name, list(PROTOCOLS))}: {', '.join(PROTOCOLS)}")
    first = _score(opened[0], cache, split, target)
    for run in opened[1:]:
        other = _score(run, cache, split, target)
        same_images = np.array_equal(first.image_rows, other.image_rows)
        if not (same_images and np.array_equal(first.caption_rows, other.caption_rows)):
            raise RunError(f"{run.path} and {opened[0].path} cannot be one ensemble: they skip different samples")
        first.similarity.add_(other.similarity)
    first.similarity.div_(len(opened))
    if protocol == "auto":
        protocols = _applicable(protocols, len(first.image_rows))
    names = [str(run.path) for run in opened]
    return {
        "run": names[0] if len(names) == 1 else names,
        "store": cache.url,
        "results": [
            {
                "split": split,
                "protocol": name,
                "images": len(first.image_rows),
                "captions": len(first.caption_rows),
                "skipped": first.skipped,
                "ties": ties,
                **recalls(first.similarity, first.caption_image, name, ties, f"split '{split}' of {cache.url}"),
                "log_circular_variance": first.log_circular_variance if len(opened) == 1 else None,
            }
            for name in protocols
        ],
    }


@dataclass(frozen=True)
class Scores:
    """How a run compares the usable images and captions of a split.

    Attributes:
        similarity: ``[I, C]``; larger is closer.
        caption_image: the image (its row here) of each caption, int64 ``[C]``.
        image_rows: the images' rows in the store, int64 ``[I]``.
        caption_rows: the captions' rows in the store, int64 ``[C]``.
        file_names: of the images, below the manifest's image folder.
        texts: the captions.
        skipped: samples that could not be read when the features were extracted.
        log_circular_variance: of the embedding sets; None where they are vectors.
    """

    similarity: Tensor
    caption_image: Tensor
    image_rows: np.ndarray
    caption_rows: np.ndarray
    file_names: list[str]
    texts: list[str]
    skipped: int
    log_circular_variance: float | None


def score(run: str | Path, *, store: str | None = None, split: str = "test", device: str = "auto") -> Scores:
    """Return how a run compares all images and captions of a split; arguments and errors as for `evaluate`."""
    opened = Run(run)
    return _score(opened, open_store(opened, store), split, pick_device(device))


def _score(run: Run, cache: FeatureCache, split: str, device: torch.device) -> Scores:
    with within_memory(device):
        model = run.model(device)
        batches = split_of_run(run, cache, split, model, device)
        images, captions = embed(model, batches)
        texts = caption_texts(cache, batches)
        similarity = compare(model, images, captions, texts)
    first, last = cache.splits[split]
    names = cache.file_names(first, last)
    return Scores(
        similarity,
        torch.as_tensor(batches.caption_image),
        batches.image_rows,
        batches.caption_rows,
        [names[row - first] for row in batches.image_rows.tolist()],
        texts,
        batches.skipped,
        log_circular_variance(images, captions),
    )


def _applicable(protocols: tuple[str, ...], images: int) -> tuple[str, ...]:
    """Leave 1k-folds out where it does not apply, with a line on standard error, if another protocol is left."""
    rest = tuple(name for name in protocols if name != "1k-folds")
    if images == FOLDED or not rest or rest == protocols:
        return protocols
    print(f"protocol 1k-folds is left out: it needs exactly {FOLDED:,} images, here are {images:,}", file=sys.stderr)
    return rest


def recalls(similarity: Tensor, caption_image: Tensor, protocol: str, ties: metrics.Ties, where: str) -> dict[str, Any]:
    """Return the table of one protocol for ``similarity [I, C]``.

    Raises:
        RunError: the split is not what the protocol is defined for.
    """
    if protocol == "full":
        return metrics.recall_table(*metrics.ranks(similarity, caption_image), ties=ties)
    if len(similarity) != FOLDED:
        raise RunError(
            f"protocol 1k-folds needs exactly {FOLDED:,} images and {where} has {len(similarity):,}; "
            "take --protocol full"
        )
    folds = metrics.folds(len(similarity))
    return metrics.mean_table(
        [metrics.recall_table(*metrics.fold_ranks(similarity, caption_image, fold), ties=ties) for fold in folds]
    )


@torch.no_grad()
def embed(model: Model, batches: Batches) -> tuple[Embedding, Embedding]:
    """Return the embeddings of a split's images and captions, in the order of their rows, float32.

    The model is put in evaluation mode and left in it.
    """
    model.eval()

    def all_of(parts: Iterable[Embedding]) -> Embedding:
        return concatenate([each(lambda t: t.float() if t.is_floating_point() else t, part) for part in parts])

    images = all_of(model.embed_images(features).embedding for features in batches.image_features(BATCH))
    captions = all_of(model.embed_captions(features).embedding for features in batches.caption_features(BATCH))
    return images, captions


@torch.no_grad()
def compare(model: Model, images: Embedding, captions: Embedding, texts: Several[str]) -> Tensor:
    """Return the similarity of all images and captions, ``[I, C]``, computed in blocks.

    Args:
        images: embeddings of I images.
        captions: embeddings of C captions.
        texts: the C captions; equal ones share their column.

    Raises:
        RunError: a similarity is not finite.
    """
    unique, inverse = torch.unique(representatives(captions, texts), return_inverse=True)
    some = len(unique) < len(texts)
    scored = in_blocks(model.similarity, images, each(lambda t: t[unique], captions) if some else captions)
    if not scored.isfinite().all():
        raise RunError("the model gives similarities that are not finite: its weights are spoilt, train it again")
    return scored[:, inverse] if some else scored


def representatives(embeddings: Embedding, texts: Several[str]) -> Tensor:
    """Return for each caption the first one with the same text and the same embedding, up to rounding, int64 [C].

    Captions of a text are embedded in different batches, so that equal features may give embeddings that differ in
    the last digits; other features of the same text (another image's, in an end-to-end model) stay apart.
    """
    seen: dict[str, int] = {}
    flat = _flat(embeddings)
    first = torch.tensor([seen.setdefault(text, row) for row, text in enumerate(texts)], device=flat.device)
    close = (flat - flat[first]).norm(dim=1) <= 1e-3 * flat[first].norm(dim=1)
    return torch.where(close, first, torch.arange(len(texts), device=first.device))


def _flat(embedding: Embedding) -> Tensor:
    """Return an embedding as one row of numbers a sample, ``[B, F]``."""
    if isinstance(embedding, Sequence):
        inside = torch.arange(embedding.rows.shape[1], device=embedding.length.device) < embedding.length[:, None]
        return embedding.rows.masked_fill(~inside[..., None], 0).flatten(1)
    return torch.cat([t.flatten(1) for t in ([embedding] if isinstance(embedding, Tensor) else embedding)], 1)


def log_circular_variance(images: Embedding, captions: Embedding) -> float | None:
    """Return `metrics.log_circular_variance` over all embedding sets of a split, images and captions together."""
    if not isinstance(images, Tensor) or not isinstance(captions, Tensor):
        return None
    logs = [(metrics.log_circular_variance(side), len(side)) for side in (images, captions)]
    if any(log is None for log, _ in logs):
        return None
    mean = sum(math.exp(log) * count for log, count in logs if log is not None) / sum(count for _, count in logs)
    return math.log(mean)


def caption_texts(cache: FeatureCache, batches: Batches) -> list[str]:
    """Return the texts of a split's usable captions, in the order of their rows."""
    rows = batches.caption_rows
    begin, end = int(rows[0]), int(rows[-1]) + 1
    texts = cache.caption_texts(begin, end)
    return [texts[row - begin] for row in rows.tolist()]
