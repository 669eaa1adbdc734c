"""Making an index of a run's gallery, see `index`."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...pipeline.errors import RunError
from ...pipeline.files import making, require_new
from ..evaluation.scoring import MODALITIES, Modality
from .index import RECORD, Index, Items, K, build, load_faiss, one_by_one, search_exactly, share_found
from .retriever import Retriever
from .smaller import made_smaller, require_smaller, rotation

SAMPLE = 400  # queries by which the recall is measured
HELD = 1 << 27  # numbers in memory while hubness is learned, 512 MiB; more are read in parts, the bank with each


def index_run(
    retriever: Retriever,
    out: Path,
    *,
    factory: str | None = None,
    recall: float = 0.99,
    dims: int | None = None,
    dtype: str = "float32",
) -> dict[Modality, dict[str, Any]]:
    """Make a folder with an index of a gallery's images and one of its captions; it appears when it is whole.

    No modality is held in memory as a whole. Embeddings are made smaller by `dims` and `dtype`, see `smaller`; they
    rank what is found, too.

    Returns:
        Of each modality the `samples`, `elements`, `factory`, `effort`, `recall` and `bytes`; of a smaller one also
        `whole_recall`, the share of the exact top 10 at full width that a search answers.

    Raises:
        OutputError: `out` exists, or cannot be written.
        RunError: as `build`; or the embeddings cannot be made smaller.
    """
    load_faiss()
    require_new(out, folder=True)
    smaller = dims is not None or dtype != "float32"
    if smaller:
        require_smaller(retriever, dtype)
    turn, similarity, chosen = None if dims is None else rotation(retriever, dims), retriever.model.compare, {}
    with making(out, RunError, "make room, or take another --out") as partial:
        facts = {name: Items.write(partial / name, retriever.gallery.embedded(name)) for name in MODALITIES}
        for modality, other in zip(MODALITIES, MODALITIES[::-1], strict=True):
            items = Items(partial / modality, facts[modality])
            chosen[other] = items[np.sort(np.random.default_rng(1).permutation(len(items))[:SAMPLE])]
            learn_bias(retriever, partial / modality, modality, items)
        for modality in MODALITIES:
            folder, queries, compare = partial / modality, chosen[modality], retriever.comparison(modality)
            if smaller:
                items = Items(folder, facts[modality])
                exact = search_exactly(queries, items, compare, K)
                if turn is not None:
                    learn_bias(retriever, folder, modality, items, turn)
                facts[modality] = make_smaller(folder, facts[modality], turn, dtype)
            asked = made_smaller(queries, turn) if smaller else queries
            found = build(folder, facts[modality], asked, compare, similarity, factory=factory, recall=recall)
            if smaller:
                index = Index(folder, found, similarity)
                answers = (index.search(query, K, compare)[0] for query in one_by_one(queries))
                found["whole_recall"] = share_found(answers, exact)
        (partial / RECORD).write_text(json.dumps({**retriever.index_facts(), **facts}, indent=1))
    reported = ("samples", "elements", "factory", "effort", "recall", "bytes", "whole_recall")
    return {name: {key: facts[name][key] for key in reported if key in facts[name]} for name in MODALITIES}


def learn_bias(
    retriever: Retriever, folder: Path, modality: Modality, items: Items, turn: Tensor | None = None
) -> None:
    """Write the `bias` of items into a folder, where hubness is corrected; `turn` as of `Retriever.bias_of`."""
    if retriever.scale is not None:
        step = max(1, HELD // items.numbers)
        parts, owners = (slice(first, first + step) for first in range(0, len(items), step)), retriever.gallery.owners
        bias = torch.cat([retriever.bias_of(modality, items[some], owners(modality)[some], turn) for some in parts])
        bias.cpu().numpy().astype(np.float32).tofile(folder / "bias")


def make_smaller(folder: Path, facts: dict[str, Any], turn: Tensor | None, dtype: str) -> dict[str, Any]:
    """Make the embeddings that `Items.write` put into a folder smaller, see `smaller`; return their facts."""
    items, small = Items(folder, facts), folder / "small"
    largest = torch.stack([made_smaller(block, turn).abs().max() for _, block in items.blocks()]).max()
    facts = Items.write(small, (made_smaller(block, turn, dtype, largest) for _, block in items.blocks()))
    (small / "embedding").replace(folder / "embedding")
    small.rmdir()
    if turn is not None:
        np.save(folder / "rotation.npy", turn.cpu().numpy())
    return facts
