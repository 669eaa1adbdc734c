"""Similarities of whole splits: whose they are, in blocks, and ties of equal captions."""

import pytest
import torch
from plain_evaluation import plain_similarity
from scores import score
from small_store import make_store

from xret.heads.evaluation import scoring
from xret.heads.evaluation.evaluation import evaluate
from xret.heads.evaluation.scoring import compare, representatives
from xret.heads.modules.similarity import blocks
from xret.heads.runs.run import Run
from xret.pipeline.store import FeatureCache

pytestmark = pytest.mark.usefixtures("one_thread")


def test_scores_belong_to_their_files_and_texts(setdiv, folder):
    other = make_store(folder / "scored.zarr", broken=(61,))
    scores = score(setdiv, store=other, device="cpu")
    expected, owner = plain_similarity(setdiv, other)
    torch.testing.assert_close(scores.similarity, expected)
    assert scores.caption_image.tolist() == owner
    assert scores.file_names == [f"{row}.jpg" for row in (60, *range(62, 72))]
    cache = FeatureCache.open(other)
    texts = zip(cache.caption_image, cache.caption_texts(0, cache.captions), strict=True)
    assert scores.texts == [text for image, text in texts if image >= 60 and image != 61]


def test_blocks_change_nothing(setdiv, monkeypatch):
    whole = evaluate([setdiv], device="cpu")
    monkeypatch.setattr(blocks, "side", lambda *_: 7)
    monkeypatch.setattr(scoring, "BATCH", 5)
    assert evaluate([setdiv], device="cpu").results[0].rsum == whole.results[0].rsum


def test_captions_of_one_text_and_one_embedding_are_one():
    base = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).repeat(3, 1)  # rows 0, 2, 4 and rows 1, 3, 5 are alike
    base[2] *= 1 + 1e-5  # another rounding
    base[4] *= 1.1  # another embedding
    texts = ["a", "b", "a", "c", "a", "b"]
    assert representatives(base, texts).tolist() == [0, 1, 0, 3, 4, 1]
    sets = base[:, None].repeat(1, 3, 1)
    assert representatives(sets, texts).tolist() == [0, 1, 0, 3, 4, 1]


def test_ties_of_equal_captions_are_exact(setdiv):
    torch.manual_seed(0)
    model = Run(setdiv).model(torch.device("cpu"))
    captions = torch.randn(60, 4, 16)
    captions[1::2] = captions[::2] * (1 + 1e-5 * torch.randn(30, 1, 1))
    texts = [str(row // 2) for row in range(60)]
    similarity = compare(model, torch.randn(7, 4, 16), captions, texts)
    assert torch.equal(similarity[:, ::2], similarity[:, 1::2])
    # Not by chance: compared one by one, they differ.
    other = compare(model, torch.randn(7, 4, 16), captions, [str(row) for row in range(60)])
    assert not torch.equal(other[:, ::2], other[:, 1::2])
