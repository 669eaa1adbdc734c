"""Several feature sets side by side: a batch has of each what that set alone gives, wherever the features lie."""

import pytest
import torch
from small_batches import EPOCHS
from small_store import make_store

from xret.pipeline.errors import CacheError
from xret.pipeline.reading.batches import joined_batches, stored_batches
from xret.pipeline.reading.features import drawn_views
from xret.pipeline.reading.joined_sets import joined, parts_of
from xret.pipeline.store import FeatureCache

BROKEN = (3, 77)
FIELDS = {"image_fields": ({"local"}, {"global", "local"}), "caption_fields": ({"token"}, {"global", "local"})}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    url = tmp_path_factory.mktemp("sets") / "small.zarr"
    return FeatureCache.open(
        make_store(url, train=160, image=("grid", "roi"), text=("words", "longer"), broken=BROKEN, views=(3, 2))
    )


def of(cache, images=("grid", "roi"), captions=("words", "longer")):
    return joined([cache.image_set(name) for name in images]), joined([cache.caption_set(name) for name in captions])


def read(cache, placement="memory", views=(0,), split="train"):
    return stored_batches(*of(cache), split, placement=placement, views=views, **FIELDS)


def test_one_set_is_itself_and_several_keep_their_order(cache):
    alone = cache.image_set("grid")
    assert joined([alone]) is alone
    assert parts_of(alone) == (alone,)
    images, captions = of(cache)
    assert [part.kind for part in parts_of(images)] == ["grid", "roi"]
    assert images.views == 3
    assert captions.vocabulary == cache.caption_set("words").vocabulary


def test_only_samples_that_every_set_has_are_used(cache):
    batches = read(cache)
    usable = [row for row in range(160) if row not in BROKEN]
    assert batches.image_rows.tolist() == usable
    assert batches.skipped == len(BROKEN)
    assert set(cache.caption_image[batches.caption_rows]) == set(usable)


@pytest.mark.parametrize("placement", ["memory", "stream"])
@pytest.mark.parametrize("epoch", EPOCHS)
def test_a_batch_has_of_each_set_what_the_store_has(cache, placement, epoch):
    batches = read(cache, placement, range(3))
    grid, roi = (cache.image_set(name) for name in ("grid", "roi"))
    words, longer = (cache.caption_set(name) for name in ("words", "longer"))
    counts = (3, 2)
    for batch in batches.epoch(**epoch):
        rows = torch.empty(len(batch.images.length), dtype=torch.long)
        rows[batch.caption_image] = torch.from_numpy(batches.caption_image[batch.caption_index])
        draws = (epoch["seed"], epoch["epoch"])
        at = batches.image_rows[rows.numpy()]
        for part, features, views in zip(batch.images.parts, (grid, roi), counts, strict=True):
            view = drawn_views(draws, views, batches.images)[rows.numpy()]
            assert torch.equal(part.local, torch.from_numpy(features.local(at, view)))
        captions = batches.caption_rows[batch.caption_index]
        one, other = batch.captions.parts
        assert (one.local, other.token) == (None, None)
        assert batch.captions.words is one
        assert batch.captions.rows.tolist() == (words.length[captions] + longer.length[captions]).tolist()
        for number, row in enumerate(captions):
            assert one.token[number, : one.length[number]].tolist() == words.token(captions[[number]]).tolist()
            own = torch.from_numpy(longer.local(captions[[number]]))
            assert torch.equal(other.local[number, : other.length[number]], own), row
        assert torch.equal(other.global_, torch.from_numpy(longer.global_(captions)))


def test_views_that_a_set_does_not_have_begin_again(cache):
    (features,) = read(cache, views=(2,), split="val").image_features(100)
    rows = read(cache, split="val").image_rows
    for part, name, view in zip(features.parts, ("grid", "roi"), (2, 0), strict=True):
        assert torch.equal(part.local, torch.from_numpy(cache.image_set(name).local(rows, view)))


def test_data_sets_are_joined_set_by_set(cache, tmp_path):
    kinds = {"image": ("grid", "roi"), "text": ("longer", "tokens"), "views": (3, 2)}
    first = FeatureCache.open(make_store(tmp_path / "a.zarr", train=16, **kinds))
    second = FeatureCache.open(make_store(tmp_path / "b.zarr", train=24, **kinds))
    fields = {"image_fields": {"local"}, "caption_fields": {"local"}}

    def batches(cache, images=("grid", "roi")):
        return stored_batches(*of(cache, images, ("longer", "states")), "train", **fields)

    alone = [batches(first), batches(second)]
    both = joined_batches(alone)
    for side in ("image_features", "caption_features"):
        (whole,), parts = getattr(both, side)(1000), [next(getattr(one, side)(1000)) for one in alone]
        for place, part in enumerate(whole.parts):
            owns = [own.parts[place] for own in parts]
            rows = [own.local[row, :length] for own in owns for row, length in enumerate(own.length)]
            assert len(part.length) == len(rows)
            for sample, own in enumerate(rows):
                assert torch.equal(part.local[sample, : part.length[sample]], own)
    with pytest.raises(CacheError, match="of another encoder"):
        joined_batches([alone[0], batches(second, ("roi", "grid"))])
