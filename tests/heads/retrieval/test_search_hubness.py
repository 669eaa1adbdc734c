"""Searching, indexing and exporting with the correction of hubness, against its formula in numpy."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch.nn.functional import normalize

from xret.heads.evaluation import hubness
from xret.heads.retrieval import indexing, mteb
from xret.heads.retrieval import retriever as room
from xret.heads.retrieval.export import export_embeddings
from xret.heads.retrieval.indexing import index_run
from xret.heads.retrieval.retriever import Query, Retriever
from xret.pipeline.errors import QueryError

SCALE = 20.0


@pytest.fixture
def corrected(made, monkeypatch):
    """A retriever with a scale that is not chosen, and the biases of its images and captions."""
    monkeypatch.setattr(room, "choose_scale", lambda *_: (2.0, (2.0 / SCALE,), {}))
    run = made.run()
    bank, test = Retriever(run, split="train").gallery, Retriever(run, split="test")
    by_captions = test.similarity(test.gallery.images, bank.captions).double().numpy()
    by_images = test.similarity(bank.images, test.gallery.captions).double().numpy()
    biases = [-np.log(np.exp(SCALE * one).mean(axis)) / SCALE for one, axis in ((by_captions, 1), (by_images, 0))]
    return Retriever(run, split="test", hubness=True), *biases


def test_each_answer_has_its_bias(corrected, made):
    retriever, of_images, of_captions = corrected
    plain, text = Retriever(made.run(), split="test"), retriever.gallery.texts[0]
    for query, bias, names in (
        (text, of_images, plain.gallery.image_ids),
        (sorted(made.images.rglob("*.png"))[0], of_captions, plain.gallery.caption_ids),
    ):
        without = {hit.id: hit.score for hit in plain.search(query, 1000)}
        found = retriever.search(query, 1000)
        expected = {name: without[name] + bias[row] for row, name in enumerate(names)}
        assert {hit.id: hit.score for hit in found} == pytest.approx(expected, abs=1e-5)
        assert [hit.score for hit in found] == sorted((hit.score for hit in found), reverse=True)
        assert {hit.probability for hit in found} == {None}  # they are of other scores


def test_an_index_has_the_biases_itself_and_learns_them_in_parts(corrected, tmp_path, monkeypatch):
    pytest.importorskip("faiss", reason="FAISS is not here: pip install 'xret[index]'")
    retriever, sizes, learn = corrected[0], [], room.learned_bias
    monkeypatch.setattr(indexing, "HELD", 4 * 16)  # four vectors
    monkeypatch.setattr(room, "learned_bias", lambda *args: sizes.append((args[1], len(args[2][0]))) or learn(*args))
    index_run(retriever, tmp_path / "index")
    assert [size for modality, size in sizes if modality == "images"] == [4, 2]
    assert not {"images", "captions"} & set(vars(retriever.gallery))
    text = retriever.gallery.texts[3]
    found = Retriever(retriever.run.path, split="test", index=tmp_path / "index").search(text, 5)
    assert [(hit.id, round(hit.score, 4)) for hit in found] == [
        (hit.id, round(hit.score, 4)) for hit in retriever.search(text, 5)
    ]
    with pytest.raises(QueryError, match="leave `hubness`"):
        Retriever(retriever.run.path, index=tmp_path / "index", hubness=True)


def test_an_export_has_them_beside_the_embeddings(corrected, tmp_path):
    retriever, of_images, of_captions = corrected
    assert export_embeddings(retriever, tmp_path / "e.safetensors")["hubness"] == pytest.approx(SCALE)
    arrays = load_file(tmp_path / "e.safetensors")
    np.testing.assert_allclose(arrays["images.bias"], of_images, atol=1e-5)
    np.testing.assert_allclose(arrays["captions.bias"], of_captions, atol=1e-5)
    parquet = pytest.importorskip("pyarrow.parquet")
    export_embeddings(retriever, tmp_path / "e.parquet")
    column = parquet.read_table(tmp_path / "e.parquet")["bias"].to_numpy()
    np.testing.assert_allclose(column, np.concatenate([of_images, of_captions]), atol=1e-5)


def test_smaller_embeddings_have_the_biases_of_their_own_scores(corrected, tmp_path):
    retriever = corrected[0]
    bank, gallery = Retriever(retriever.run.path, split="train").gallery, retriever.gallery
    export_embeddings(retriever, tmp_path / "e.safetensors", dims=3)
    arrays = load_file(tmp_path / "e.safetensors")
    turn = torch.from_numpy(arrays["rotation"])
    small = [normalize(normalize(one) @ turn).numpy() for one in (bank.images, bank.captions)]
    by_captions, by_images = arrays["images"] @ small[1].T, small[0] @ arrays["captions"].T
    expected = [-np.log(np.exp(SCALE * one).mean(axis)) / SCALE for one, axis in ((by_captions, 1), (by_images, 0))]
    np.testing.assert_allclose(arrays["images.bias"], expected[0], atol=1e-4)
    np.testing.assert_allclose(arrays["captions.bias"], expected[1], atol=1e-4)
    pytest.importorskip("faiss", reason="FAISS is not here: pip install 'xret[index]'")
    index_run(retriever, tmp_path / "index", dims=3)
    indexed = Retriever(retriever.run.path, split="test", index=tmp_path / "index")
    found = {hit.id: hit.score for hit in indexed.search(Query(gallery.captions[:1], "images"), 99)}
    scores = arrays["captions"][0] @ arrays["images"].T + expected[0]
    assert found == pytest.approx(dict(zip(gallery.image_ids, scores, strict=True)), abs=1e-4)


def test_pictures_of_a_folder_are_held_back_for_texts_alone(corrected, made):
    retriever = corrected[0]
    folder = Retriever(retriever.run.path, images=made.images, hubness=True)
    plain = Retriever(retriever.run.path, images=made.images)
    text, picture = retriever.gallery.texts[0], sorted(made.images.rglob("*.png"))[0]
    assert [hit.score for hit in folder.search(text)] != [hit.score for hit in plain.search(text)]
    assert folder.search(picture) == plain.search(picture)


class Table(dict):
    """Columns, of which a slice are rows, as a `datasets.Dataset` has them."""

    def __len__(self):
        return len(self["id"])

    def __getitem__(self, key):
        return {name: self[name][key] for name in self} if isinstance(key, slice) else super().__getitem__(key)


def test_a_corpus_of_mteb_has_its_biases(corrected, made, monkeypatch):
    monkeypatch.setattr(mteb, "_meta", lambda *_: None)
    retriever, task = corrected[0], SimpleNamespace(category="t2i", name="a task")
    gallery, model = retriever.gallery, mteb.MtebModel(retriever)
    files = [made.images / name for name in gallery.file_names]
    model.index(Table(id=gallery.image_ids, image=files), task_metadata=task)
    queries = Table(id=["0", "3"], text=[gallery.texts[0], gallery.texts[3]])
    found = model.search(queries, task_metadata=task, top_k=6)
    for query, text in zip(*queries.values(), strict=True):
        expected = {hit.id: hit.score for hit in retriever.search(text, 6)}
        assert found[query] == pytest.approx(expected, abs=2e-3)


def test_what_a_picture_is_called_in_training_does_not_hold_it_back(corrected, made, monkeypatch):
    monkeypatch.setattr(hubness, "BATCH", 4)
    run = made.run()
    whole, bank, text = Retriever(run, hubness=True), Retriever(run, split="train").gallery, "red beside blue"
    scores = whole.similarity(whole.gallery.images, bank.captions).double().numpy()
    scores[bank.caption_image, range(len(bank.texts))] = np.nan  # images of training come first
    bias = -np.log(np.nanmean(np.exp(SCALE * scores), 1)) / SCALE
    plain = {hit.id: hit.score for hit in Retriever(run).search(text, 99)}
    expected = {name: plain[name] + bias[row] for row, name in enumerate(whole.gallery.image_ids)}
    assert {hit.id: hit.score for hit in whole.search(text, 99)} == pytest.approx(expected, abs=1e-5)
    scores = whole.similarity(bank.images, whole.gallery.captions).double().numpy()
    scores[bank.caption_image, range(len(bank.texts))] = np.nan
    bias = -np.log(np.nanmean(np.exp(SCALE * scores), 0)) / SCALE
    np.testing.assert_allclose(whole.bias("captions"), bias, atol=1e-5)
