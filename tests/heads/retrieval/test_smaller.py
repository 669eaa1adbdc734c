"""Smaller exports against a principal component analysis in numpy."""

import numpy as np
import pytest
from command_line import refused, run
from plain_evaluation import plain_rsum
from safetensors.numpy import load_file

from xret.heads.retrieval.export import export_embeddings
from xret.heads.retrieval.retriever import Retriever

pytestmark = pytest.mark.usefixtures("one_thread")


def unit(rows):
    rows = np.asarray(rows, dtype=float)
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True)


def test_the_rotation_is_that_of_the_training_split(made, tmp_path):
    path = made.run()
    train, test = Retriever(path, split="train").gallery, Retriever(path)
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


def test_all_dimensions_change_nothing(made, tmp_path):
    retriever = Retriever(made.run("setdiv"))
    width = retriever.gallery.images.shape[-1]
    told = export_embeddings(retriever, tmp_path / "e.safetensors", dims=width)
    arrays = load_file(tmp_path / "e.safetensors")
    turned = arrays["images"].reshape(-1, width) @ arrays["captions"].reshape(-1, width).T
    plain = [unit(one.numpy()).reshape(-1, width) for one in (retriever.gallery.images, retriever.gallery.captions)]
    np.testing.assert_allclose(turned, plain[0] @ plain[1].T, atol=1e-4)
    assert told["mean_recall"]["after"] == pytest.approx(told["mean_recall"]["before"], abs=2)


def test_the_command(made, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    words = ("export", made.run(), "--dims", "4", "--dtype", "int8")
    assert "mean recall" in run(*words, "--out", tmp_path / "e.parquet").stdout
    assert str(parquet.read_table(tmp_path / "e.parquet").schema.field("embedding").type.value_type) == "int8"
    assert "up to that" in refused("export", made.run(), "--dims", "4000", "--out", tmp_path / "f")
