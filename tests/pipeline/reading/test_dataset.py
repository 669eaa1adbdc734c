"""A user's loop sees what the store holds: items, padded batches, blocks, worker processes."""

import pickle

import numpy as np
import pytest
import torch
from small_store import make_store
from torch.utils.data import DataLoader

import xret
from xret.pipeline.reading.batches import stored_batches
from xret.pipeline.reading.dataset import FeatureDataset


@pytest.fixture(params=[("roi", "tokens"), ("grid", "words")], ids="-".join)
def store(request, tmp_path):
    image, text = request.param
    return make_store(tmp_path / "s.zarr", train=7, val=4, test=0, image=image, text=text, broken=(1,))


def expected(store, split, caption):
    """Read one pair by the store's own rows; a broken image and its captions do not count."""
    cache = xret.FeatureCache.open(store)
    images, captions = cache.image_set(), cache.caption_set()
    good = [
        row for row in range(*cache.captions_of(*cache.splits[split])) if images.status[cache.caption_image[row]] == 0
    ]
    rows = np.array([good[caption]])
    image = cache.caption_image[rows]
    length = int(images.length[image][0])
    found = {"image_local": images.local(image)[0][:length], "image_global": images.global_(image)[0]}
    if captions.vocabulary is None:
        found |= {"text_local": captions.local(rows), "text_global": captions.global_(rows)[0]}
    return found | {"text_token": captions.token(rows)}


def test_an_item_is_a_caption_with_its_image(store):
    dataset = xret.FeatureDataset(store, "train")
    cache = xret.FeatureCache.open(store)
    assert len(dataset) == int(cache.caption_count[[0, 2, 3, 4, 5, 6]].sum())
    for at in (0, 5, len(dataset) - 1, -1):
        item = dataset[at]
        wanted = expected(store, "train", at)
        assert set(item) == {*wanted, "image_index", "caption_index"}
        for key, value in wanted.items():
            np.testing.assert_array_equal(item[key].numpy(), value.astype(np.float32 if key[-5:] != "token" else int))
    assert dataset.ids[dataset[-1]["image_index"]] == "6"
    assert dataset.texts[dataset[-1]["caption_index"]] == cache.caption_texts(0, cache.captions_of(0, 7)[1])[-1]
    assert sum(1 for _ in dataset) == len(dataset)  # an index beyond the end says so


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_of_a_loader_are_padded(store, workers):
    dataset = FeatureDataset(store, "train")
    loader = DataLoader(
        pickle.loads(pickle.dumps(dataset)), batch_size=5, collate_fn=dataset.collate, num_workers=workers
    )
    seen = []
    for batch in loader:
        rows = batch["text_token"]
        for at, caption in enumerate(batch["caption_index"].tolist()):
            item = dataset[caption]
            length = batch["text_length"][at]
            assert length == len(item["text_token"])
            assert rows[at, :length].equal(item["text_token"])
            assert not rows[at, length:].any()
            assert batch["image_global"][at].equal(item["image_global"])
            assert batch["image_local"][at, : batch["image_length"][at]].equal(item["image_local"])
        seen += batch["caption_index"].tolist()
    assert seen == list(range(len(dataset)))


@pytest.mark.parametrize("unit", ["caption", "image"])
def test_items_that_were_read_together_are_those_that_were_read_alone(store, unit):
    dataset = FeatureDataset(store, "train", unit=unit, dtype=None)
    places = [len(dataset) - 1, 0, 3, 0]
    read, alone = dataset.__getitems__([-1, 0, 3, -len(dataset)]), [dataset[at] for at in places]
    assert (len(read), len(read[1:3])) == (4, 2)
    for item in (len(dataset), -len(dataset) - 1):
        with pytest.raises(IndexError, match=str(item)):
            dataset.__getitems__([0, item])
    batch, padded = dataset.collate(read), dataset.collate(alone)
    assert set(batch) == set(padded)
    for key, values in batch.items():
        assert (values.dtype, values.tolist()) == (padded[key].dtype, padded[key].tolist())
        assert values.dtype in (torch.float16, torch.int64)


def test_a_batch_of_images_has_each_once_and_all_its_captions(store):
    pairs, images = FeatureDataset(store, "train"), FeatureDataset(store, "train", unit="image")
    assert (images.ids, images.texts, len(images)) == (pairs.ids, pairs.texts, 6)
    batch = images.collate(images.__getitems__([5, 2]))
    assert batch["image_index"].tolist() == [5, 2]
    captions = batch["caption_index"].tolist()
    assert captions == [at for image in (5, 2) for at in range(len(pairs)) if pairs[at]["image_index"] == image]
    for at, caption in enumerate(captions):
        pair, image = pairs[caption], int(batch["caption_image"][at])
        assert batch["image_index"][image] == pair["image_index"]
        assert batch["image_local"][image].equal(pair["image_local"])
        assert batch["text_token"][at, : batch["text_length"][at]].equal(pair["text_token"])
    assert [*map(len, images[5]["text_token"])] == batch["text_length"][batch["caption_image"] == 0].tolist()


@pytest.mark.parametrize("unit", ["caption", "image"])
def test_whole_blocks_come_in_the_order_of_a_training_that_streams(store, unit, monkeypatch):
    monkeypatch.setattr("xret.pipeline.reading.split.RUN", 2)
    dataset, cache = FeatureDataset(store, "train", unit=unit), xret.FeatureCache.open(store)
    fields = {"image_fields": {"global"}, "caption_fields": {"token"}}
    streamed = stored_batches(cache.image_set(), cache.caption_set(), "train", placement="stream", **fields)
    sampler = dataset.batch_sampler(4, seed=3)
    loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=dataset.collate)
    for epoch in (0, 1, 5):
        sampler.set_epoch(epoch)
        batches = list(loader)
        expected = list(streamed.epoch(unit=unit, batch_size=4, seed=3, epoch=epoch))
        assert len(batches) == len(expected) == len(sampler)
        for batch, other in zip(batches, expected, strict=True):
            assert batch["caption_index"].tolist() == other.caption_index.tolist()
    assert [*sampler] != [*sampler]
    for size, message in ((1, "no negative"), (0, "at least 2")):
        with pytest.raises(xret.errors.CacheError, match=message):
            dataset.batch_sampler(size)


def test_only_the_fields_that_are_named_are_read(store):
    assert set(FeatureDataset(store, "val", fields=["global"])[0]) >= {"image_global", "image_index"}
    assert "image_local" not in FeatureDataset(store, "val", fields="global")[0]
    with pytest.raises(xret.errors.CacheError, match="cache is 'mem'; give auto, memory or stream"):
        xret.batches(store, cache="mem")
    for make in (xret.FeatureDataset, xret.batches):
        with pytest.raises(xret.errors.CacheError, match="'row'"):
            make(store, "val", fields=["global", "row"])
        with pytest.raises(xret.errors.CacheError, match="test"):
            make(store, "test")
    with pytest.raises(xret.errors.CacheError, match="give caption or image"):
        xret.FeatureDataset(store, "val", unit="pair")


def test_the_fast_path_gives_the_same_features(store):
    dataset, seen = FeatureDataset(store, "train"), []
    for batch in xret.batches(store, "train", device="cpu").epoch(unit="image", batch_size=3, seed=0, epoch=0):
        for at, caption in enumerate(batch.caption_index.tolist()):
            item, image = dataset[caption], int(batch.caption_image[at])
            assert batch.images.global_[image].float().equal(item["image_global"])
            own = item["text_token"]
            assert batch.captions.token[at, : len(own)].equal(own)
            assert batch.positives[:, at].nonzero().flatten().tolist() == [image]
            seen.append(caption)
    assert sorted(seen) == list(range(len(dataset)))
    assert torch.is_tensor(item["image_global"])
