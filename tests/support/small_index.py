"""An index of embeddings that lie in memory, built as `index_run` builds those of a run."""

from pathlib import Path

from xret.heads.retrieval.index.build import DEFAULTS, write_candidates
from xret.heads.retrieval.index.folder import appearing
from xret.heads.retrieval.index.items import append


def build_index(batches, ids, folder, *, queries, compare, form, facts, options=DEFAULTS):
    with appearing(Path(folder)) as partial:
        record = append(partial, batches, ids, ids, facts)
        return write_candidates(partial, record, queries, compare, form, options)
