"""Exported embeddings read by others: the gallery's numbers and names, and the answers that xret finds."""

import json

import numpy as np
import pytest
from foreign import needed, node, of_others

from xret.heads.modules.embedding import Sequence, tensors_of
from xret.heads.retrieval.export import export_embeddings
from xret.heads.retrieval.retriever import Retriever

pytestmark = of_others
HYPARQUET = """
import {asyncBufferFromFile, parquetReadObjects} from "hyparquet";
import {compressors} from "hyparquet-compressors";
const file = await asyncBufferFromFile(process.argv[2]);
console.log(JSON.stringify(await parquetReadObjects({file, compressors})));
"""


def pyarrow(path):
    return needed("pyarrow.parquet").read_table(path).to_pylist()


def duckdb(path):
    return needed("duckdb").sql(f"FROM '{path}'").to_arrow_table().to_pylist()


def polars(path):
    return needed("polars").read_parquet(path).to_dicts()


def datasets(path):
    return needed("datasets").Dataset.from_parquet(str(path), cache_dir=str(path.parent / "cache")).to_list()


def lancedb(path):
    table = needed("pyarrow.parquet").read_table(path)
    return needed("lancedb").connect(path.parent / "lance").create_table("items", table).to_arrow().to_pylist()


@pytest.fixture(scope="module", params=["vsepp", "setdiv", "gaussian-vsepp", "scan"])
def exported(request, made, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param) / "all.parquet"
    retriever = Retriever(made.run(request.param), device="cpu")
    export_embeddings(retriever, path)
    return retriever, path


@pytest.mark.parametrize("read", [pyarrow, duckdb, polars, datasets, lancedb, lambda path: node(HYPARQUET, path)])
def test_a_parquet_file_has_the_embeddings(exported, read, tmp_path):
    retriever, path = exported
    gallery, rows = retriever.gallery, read(path)
    captions = [row for row in rows if row["modality"] == "caption"]
    assert [row["id"] for row in rows] == [*gallery.image_ids, *gallery.caption_ids]
    assert [row["caption"] for row in captions] == gallery.texts
    for key, names in (("image_id", gallery.image_ids), ("file_name", gallery.file_names)):
        assert [row[key] for row in rows] == [*names, *(names[row] for row in gallery.caption_image)]
    for modality, some in (("images", rows[:22]), ("captions", captions)):
        embedding = gallery.of(modality)
        parts = tensors_of(embedding)
        if isinstance(embedding, Sequence):
            parts = {"embedding": [own[:length] for own, length in zip(*embedding, strict=True)]}
        for name, expected in parts.items():
            for sample, values in zip(some, expected, strict=True):
                np.testing.assert_array_equal(np.array(sample[name], dtype=np.float32), values)


def test_a_folder_is_a_data_set_of_the_hub_and_an_index_of_usearch(made, tmp_path, monkeypatch):
    retriever = Retriever(made.run(), device="cpu")
    export_embeddings(retriever, tmp_path / "all")
    for name in ("images", "captions"):
        how = {"split": "train", "cache_dir": str(tmp_path / "cache")}
        rows = needed("datasets").load_dataset(str(tmp_path / "all"), name, **how)
        assert rows["id"] == retriever.gallery.names(name)[0]
    vectors = np.load(tmp_path / "all/images.npy")
    index = needed("usearch.index").Index(ndim=vectors.shape[1], metric="ip", dtype="f32")
    index.add(np.arange(len(vectors)), vectors)
    ids = [json.loads(line)["id"] for line in (tmp_path / "all/images.jsonl").read_text().splitlines()]
    for text in retriever.gallery.texts[:5]:
        expected = {hit.id: hit.score for hit in retriever.search(text, 22)}
        found = index.search(retriever.encode_text([text])[0].numpy(), 5)
        scores = {ids[key]: 1 - float(distance) for key, distance in zip(found.keys, found.distances, strict=True)}
        assert scores == pytest.approx({id_: expected[id_] for id_ in scores}, abs=1e-5)
        assert sorted(scores.values()) == pytest.approx(sorted(expected.values())[-5:], abs=1e-5)
