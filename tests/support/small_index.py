"""An index of embeddings that lie in memory, built as `index_run` builds those of a run."""

from pathlib import Path

from xret.heads.retrieval.index import Index, Items, build


def build_index(batches, folder, *, queries, compare, similarity, **options):
    """Return an open index and its facts."""
    folder = Path(folder)
    folder.mkdir(parents=True)
    facts = build(folder, Items.write(folder, batches), queries, compare, similarity, **options)
    return Index(folder, facts, similarity), facts
