"""Imported embeddings are those that embedding-reader yields, row by row with their metadata."""

import numpy as np
import pytest
from embedding_sources import Pairs
from foreign import needed, of_others

from xret.pipeline.exchange.importers.source import ImportOptions
from xret.pipeline.exchange.importing import import_features
from xret.pipeline.store import FeatureCache

pytestmark = of_others


@pytest.mark.parametrize("layout", ["npy", "parquet", "parquet_npy", "clip-retrieval"])
def test_rows_are_those_of_embedding_reader(tmp_path, layout):
    reader, pairs, place = needed("embedding_reader").EmbeddingReader, Pairs(), tmp_path / "e"
    if layout == "clip-retrieval":
        pairs.clip_retrieval(place, parts=11)
    else:
        pairs.embedding_reader(place, layout)
    import_features(None, str(tmp_path / "s"), ImportOptions("embeddings", place, encoder=("ViT-B/32",)))
    cache = FeatureCache.open(str(tmp_path / "s"))
    ours = {
        "image_path": dict(zip(cache.file_names(0, 120), cache.image_set().global_(np.arange(120)), strict=True)),
        "caption": dict(zip(cache.caption_texts(0, 120), cache.caption_set().global_(np.arange(120)), strict=True)),
    }
    names = ("img_emb", "text_emb") if layout == "clip-retrieval" else ("images", "captions")
    for name, (column, vectors) in zip(names, ours.items(), strict=True):
        how = {} if layout == "npy" else {"meta_columns": [column], "metadata_folder": str(place / "metadata")}
        form = "parquet_npy" if layout == "clip-retrieval" else layout
        theirs, keys = [], []
        for values, rows in reader(str(place / name), file_format=form, **how)(batch_size=50, show_progress=False):
            theirs.append(values)
            keys += (
                [pairs.names[at] if column == "image_path" else pairs.texts[at] for at in rows["i"]]
                if layout == "npy"
                else [*rows[column]]
            )
        assert sorted(keys) == sorted(vectors)
        assert np.array_equal(np.concatenate(theirs), np.stack([vectors[key] for key in keys]))
