"""Batches of a small store, read in every way, and what they should be."""

from dataclasses import fields, is_dataclass

import numpy as np
import torch
from small_store import make_store

from xret.pipeline.reading.batches import stored_batches
from xret.pipeline.reading.features import Features
from xret.pipeline.store import FeatureCache

ALL = {"image_fields": {"local", "global"}, "caption_fields": {"local", "global", "token"}}
EPOCHS = [
    {"unit": "image", "batch_size": 25, "seed": 3, "epoch": 1},
    {"unit": "image", "batch_size": 25, "seed": 3, "epoch": 1, "captions": 2},
    {"unit": "caption", "batch_size": 32, "seed": 4, "epoch": 0},
]


def large(folder):
    """Open a new store of twenty chunks of train, of eight images each; four images are broken."""
    return FeatureCache.open(make_store(folder / "s.zarr", train=160, text="tokens", broken=(0, 8, 77, 159)))


def as_remote(cache):
    """Open the same store again, read as one on an object store is."""
    opened = FeatureCache.open(cache.url)
    opened.folder.is_local = False
    return opened


def batches_of(cache, placement, wanted=ALL, split="train", device="cpu"):
    sets = cache.image_set(), cache.caption_set()
    return stored_batches(*sets, split, placement=placement, device=device, **wanted)


def assert_equal(one, other):
    """Compare dataclasses and tuples of tensors, which may lie on different devices."""
    if is_dataclass(one):
        for field in fields(one):
            assert_equal(getattr(one, field.name), getattr(other, field.name))
    elif isinstance(one, tuple):
        for pair in zip(one, other, strict=True):
            assert_equal(*pair)
    elif not isinstance(one, torch.Tensor):
        assert one == other
    else:
        assert one.dtype == other.dtype
        assert torch.equal(one.cpu(), other.cpu())


def rows_of(cache, batch, batches):
    """Read a batch's features from the set itself, sample by sample, and pad them by hand."""
    image = batches.image_rows[batches.caption_image[batch.caption_index]]
    rows = np.empty(len(batch.images.length), dtype=np.int64)
    rows[batch.caption_image] = image
    captions = batches.caption_rows[batch.caption_index]
    images, texts = cache.image_set(), cache.caption_set()

    def padded(read):
        longest = int(texts.length[captions].max())
        each = [read(np.array([row])) for row in captions]
        width = [(0, 0)] * (each[0].ndim - 1)
        return torch.from_numpy(np.stack([np.pad(rows, [(0, longest - len(rows)), *width]) for rows in each]))

    return (
        Features(
            torch.from_numpy(images.length[rows].astype(np.int64)),
            torch.from_numpy(images.local(rows)),
            torch.from_numpy(images.global_(rows)),
            grid=images.grid,
        ),
        Features(
            torch.from_numpy(texts.length[captions].astype(np.int64)),
            padded(texts.local),
            torch.from_numpy(texts.global_(captions)),
            padded(texts.token).long(),
        ),
    )
