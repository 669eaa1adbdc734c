"""Smaller exports and indexes against a principal component analysis in numpy."""

import json

import numpy as np
import pytest
import torch
from command_line import refused, run
from plain_evaluation import plain_rsum
from safetensors.numpy import load_file

from xret.heads.evaluation import pairs
from xret.heads.retrieval import index, indexing
from xret.heads.retrieval.export import export_embeddings
from xret.heads.retrieval.indexing import index_run
from xret.heads.retrieval.retriever import Query, Retriever
from xret.heads.retrieval.smaller import mean_recall, rotation
from xret.pipeline.errors import RunError


def unit(rows):
    rows = np.asarray(rows, dtype=float)
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True)


def test_the_rotation_is_that_of_the_training_split(made, tmp_path, monkeypatch):
    path = made.run()
    monkeypatch.setattr(index, "VALUES", 50)  # in several blocks
    train, test = Retriever(path, split="train").gallery, Retriever(path, split="test")
    told = export_embeddings(test, tmp_path / "e.safetensors", dims=5, dtype="int8")
    arrays = load_file(tmp_path / "e.safetensors")
    both = [unit(one.numpy()) for one in (train.images, train.captions)]
    _, _, axes = np.linalg.svd(np.concatenate([one / np.sqrt(len(one)) for one in both]), full_matrices=False)
    turn = arrays["rotation"]
    np.testing.assert_allclose(np.abs(np.sum(turn.T * axes[:5], 1)), 1, atol=1e-3)
    expected = [unit(unit(one.numpy()) @ turn) for one in (test.gallery.images, test.gallery.captions)]
    for name, one in zip(("images", "captions"), expected, strict=True):
        assert (arrays[name].dtype, np.abs(arrays[name]).max()) == (np.int8, 127)
        np.testing.assert_allclose(arrays[name], one * 127 / np.abs(one).max(), atol=0.51)
    owner = test.gallery.caption_image.tolist()
    small = [unit(arrays[name]) for name in ("images", "captions")]
    assert told["mean_recall"]["after"] == pytest.approx(plain_rsum(small[0] @ small[1].T, owner) / 6)
    whole = test.similarity(test.gallery.images, test.gallery.captions)
    assert told["mean_recall"]["before"] == pytest.approx(plain_rsum(whole, owner) / 6)
    rows = []
    monkeypatch.setattr(pairs, "block_side", lambda *_: 2)
    test.model.compare.register_forward_pre_hook(lambda _, both: rows.append(max(map(len, both))))
    assert export_embeddings(test, tmp_path / "again", dims=5, dtype="int8")["mean_recall"] == told["mean_recall"]
    assert max(rows) <= 2  # no matrix of all pairs


def test_the_mean_recall_is_that_of_corrected_scores(made, tmp_path):
    retriever = Retriever(made.run(), split="test", hubness=True)
    retriever.scale = 4.0  # whatever validation would choose
    told = export_embeddings(retriever, tmp_path / "e.safetensors", dims=5)["mean_recall"]
    arrays, gallery = load_file(tmp_path / "e.safetensors"), retriever.gallery
    biases = [[retriever.bias(name).numpy() for name in ("images", "captions")]]
    biases.append([arrays[f"{name}.bias"] for name in ("images", "captions")])
    scores = [retriever.similarity(gallery.images, gallery.captions).numpy(), arrays["images"] @ arrays["captions"].T]
    expected = [
        plain_rsum(score + images[:, None] + captions, gallery.caption_image.tolist()) / 6
        for score, (images, captions) in zip(scores, biases, strict=True)
    ]
    assert [told["before"], told["after"]] == pytest.approx(expected)


def test_equal_captions_tie_in_the_mean_recall(made):
    retriever = Retriever(made.run(), split="test", device="cpu")
    gallery, draw = retriever.gallery, torch.Generator().manual_seed(0)
    gallery.texts = ["the same"] * 9
    captions = gallery.captions[:1] * (1 + 1e-5 * torch.randn(9, 16, generator=draw))
    score = retriever.similarity(gallery.images, captions[:1]).expand(-1, 9)
    expected = plain_rsum(score, gallery.caption_image.tolist()) / 6
    assert mean_recall(gallery, gallery.images, captions) == pytest.approx(expected)


def test_a_collapsed_run_is_made_smaller_as_any_other(made, tmp_path):
    collapsed = Retriever(made.run(), device="cpu")
    for parameter in collapsed.model.parameters():
        parameter.data.zero_()
    told = export_embeddings(collapsed, tmp_path / "e.safetensors", dims=5, dtype="int8")
    arrays = load_file(tmp_path / "e.safetensors")
    assert not arrays["images"].any() and np.isfinite(arrays["rotation"]).all()
    assert told["mean_recall"]["before"] == told["mean_recall"]["after"]  # all scores are equal


def test_of_a_whole_store_the_recall_of_the_test_is_told(made, tmp_path):
    told = export_embeddings(Retriever(made.run()), tmp_path / "all.safetensors", dims=5)
    test = export_embeddings(Retriever(made.run(), split="test"), tmp_path / "test.safetensors", dims=5)
    assert told["mean_recall"] == pytest.approx(test["mean_recall"])
    assert (told["images"], test["images"]) == (22, 6)


def answers_of(retriever, modality):
    """Return the scores [Q, N] by which a modality answers each query of the other one."""
    gallery, found = retriever.gallery, []
    ids = gallery.names(modality)[0]
    for query in gallery.of("captions" if modality == "images" else "images").split(1):
        scores = {hit.id: hit.score for hit in retriever.search(Query(query, modality), 1000)}
        found.append([scores[name] for name in ids])
    return np.array(found)


@pytest.mark.parametrize("recipe", ["vsepp", "setdiv"])
def test_an_index_answers_by_the_ranks_of_the_smaller_embeddings(made, tmp_path, recipe):
    pytest.importorskip("faiss", reason="FAISS is not here: pip install 'xret[index]'")
    path = made.run(recipe)
    told = export_embeddings(Retriever(path, split="test"), tmp_path / "e.safetensors", dims=5)
    index_run(Retriever(path, split="test"), tmp_path / "index", dims=5)
    small = Retriever(path, split="test", index=tmp_path / "index")
    to_images, to_captions = (answers_of(small, modality) for modality in ("images", "captions"))
    np.testing.assert_allclose(to_images, to_captions.T, atol=1e-5)
    rsum = plain_rsum(to_captions, small.gallery.caption_image.tolist())
    assert told["mean_recall"]["after"] == pytest.approx(rsum / 6)


def test_an_index_of_bytes_ranks_by_them_and_tells_what_that_costs(made, tmp_path, monkeypatch):
    pytest.importorskip("faiss", reason="FAISS is not here: pip install 'xret[index]'")
    for module in (index, indexing):
        monkeypatch.setattr(module, "K", 2)
    path = made.run()
    export_embeddings(Retriever(path, split="test"), tmp_path / "e.safetensors", dims=3, dtype="int8")
    arrays, whole = load_file(tmp_path / "e.safetensors"), Retriever(path, split="test")
    facts = index_run(Retriever(path, split="test"), tmp_path / "index", dims=3, dtype="int8")
    small = Retriever(path, split="test", index=tmp_path / "index")
    for modality, other in (("images", "captions"), ("captions", "images")):
        asked = unit(unit(whole.gallery.of(other).numpy()) @ arrays["rotation"])
        found, exact = answers_of(small, modality), answers_of(whole, modality)
        np.testing.assert_allclose(found, asked @ unit(arrays[modality]).T, atol=1e-5)
        kept = [len({*np.argsort(-a, kind="stable")[:2]} & {*np.argsort(-b, kind="stable")[:2]}) / 2
                for a, b in zip(found, exact, strict=True)]  # fmt: skip
        assert facts[modality]["whole_recall"] == pytest.approx(np.mean(kept))
        files = list((tmp_path / "index" / modality).iterdir())
        assert (tmp_path / "index" / modality / "embedding").stat().st_size == found.shape[1] * 3
        assert facts[modality]["bytes"] == sum(file.stat().st_size for file in files)
    assert min(one["whole_recall"] for one in facts.values()) < 1


def test_the_command(made, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    words = ("export", made.run(), "--dims", "4", "--dtype", "int8")
    assert "mean recall" in run(*words, "--out", tmp_path / "e.parquet").stdout
    schema = parquet.read_schema(tmp_path / "e.parquet")
    assert str(schema.field("embedding").type.value_type) == "int8"
    turn = json.loads(schema.metadata[b"xret"])["rotation"]
    np.testing.assert_array_equal(turn, rotation(Retriever(made.run(), device="cpu"), 4))
    for wrong, said in (({"dims": 4000}, "from 1 to that"), ({"dims": 0}, "from 1"), ({"dtype": "float16"}, "or int8")):
        with pytest.raises(RunError, match=said):
            export_embeddings(Retriever(made.run(), device="cpu"), tmp_path / "f", **wrong)
    pytest.importorskip("faiss", reason="FAISS is not here: pip install 'xret[index]'")
    said = run("index", made.run(), "--dims", "4", "--dtype", "int8", "--out", tmp_path / "index").stdout
    assert said.count("at full width") == 2
    assert "only what cosines compare" in refused("index", made.run("scan"), "--dims", "4", "--out", tmp_path / "g")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["e.parquet", "index"]
