"""Batches against a plain walk over the cache."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_extraction import SMALL

from xret.pipeline.data.manifest import load_manifest
from xret.pipeline.errors import CacheError
from xret.pipeline.extraction.extraction import extract
from xret.pipeline.reading.batches import stored_batches
from xret.pipeline.reading.features import pad
from xret.pipeline.store import CaptionSet, FeatureCache
from xret.pipeline.store.sets import FAILED

FIELDS = {"image_fields": {"local", "global"}, "caption_fields": {"token"}}


@pytest.fixture
def cache(tiny_dataset, tmp_path):
    extract(load_manifest(tiny_dataset()), str(tmp_path / "s.zarr"), SMALL)
    return FeatureCache.open(str(tmp_path / "s.zarr"))


@given(st.lists(st.lists(st.integers(-9, 9), min_size=1, max_size=7), min_size=1, max_size=5))
def test_pad_lays_rows_out(rows):
    padded = pad(torch.tensor([value for row in rows for value in row]), torch.tensor([len(row) for row in rows]))
    longest = max(map(len, rows))
    assert padded.tolist() == [row + [0] * (longest - len(row)) for row in rows]


def test_the_order_depends_on_seed_and_epoch_alone(cache):
    batches = stored_batches(cache.image_set(), cache.caption_set(), "train", **FIELDS)

    def order(seed, epoch, size=7):
        it = batches.epoch(unit="image", batch_size=size, seed=seed, epoch=epoch)
        return [batch.images.global_[:, 0].tolist() for batch in it]

    assert order(1, 2) == order(1, 2)
    assert order(1, 2) != order(1, 3)
    assert order(1, 2) != order(2, 2)
    assert [len(images) for images in order(0, 0, 19)] == [19]  # a last batch of one image is left out


def test_features_for_evaluation_come_in_order_and_only_what_is_asked_for(cache):
    batches = stored_batches(
        cache.image_set(), cache.caption_set(), "val", image_fields={"global"}, caption_fields={"token"}
    )
    got = torch.cat([features.global_ for features in batches.image_features(4)])
    assert torch.equal(got, torch.from_numpy(cache.image_set().global_(np.arange(20, 26))))
    assert torch.equal(torch.cat([part.global_ for part in batches.image_features(2, most=3)]), got[[0, 1, 4, 5]])
    assert next(batches.image_features(4)).local is None
    lengths = torch.cat([features.length for features in batches.caption_features(4)])
    assert lengths.tolist() == cache.caption_set().length[batches.caption_rows].tolist()
    assert batches.caption_image.tolist() == [i for i in range(6) for _ in range(cache.caption_count[20 + i])]


def test_an_unknown_split(cache):
    with pytest.raises(CacheError, match="has no split 'dev'; it has train, val, test"):
        stored_batches(cache.image_set(), cache.caption_set(), "dev", **FIELDS)


@pytest.mark.parametrize("placement", ["memory", "stream"])
def test_images_without_a_caption_are_in_no_batch(cache, monkeypatch, placement):
    owner = np.repeat(np.arange(cache.images), cache.caption_count)
    status = cache.caption_set().status.copy()
    status[np.isin(owner, (0, 3, 4, 19))] = FAILED
    monkeypatch.setattr(CaptionSet, "status", property(lambda self: status))
    batches = stored_batches(cache.image_set(), cache.caption_set(), "train", placement=placement, **FIELDS)
    epoch = list(batches.epoch(unit="image", batch_size=3, seed=0, epoch=0))
    assert len(epoch) == batches.steps("image", 3) == 5  # 16 images, of which the last is alone
    assert all((batch.positives.sum(1) > 0).all() for batch in epoch)
    assert batches.images == 20


def test_some_captions_of_each_image_are_drawn_anew_in_each_epoch(cache):
    batches = stored_batches(cache.image_set(), cache.caption_set(), "train", **FIELDS)
    drawn, times = [], np.zeros(batches.captions)
    for epoch in range(60):
        taken = []
        for batch in batches.epoch(unit="image", batch_size=6, seed=0, epoch=epoch, captions=2):
            assert batch.positives.sum(1).tolist() == [2] * len(batch.images.length)
            index = batch.caption_index
            assert torch.equal(batch.captions.length, torch.as_tensor(batches.caption_set.length[index.numpy()]).long())
            images = batch.positives.int().argmax(0).tolist()
            assert len({*zip(images, batches.caption_image[index], strict=True)}) == len({*images})
            taken += index.tolist()
        assert len(set(taken)) == len(taken) == 40
        drawn.append(frozenset(taken))
        times[taken] += 1
    assert len(set(drawn)) == 60  # ten images have a third caption to leave out
    count = np.bincount(batches.caption_image)[batches.caption_image]
    assert (times[count == 2] == 60).all()
    assert np.allclose(times[count == 3], 40, atol=13)  # each as often as another, up to four deviations


def test_a_share_has_whole_images_in_their_order_and_lies_in_a_larger_one(cache):
    whole = stored_batches(cache.image_set(), cache.caption_set(), "train", **FIELDS)
    before = set()
    for share, count in ((0.01, 1), (0.25, 5), (0.5, 10), (1, 20)):
        some = stored_batches(cache.image_set(), cache.caption_set(), "train", share=share, **FIELDS)
        assert (some.images, len({*some.image_rows.tolist()})) == (count, count)
        assert before <= (before := {*some.image_rows.tolist()})
        kept = np.isin(cache.caption_image[whole.caption_rows], some.image_rows)
        assert some.caption_rows.tolist() == whole.caption_rows[kept].tolist()
        assert some.image_rows[some.caption_image].tolist() == cache.caption_image[some.caption_rows].tolist()
        got = torch.cat([features.global_ for features in some.image_features(4)])
        assert torch.equal(got, torch.from_numpy(cache.image_set().global_(some.image_rows)))
