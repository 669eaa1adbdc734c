"""Building an index: the gallery first, then FAISS over its elements, then what a search has to do for its recall."""

from collections.abc import Iterable
from collections.abc import Sequence as Several
from dataclasses import asdict, dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file, save

from ....pipeline.errors import RunError
from ....pipeline.files import locked
from ...modules.embedding import Embedding, each, embedding_of, tensors_of
from .candidates import Candidates, Effort, Kind, training_size
from .effort import K, Measurement, cheapest, measure
from .exact import Compare, search_exactly
from .folder import Facts, entry_of, holds, read_record, require_part, short, write_record
from .items import Items, append
from .vectors import Form, vectors

BLOCK = 1 << 16  # elements read and handed to FAISS in one go
QUERIES = "queries.safetensors"
PLACE = ("store", "split")  # facts in which what is added may differ


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


def write_candidates(
    folder: Path, record: dict[str, Any], queries: Embedding, compare: Compare, form: Form, options: IndexOptions
) -> IndexReport:
    """Build the FAISS index over a gallery, measure its recall, and finish the folder with the record.

    Args:
        folder: with the gallery.
        record: what `append` gave.
        queries: embeddings to measure the recall with, of the other modality; they are kept for `add`.
        compare: takes Q queries and N samples to ``[Q, N]``.
        form: `form_of` the similarity.
        options: how.

    Raises:
        RunError: FAISS is missing.
    """
    items = Items(folder, record["items"])
    rng = np.random.default_rng(options.seed)
    share = training_size(items.elements) / max(1, items.elements)
    rows = np.sort(rng.permutation(len(items))[: max(1, round(share * len(items)))])
    sample, inner_product = vectors(form, items.some(rows)), form == "cosines"
    candidates = Candidates.train(options.kind, sample, items.elements, inner_product=inner_product, seed=options.seed)
    kept = each(lambda tensor: tensor.detach().cpu().contiguous(), queries)
    (folder / QUERIES).write_bytes(save(tensors_of(kept)))
    record = {
        **record,
        "kind": options.kind,
        "form": form,
        "seed": options.seed,
        "wanted_recall": options.recall,
        "fixed_effort": options.effort is not None,
    }
    return _settle(folder, record, candidates, compare, options.effort)


def add(
    folder: Path,
    batches: Iterable[Embedding],
    ids: Several[str],
    labels: Several[str],
    facts: Facts,
    compare: Compare,
) -> IndexReport:
    """Add samples after those that are in an index, and choose its effort anew. Stopped, nothing has changed.

    Arguments as of `append` and `write_candidates`.

    Raises:
        RunError: the samples are of another run or modality, are in the index already, or another process adds.
        ValueError: they are of another kind or width.
    """
    with locked(folder, RunError(f"another process is adding to {folder}; wait until it has ended")):
        record = read_record(folder)
        _require_addable(folder, record["parts"], facts)
        old, first = record["elements"], record["items"]["count"]
        candidates = Candidates.open(folder / old, record["kind"], mapped=False)
        record |= append(folder, batches, ids, labels, facts, record)
        del record["files"][old]
        fixed = Effort(**record["effort"]) if record["fixed_effort"] else None
        report = _settle(folder, record, candidates, compare, fixed, first)
        (folder / old).unlink()
    return report


def _require_addable(folder: Path, parts: list[Facts], facts: Facts) -> None:
    require_part(folder, parts, {key: value for key, value in facts.items() if key not in PLACE})
    if holds(parts, facts):
        place = ", ".join(f"{key} {short(facts[key])}" for key in PLACE if key in facts)
        raise RunError(f"{folder} has these samples already ({place}); add another split or store")


def _settle(
    folder: Path,
    record: dict[str, Any],
    candidates: Candidates,
    compare: Compare,
    effort: Effort | None,
    first: int = 0,
) -> IndexReport:
    """Put the samples from row `first` on into the FAISS index and write it, then measure, and write the record."""
    items, form, wanted = Items(folder, record["items"]), record["form"], record["wanted_recall"]
    for _, block in items.blocks(max(1, BLOCK // items.size), first):
        candidates.add(vectors(form, block))
    queries = embedding_of(load_file(folder / QUERIES))
    exact = [rows for rows, _ in search_exactly(queries, items, compare, K)]
    asked = [vectors(form, each(itemgetter(slice(row, row + 1)), queries), query=True) for row in range(len(exact))]
    curve = measure(candidates, items, asked, exact, wanted, effort)
    chosen = cheapest(curve, wanted)
    name = f"elements-{len(record['parts']) - 1}.faiss"
    candidates.write(folder / name)
    files = {**record["files"], name: entry_of(folder / name), QUERIES: entry_of(folder / QUERIES)}
    found = {
        "files": files,
        "elements": name,
        "effort": asdict(effort or chosen.effort),
        "recall": chosen.recall,
        "curve": [asdict(point) for point in curve],
    }
    write_record(folder, {**record, **found})
    total = sum(entry["bytes"] for entry in files.values())
    sizes = (len(items), items.elements, total, candidates.lists)
    return IndexReport(record["kind"], *sizes, chosen.effort, chosen.recall, wanted, curve)
