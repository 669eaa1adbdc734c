"""The index of a run: its gallery, embedded batch by batch and never held in memory as a whole."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from ...pipeline.errors import RunError
from ...pipeline.files import making
from .hits import Modality
from .index import RECORD, Items, build, load_faiss
from .retriever import Retriever

MODALITIES: tuple[Modality, Modality] = ("images", "captions")
SAMPLE = 400  # queries that the recall is measured with


def index_run(
    run: str | Path,
    out: str | Path,
    store: str | None = None,
    *,
    split: str = "test",
    device: str = "auto",
    factory: str | None = None,
    recall: float = 0.99,
) -> dict[str, Any]:
    """Make a folder with an index of a gallery's images and one of its captions; it appears when it is whole.

    The recall of either is measured with a sample of the other.

    Args:
        run, store, split, device: as of `Retriever`.
        out: the folder.
        factory, recall: as of `index.build`.

    Returns:
        For each modality the `samples`, `elements`, `factory`, `effort`, `recall` and `bytes`.

    Raises:
        RunError: the run, its features or `out` cannot be used, or FAISS is missing or refuses `factory`.
        CacheError: the split is unknown, empty or not complete.
    """
    load_faiss()
    retriever, out = Retriever(run, store=store, split=split, device=device), Path(out)
    if out.exists():
        raise RunError(f"{out} exists; take another --out")
    gallery, similarity = retriever.gallery, retriever.model.compare
    with making(out, RunError, "make room, or take another --out") as partial:
        facts, queries = {}, {}
        for modality in MODALITIES:
            (partial / modality).mkdir()
            facts[modality] = Items.write(partial / modality, gallery.embedded(modality))
            items = Items(partial / modality, facts[modality])
            queries[modality] = items[np.sort(np.random.default_rng(1).permutation(len(items))[:SAMPLE])]
        for modality, other in zip(MODALITIES, MODALITIES[::-1], strict=True):
            folder, compare = partial / modality, retriever.comparison(modality)
            facts[modality] = build(
                folder, facts[modality], queries[other], compare, similarity, factory=factory, recall=recall
            )
            facts[modality]["bytes"] = sum(file.stat().st_size for file in folder.iterdir())
        (partial / RECORD).write_text(json.dumps({**retriever.index_facts(), **facts}, indent=1))
    reported = ("samples", "elements", "factory", "effort", "recall", "bytes")
    return {modality: {name: facts[modality][name] for name in reported} for modality in MODALITIES}
