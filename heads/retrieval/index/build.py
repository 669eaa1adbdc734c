"""Building an index: the gallery first, then FAISS over its elements, then what a search has to do for its recall."""

from collections.abc import Iterable
from collections.abc import Sequence as Several
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save
from torch import Tensor

from ...modules.embedding import Embedding, Gaussian, Sequence
from .candidates import Candidates, Effort, Kind, training_size
from .effort import K, Measurement, cheapest, measure
from .exact import Compare, one, search_exactly
from .folder import Facts, appearing, entry_of, write_record
from .items import Items, append
from .vectors import Form, vectors

BLOCK = 1 << 16  # elements read and handed to FAISS in one go
QUERIES = "queries.safetensors"


@dataclass(frozen=True)
class IndexOptions:
    """How an index is built.

    Attributes:
        kind: of the FAISS index.
        recall: of the exact top 10, that the effort is chosen for.
        effort: to take in place of a chosen one.
        seed: of the clustering, and of the sample of queries.
    """

    kind: Kind = "ivf"
    recall: float = 0.99
    effort: Effort | None = None
    seed: int = 0


DEFAULTS = IndexOptions()


@dataclass(frozen=True)
class IndexReport:
    """What was built.

    Attributes:
        kind: of the FAISS index.
        samples, elements: how many it has.
        bytes: of all its files.
        lists: of its inverted file; 1 where there is none.
        effort: that a search takes.
        recall: of the exact top 10, measured with it.
        wanted_recall: as it was asked for.
        curve: of all efforts that were measured.
    """

    kind: Kind
    samples: int
    elements: int
    bytes: int
    lists: int
    effort: Effort
    recall: float
    wanted_recall: float
    curve: list[Measurement]


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
    options: IndexOptions = DEFAULTS,
) -> IndexReport:
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
        options: how.

    Raises:
        RunError: the folder exists, or FAISS is missing.
        ValueError: there are not as many ids and labels as embeddings.
    """
    with appearing(Path(folder)) as partial:
        record = write_items(partial, batches_of(embeddings), ids, ids if labels is None else labels, facts)
        return write_candidates(partial, record, queries, compare, form, options)


def write_items(
    folder: Path, batches: Iterable[Embedding], ids: Several[str], labels: Several[str], facts: Facts
) -> dict[str, Any]:
    """Write the gallery of an index, without FAISS; return the record for `write_candidates`."""
    items, files = append(folder, batches, ids, labels)
    return {"items": items, "files": files, "parts": [{**facts, "samples": items["count"]}]}


def write_candidates(
    folder: Path, record: dict[str, Any], queries: Embedding, compare: Compare, form: Form, options: IndexOptions
) -> IndexReport:
    """Build the FAISS index of a folder with a gallery, measure, and write the record; as for `build_index`."""
    items = Items(folder, record["items"])
    rng = np.random.default_rng(options.seed)
    share = training_size(options.kind, items.elements) / max(1, items.elements)
    rows = np.sort(rng.permutation(len(items))[: max(1, round(share * len(items)))])
    sample, inner_product = vectors(form, items.some(rows)), form == "cosines"
    candidates = Candidates.train(options.kind, sample, items.elements, inner_product=inner_product, seed=options.seed)
    add_elements(candidates, items, form)
    (folder / QUERIES).write_bytes(save(_named(queries)))
    record = {
        **record,
        "kind": options.kind,
        "form": form,
        "seed": options.seed,
        "wanted_recall": options.recall,
        "fixed_effort": options.effort is not None,
    }
    return settle(folder, record, items, candidates, queries, compare, options.effort)


def add_elements(candidates: Candidates, items: Items, form: Form, first: int = 0) -> None:
    """Put the elements of all samples from row `first` on into a FAISS index."""
    for _, block in items.blocks(max(1, BLOCK // items.size), first):
        candidates.add(vectors(form, block))


def batches_of(embeddings: Embedding | Iterable[Embedding]) -> Iterable[Embedding]:
    """Return embeddings, given at once or in batches, as batches."""
    return [embeddings] if isinstance(embeddings, Tensor | Gaussian | Sequence) else embeddings


def settle(
    folder: Path,
    record: dict[str, Any],
    items: Items,
    candidates: Candidates,
    queries: Embedding,
    compare: Compare,
    effort: Effort | None,
    generation: int = 0,
) -> IndexReport:
    """Write the FAISS index, measure its recall, choose the effort, and at last write the record.

    Args:
        folder: of the index.
        record: what is known so far.
        items: the gallery.
        candidates: of all its elements.
        queries: to measure with, the ones that were saved.
        compare: takes Q queries and N samples to ``[Q, N]``.
        effort: to take in place of a chosen one.
        generation: how often something was added; it names the file.
    """
    exact = [rows for rows, _ in search_exactly(queries, items, compare, K)]
    asked = [vectors(record["form"], one(queries, row), query=True) for row in range(len(exact))]
    wanted = record["wanted_recall"]
    curve = measure(candidates, items, asked, exact, wanted, effort)
    chosen = cheapest(curve, wanted)
    name = f"elements-{generation}.faiss"
    candidates.write(folder / name)
    files = {**record["files"], name: entry_of(folder / name), QUERIES: entry_of(folder / QUERIES)}
    found = {
        "files": files,
        "elements": name,
        "effort": asdict(chosen.effort),
        "recall": chosen.recall,
        "curve": [asdict(point) for point in curve],
    }
    write_record(folder, {**record, **found})
    total = sum(entry["bytes"] for entry in files.values())
    sizes = (len(items), items.elements, total, candidates.lists)
    return IndexReport(record["kind"], *sizes, chosen.effort, chosen.recall, wanted, curve)


def _named(embedding: Embedding) -> dict[str, Tensor]:
    named = {"embedding": embedding} if isinstance(embedding, Tensor) else embedding._asdict()
    return {name: tensor.detach().cpu().contiguous() for name, tensor in named.items()}
