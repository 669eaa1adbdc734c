"""Captions of equal text in the loss."""

import pytest
import torch
from small_store import make_store
from small_trainings import recipe_of

from xret.heads.runs.run import Run
from xret.heads.training.objective import same_text, same_texts
from xret.heads.training.training import train
from xret.pipeline.cache import FeatureCache
from xret.pipeline.reading.batches import stored_batches

pytestmark = pytest.mark.usefixtures("one_thread")


def test_captions_with_the_text_of_a_positive_are_no_negatives():
    positives = torch.tensor([[1, 1, 0, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 1]]).bool()
    text = torch.tensor([7, 8, 8, 9, 9])
    expected = torch.tensor([[0, 0, 1, 0, 0], [0, 1, 0, 0, 1], [0, 0, 0, 1, 0]]).bool()
    assert torch.equal(same_text(positives, text), expected)


NOT_HARDEST = "loss.triplet.negatives=all"


def test_equal_texts_are_negatives_left_out_or_positives(tmp_path):
    url = make_store(tmp_path / "s.zarr")
    cache = FeatureCache.open(url)
    fields = {"image_fields": {"local"}, "caption_fields": {"token"}}
    numbers_of = same_texts(stored_batches(cache.image_set(), cache.caption_set(), "train", **fields))
    texts = cache.caption_texts(0, len(numbers_of))
    assert [texts.index(text) for text in texts] == [numbers_of.tolist().index(n) for n in numbers_of.tolist()]
    lines = {}
    for choice in ("negative", "excluded", "positive"):
        recipe = recipe_of("vsepp", 1, f"loss.same_text={choice}", "data.batch_size=200", NOT_HARDEST)
        train(url, recipe, tmp_path / choice, device="cpu")
        lines[choice] = Run(tmp_path / choice).metrics()[0]["loss"]
    assert len(set(texts)) < len(texts)  # pictures of the same things are described in the same words
    assert lines["excluded"] < lines["negative"]
    assert lines["positive"] != lines["excluded"]
