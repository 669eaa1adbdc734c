"""Building an index: the gallery first, then FAISS over its elements, then what a search has to do for its recall."""

from collections.abc import Iterable
from collections.abc import Sequence as Several
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save
from torch import Tensor

from ...modules.embedding import Embedding, Gaussian, Sequence
from .candidates import Candidates, Effort, Kind, training_size
from .effort import K, cheapest, measure
from .elements import Form, vectors
from .exact import Compare, one, search_exactly
from .folder import Facts, appearing, entry_of, write_record
from .items import Items, append

BLOCK = 1 << 16  # elements read and handed to FAISS in one go
QUERIES = "queries.safetensors"


def build_index(
    embeddings: Embedding | Iterable[Embedding],
    ids: Several[str],
    folder: str | Path,
    *,
    queries: Embedding,
    compare: Compare,
    form: Form,
    facts: Facts,
    labels: Several[str] | None = None,
    kind: Kind = "ivf",
    recall: float = 0.99,
    effort: Effort | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Build an index in a folder that appears when it is whole.

    Args:
        embeddings: of N samples, in float32; or batches of them, which need not fit in memory together.
        ids: of the samples.
        folder: to be made.
        queries: embeddings to measure the recall with, of the other modality; they are kept for `Index.add`.
        compare: takes Q queries and N samples to ``[Q, N]``.
        form: `form_of` the similarity.
        facts: what the index depends on, of a `store` and a `split`; an index is only opened for the same.
        labels: of the samples, file names or captions; None: the ids.
        kind: of the FAISS index.
        recall: of the exact top 10, that the effort is chosen for.
        effort: to take in the place of a chosen one.
        seed: of the clustering.

    Returns:
        ``{"kind", "samples", "elements", "bytes", "lists", "effort", "recall", "wanted_recall", "curve"}``.

    Raises:
        RunError: the folder exists, or FAISS is missing.
        ValueError: there are not as many ids and labels as embeddings.
    """
    with appearing(Path(folder)) as partial:
        record = write_items(partial, batches_of(embeddings), ids, ids if labels is None else labels, facts)
        options: Any = {"kind": kind, "recall": recall, "effort": effort, "seed": seed}
        return finish(partial, record, queries=queries, compare=compare, form=form, **options)


def write_items(
    folder: Path, batches: Iterable[Embedding], ids: Several[str], labels: Several[str], facts: Facts
) -> dict[str, Any]:
    """Write the gallery of an index, without FAISS; return the record for `finish`."""
    items, files = append(folder, batches, ids, labels)
    return {"items": items, "files": files, "parts": [{**facts, "samples": items["count"]}]}


def finish(
    folder: Path,
    record: dict[str, Any],
    *,
    queries: Embedding,
    compare: Compare,
    form: Form,
    kind: Kind = "ivf",
    recall: float = 0.99,
    effort: Effort | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Build the FAISS index of a folder with a gallery, measure, and write the record; as for `build_index`."""
    items = Items(folder, record["items"])
    rng = np.random.default_rng(seed)
    share = training_size(kind, items.elements) / max(1, items.elements)
    rows = np.sort(rng.permutation(len(items))[: max(1, round(share * len(items)))])
    sample = vectors(form, items.some(rows))
    candidates = Candidates.train(kind, sample, items.elements, inner_product=form == "cosines", seed=seed)
    for _, block in items.blocks(max(1, BLOCK // items.size)):
        candidates.add(vectors(form, block))
    (folder / QUERIES).write_bytes(save(_named(queries)))
    record = {
        **record,
        "kind": kind,
        "form": form,
        "seed": seed,
        "wanted_recall": recall,
        "fixed_effort": effort is not None,
    }
    return measured(folder, record, items, candidates, queries, compare, effort)


def batches_of(embeddings: Embedding | Iterable[Embedding]) -> Iterable[Embedding]:
    """Return embeddings, given at once or in batches, as batches."""
    return [embeddings] if isinstance(embeddings, Tensor | Gaussian | Sequence) else embeddings


def measured(
    folder: Path,
    record: dict[str, Any],
    items: Items,
    candidates: Candidates,
    queries: Embedding,
    compare: Compare,
    effort: Effort | None,
    generation: int = 0,
) -> dict[str, Any]:
    """Write the FAISS index, measure its recall, choose the effort, and at last write the record.

    Args:
        folder: of the index.
        record: what is known so far.
        items: the gallery.
        candidates: of all its elements.
        queries: to measure with, the ones that were saved.
        compare: takes Q queries and N samples to ``[Q, N]``.
        effort: to take in the place of a chosen one.
        generation: how often something was added; it names the file.

    Returns:
        The report of `build_index`.
    """
    exact = [rows for rows, _ in search_exactly(queries, items, compare, K)]
    asked = [vectors(record["form"], one(queries, row), query=True) for row in range(len(exact))]
    curve = measure(candidates, items, asked, exact, record["wanted_recall"], effort)
    chosen = cheapest(curve, record["wanted_recall"])
    name = f"elements-{generation}.faiss"
    candidates.write(folder / name)
    files = {**record["files"], name: entry_of(folder / name), QUERIES: entry_of(folder / QUERIES)}
    record = {
        **record,
        "files": files,
        "elements": name,
        "effort": {"probes": chosen["probes"], "candidates": chosen["candidates"]},
        "recall": chosen["recall"],
        "curve": curve,
    }
    write_record(folder, record)
    return {
        "kind": record["kind"],
        "samples": len(items),
        "elements": items.elements,
        "bytes": sum(entry["bytes"] for entry in files.values()),
        "lists": candidates.lists,
        **{key: record[key] for key in ("effort", "recall", "wanted_recall", "curve")},
    }


def _named(embedding: Embedding) -> dict[str, Tensor]:
    named = {"embedding": embedding} if isinstance(embedding, Tensor) else embedding._asdict()
    return {name: tensor.detach().cpu().contiguous() for name, tensor in named.items()}
