"""The index of a run: its gallery, images and captions, embedded batch by batch and never held as a whole."""

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Several
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from ....pipeline.device import within_memory
from ....pipeline.reading.batches import Features
from ...evaluation.scoring import BATCH
from ...modules.aggregators.aggregated import Aggregated
from ...modules.embedding import Embedding, each
from ...runs.features import split_of_run
from ..retriever import Retriever
from .build import finish, write_items
from .candidates import Effort, Kind, load_faiss
from .elements import form_of
from .folder import appearing
from .items import Items
from .search import Index

Side = Literal["images", "captions"]
SIDES: tuple[Side, Side] = ("images", "captions")
SAMPLE = 400  # queries that the recall is measured with


@dataclass(frozen=True)
class RunCompare:
    """Compares queries with the samples of one side by a run's similarity. It can travel to a Dask worker.

    Attributes:
        similarity: of images and captions, ``[I, C]``.
        answers: what is searched, ``images`` or ``captions``.
        device: where it is computed.
    """

    similarity: nn.Module
    answers: Side
    device: str = "cpu"

    def __call__(self, queries: Embedding, items: Embedding) -> Tensor:
        """Return the similarities ``[Q, N]`` of Q queries and N items."""
        queries, items = (each(lambda t: t.to(self.device), side) for side in (queries, items))
        return self.similarity(queries, items) if self.answers == "captions" else self.similarity(items, queries).T


def compare_of(retriever: Retriever, answers: Side) -> RunCompare:
    """Return what compares queries with the images or captions of a run."""
    return RunCompare(retriever.model.compare, answers, str(retriever.device))


def index_run(
    run: str | Path,
    out: str | Path,
    *,
    store: str | None = None,
    split: str = "test",
    kind: Kind = "ivf",
    recall: float = 0.99,
    effort: Effort | None = None,
    seed: int = 0,
    device: str = "auto",
) -> dict[str, Any]:
    """Make a folder with an index of a gallery's ``images`` and one of its ``captions``.

    The recall of either is measured with a sample of the other.

    Args:
        run: the run.
        out: the folder, which appears when it is whole.
        store: the feature cache; None: the one that the run was trained on.
        split: whose images and captions.
        kind: of the FAISS index.
        recall: of the exact top 10, that the effort is chosen for.
        effort: to take in the place of a chosen one.
        seed: of the clustering and the sample.
        device: ``auto``, ``cpu`` or ``cuda``, for embedding and comparing.

    Returns:
        ``{"run", "out", "images", "captions"}``, the last two the reports of `build_index`.

    Raises:
        RunError: the run, its features or `out` cannot be used, or FAISS is missing.
        CacheError: the split is unknown, empty or not complete.
    """
    load_faiss()
    retriever = Retriever(run, store=store, split=split, device=device)
    options: Any = {"form": form_of(retriever.model.compare), "kind": kind, "recall": recall}
    with appearing(Path(out)) as partial:
        records = {}
        for side in SIDES:
            (partial / side).mkdir()
            batches, ids, labels = _gallery(retriever, side)
            records[side] = write_items(partial / side, batches, ids, labels, retriever.index_facts(side))
        queries = {}
        for side in SIDES:
            items = Items(partial / side, records[side]["items"])
            rows = np.random.default_rng(seed).permutation(len(items))[:SAMPLE]
            queries[side] = items.some(np.sort(rows))
        reports: dict[str, Any] = {
            side: finish(
                partial / side,
                records[side],
                queries=queries[other],
                compare=compare_of(retriever, side),
                effort=effort,
                seed=seed,
                **options,
            )
            for side, other in zip(SIDES, SIDES[::-1], strict=True)
        }
    return {"run": str(run), "out": str(out), **reports}


def add_to_index(
    run: str | Path, out: str | Path, *, store: str | None = None, split: str = "test", device: str = "auto"
) -> dict[str, Any]:
    """Add another split, or another store's, to the indexes that `index_run` made at `out`; else as there.

    Stopped in between, the images are in and the captions are not: the same call again adds what is missing.

    Raises:
        RunError: also where there is no index, it is of another run, damaged, or has these samples already.
    """
    retriever = Retriever(run, store=store, split=split, device=device)
    facts = {side: retriever.index_facts(side) for side in SIDES}
    indexes = {side: Index.open(Path(out) / side, {"weights": facts[side]["weights"]}) for side in SIDES}
    missing = [side for side in SIDES if not indexes[side].holds(facts[side])] or list(SIDES)
    reports: dict[str, Any] = {}
    for side in missing:
        batches, ids, labels = _gallery(retriever, side)
        compare = compare_of(retriever, side)
        reports[side] = indexes[side].add(batches, ids, labels=labels, facts=facts[side], compare=compare)
    return {"run": str(run), "out": str(out), **reports}


def _gallery(retriever: Retriever, side: Side) -> tuple[Iterator[Embedding], Several[str], Several[str]]:
    """Return the embeddings of a side, batch by batch, with the ids and labels of all."""
    gallery, model = retriever.gallery, retriever.model
    batches = split_of_run(retriever.run, retriever.cache, retriever.split, model, retriever.device)
    if side == "images":
        parts = _embedded(model.embed_images, batches.image_features(BATCH), retriever.device)
        return parts, gallery.image_ids, gallery.file_names
    parts = _embedded(model.embed_captions, batches.caption_features(BATCH), retriever.device)
    return parts, gallery.caption_ids, gallery.texts


def _embedded(
    embed: Callable[[Features], Aggregated], parts: Iterable[Features], device: torch.device
) -> Iterator[Embedding]:
    for features in parts:
        with torch.no_grad(), within_memory(device):
            embedding = embed(features).embedding
        yield each(lambda t: t.float() if t.is_floating_point() else t, embedding)
