"""Which view of an image a batch has: one is drawn every epoch, the same wherever the features lie."""

import numpy as np
import pytest
import torch
from small_batches import ALL, EPOCHS, as_remote
from small_store import make_store

from xret.pipeline.errors import CacheError
from xret.pipeline.reading.batches import joined_batches, stored_batches
from xret.pipeline.reading.features import concatenate, drawn_views
from xret.pipeline.reading.placement import Resident
from xret.pipeline.store import FeatureCache

VIEWS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("views")


@pytest.fixture(scope="module")
def cache(folder):
    return FeatureCache.open(make_store(folder / "s.zarr", train=160, text="tokens", broken=(0, 77), views=VIEWS))


def batches_of(cache, placement="memory", views=range(VIEWS), split="train", **how):
    sets = cache.image_set(), cache.caption_set()
    return stored_batches(*sets, split, placement=placement, views=views, **ALL, **how)


def images_of(batches, batch):
    """Return which images of the split a batch has."""
    images = np.empty(len(batch.images.length), dtype=np.int64)
    images[batch.caption_image] = batches.caption_image[batch.caption_index]
    return images


@pytest.mark.parametrize("placement", ["memory", "stream"])
@pytest.mark.parametrize("words", EPOCHS)
def test_the_view_follows_from_seed_epoch_and_image(cache, placement, words):
    batches, images = batches_of(cache, placement), cache.image_set()
    drawn = drawn_views((words["seed"], words["epoch"]), VIEWS, batches.images)
    seen = []
    for batch in batches.epoch(**words):
        own = images_of(batches, batch)
        rows = batches.image_rows[own]
        assert torch.equal(batch.images.local, torch.from_numpy(images.local(rows, drawn[own])))
        assert torch.equal(batch.images.global_, torch.from_numpy(images.global_(rows, drawn[own])))
        assert (batch.images.length == 4).all()
        seen += drawn[own].tolist()
    assert set(seen) == set(range(VIEWS))


def test_all_views_of_each_image_come_over_epochs():
    drawn = np.stack([drawn_views((3, epoch), VIEWS, 500) for epoch in range(200)])
    share = np.stack([(drawn == view).mean(0) for view in range(VIEWS)])
    assert (share > 0.15).all()
    assert np.abs(share.mean(1) - 1 / VIEWS).max() < 0.01
    together = (drawn[:-1] == drawn[1:]).mean()
    assert together == pytest.approx(1 / VIEWS, abs=0.01)  # an epoch says nothing of the next one
    assert not np.array_equal(drawn[0], drawn_views((4, 0), VIEWS, 500))


@pytest.mark.parametrize("placement", ["memory", "stream"])
def test_what_is_read_in_order_is_the_first_view_or_the_one_that_was_asked_for(cache, placement):
    images = cache.image_set()
    for views, expected in ((range(VIEWS), 0), ((0,), 0), ((2,), 2)):
        batches = batches_of(cache, placement, views, split="val")
        got = concatenate(list(batches.image_features(5)))
        assert torch.equal(got.local, torch.from_numpy(images.local(batches.image_rows, expected)))
        assert torch.equal(got.global_, torch.from_numpy(images.global_(batches.image_rows, expected)))


def test_views_in_memory_are_counted_and_not_taken_for_those_of_others(cache):
    resident, remote = Resident(), as_remote(cache)
    sizes = []
    for views in ((0,), range(VIEWS), (1,)):
        batches = batches_of(remote, "memory", views, resident=resident)
        sizes.append(batches.image_source.columns["local"].table.numel())
        got = concatenate(list(batches.image_features(50)))
        assert torch.equal(got.local, torch.from_numpy(cache.image_set().local(batches.image_rows, views[0])))
    assert sizes == [sizes[0], VIEWS * sizes[0], sizes[0]]


def test_joined_data_sets_draw_each_their_own(cache, folder):
    other = FeatureCache.open(make_store(folder / "other.zarr", train=40, val=0, test=0, text="tokens", views=VIEWS))
    both = joined_batches([batches_of(cache), batches_of(other)])
    count = batches_of(cache).images
    for batch in both.epoch(unit="image", batch_size=50, seed=1, epoch=2):
        own = images_of(both, batch)
        for store, mine, first in ((cache, own < count, 0), (other, own >= count, count)):
            part = batches_of(store)
            items = own[mine] - first
            view = drawn_views((1, 2), VIEWS, part.images)[items]
            expected = store.image_set().local(part.image_rows[items], view)
            assert torch.equal(batch.images.local[mine], torch.from_numpy(expected))
    single = FeatureCache.open(make_store(folder / "single.zarr", train=40, val=0, test=0, text="tokens"))
    with pytest.raises(CacheError, match="another encoder"):
        joined_batches([batches_of(cache), batches_of(single, views=(0,))])
