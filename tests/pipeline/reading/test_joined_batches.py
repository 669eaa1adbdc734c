"""Several data sets as one."""

import numpy as np
import pytest
import torch
from small_batches import as_remote, assert_equal, batches_of
from small_store import make_store

from xret.heads.runs.features import RetokenizedCaptions
from xret.pipeline.errors import CacheError
from xret.pipeline.reading.batches import joined_batches, stored_batches
from xret.pipeline.reading.features import Features, concatenate
from xret.pipeline.reading.placement import Resident
from xret.pipeline.store import FeatureCache

WORDS = {"image_fields": {"local", "global"}, "caption_fields": {"token"}}


@pytest.fixture
def two(tmp_path):
    """Two stores of one encoder, of 20 and 12 images of train, and other words in their captions."""
    urls = [make_store(tmp_path / "a.zarr", train=20), make_store(tmp_path / "b.zarr", train=12, words="look here")]
    return [FeatureCache.open(url) for url in urls]


def joined(two, placement="memory"):
    first, second = two
    words = RetokenizedCaptions(second, first.caption_set().vocabulary)
    pairs = (first.image_set(), first.caption_set()), (second.image_set(), words)
    return joined_batches([stored_batches(*sets, "train", placement=placement, **WORDS) for sets in pairs])


@pytest.mark.parametrize("placement", ["memory", "stream"])
@pytest.mark.parametrize(("unit", "size"), [("image", 6), ("caption", 16)])
def test_joined_data_sets_are_one(two, placement, unit, size):
    batches = joined(two, placement)
    first, second = batches.parts
    assert (batches.images, batches.captions, batches.skipped) == (32, 80, 0)
    epoch = list(batches.epoch(unit=unit, batch_size=size, seed=0, epoch=0))
    assert len(epoch) == batches.steps(unit, size)
    seen, mixed = [], 0
    for batch in epoch:
        index = batch.caption_index.numpy()
        owner = np.empty(len(batch.images.length), dtype=np.int64)
        owner[batch.caption_image] = batches.caption_image[index]
        for row, image in enumerate(owner):
            part, own = (first, image) if image < 20 else (second, image - 20)
            expected = part.image_set.local(part.image_rows[[own]])[0]
            assert np.array_equal(batch.images.local[row], expected)
        for row, caption in enumerate(index):
            part, own = (first, caption) if caption < 50 else (second, caption - 50)
            token = part.caption_set.token(part.caption_rows[[own]])
            assert batch.captions.token[row].tolist() == [*token, *[0] * (batch.captions.token.shape[1] - len(token))]
            assert batch.captions.length[row] == len(token)
        seen += index.tolist()
        mixed += 0 < (owner < 20).sum() < len(owner)
    assert sorted(seen) == list(range(80))
    assert mixed > len(epoch) / 2


def test_joined_batches_are_the_same_wherever_the_features_lie(two):
    for words in ({"captions": 1, "unit": "image"}, {"unit": "caption"}):
        stores = two, [as_remote(cache) for cache in two]
        epochs = [list(joined(some).epoch(batch_size=9, seed=1, epoch=2, **words)) for some in stores]
        for one, other in zip(*epochs, strict=True):
            assert_equal(one, other)


def test_features_of_different_lengths_are_padded_to_the_longest():
    one = Features(torch.tensor([2, 1]), torch.ones(2, 2, 3), torch.ones(2, 5), torch.ones(2, 2, dtype=torch.int64))
    two = Features(torch.tensor([4]), torch.ones(1, 4, 3), torch.ones(1, 5), torch.ones(1, 4, dtype=torch.int64))
    got = concatenate([one, two])
    assert got.length.tolist() == [2, 1, 4]
    assert got.local[:2, :2].eq(1).all() and not got.local[:2, 2:].any() and got.local[2].eq(1).all()
    assert got.token.tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]]
    assert got.global_.shape == (3, 5)
    assert concatenate([Features(torch.tensor([1])), Features(torch.tensor([1]))]).local is None


def test_what_differs_is_not_joined(two, tmp_path):
    first, second = (batches_of(cache, "memory", WORDS) for cache in two)
    with pytest.raises(CacheError, match=r"b\.zarr cannot be joined .* its captions .* another encoder or vocabulary"):
        joined_batches([first, second])
    other = FeatureCache.open(make_store(tmp_path / "c.zarr", train=20, weights="b"))
    with pytest.raises(CacheError, match=r"c\.zarr cannot be joined to .*a\.zarr: its images .* of another encoder"):
        joined_batches([first, batches_of(other, "memory", WORDS)])
    tokens = FeatureCache.open(make_store(tmp_path / "d.zarr", train=20, text="tokens"))
    with pytest.raises(CacheError, match="its captions 'words@"):
        joined_batches([batches_of(tokens, "memory"), first])


def test_words_of_another_vocabulary_are_another_table(two):
    first, second = two
    resident, tables = Resident(), []
    for vocabulary in (first.caption_set().vocabulary, second.caption_set().vocabulary):
        sets = second.image_set(), RetokenizedCaptions(second, vocabulary)
        batches = stored_batches(*sets, "train", placement="memory", resident=resident, **WORDS)
        (features,) = batches.caption_features(1000)
        tables.append(features.token)
    assert not torch.equal(*tables)
