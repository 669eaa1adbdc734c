"""What is told of a store: sizes, compression and completeness, against hand counts."""

import numpy as np
import pytest
import zarr
from parts import part_of, sound_store
from zarr.codecs import Crc32cCodec, ZstdCodec

from xret.pipeline.cache.feature_cache import FeatureCache
from xret.pipeline.cache.upkeep.contents import describe, stores_at
from xret.pipeline.errors import CacheError


def test_sizes_and_values(tmp_path):
    url = sound_store(tmp_path / "s", failed={3: "3.jpg: empty"}, train=12, val=3, test=3)
    facts = describe(url)
    assert facts.store == url
    assert facts.bytes == sum(p.stat().st_size for p in (tmp_path / "s").rglob("*") if p.is_file())
    images, captions = facts.sets
    size = sum(p.stat().st_size for p in (tmp_path / "s" / "images" / images.name).rglob("*") if p.is_file())
    assert (images.bytes, images.shape, images.codec, images.failed) == (size, (4, 16), "none", 1)
    assert images.raw_bytes_per_value == 2
    # 4 shards of 8 images hold 18, one of which failed; of each 4 x 16 local and 16 global values
    assert images.bytes_per_value == size / (32 * (4 * 16 + 16))
    assert images.padding == 1 - 17 / 32
    there = FeatureCache.open(url).caption_set()
    length, sizes = there.length, [there.attributes[key] for key in ("shard_tokens", "shard_captions")]
    assert captions.bytes_per_value == captions.bytes / (4 * sum(sizes) * 12)
    assert captions.padding == 1 - (length.sum() + len(length)) / (4 * sum(sizes))
    assert images.percent == captions.percent == 100


def test_token_ids_alone(tmp_path):
    facts = describe(sound_store(tmp_path / "s", text="words", train=8, val=0, test=0)).sets[1]
    there = FeatureCache.open(str(tmp_path / "s")).caption_set()
    stored = there.attributes["shard_tokens"]
    assert facts.shape == ()
    assert facts.raw_bytes_per_value == 4
    assert facts.bytes_per_value == facts.bytes / stored
    assert facts.padding == 1 - there.length.sum() / stored


def test_a_part(tmp_path):
    facts = describe(part_of(tmp_path / "s", "val", "test", train=12, val=4, test=4)).sets[0]
    assert facts.done == {"train": (0, 2), "val": (1, 1), "test": (1, 1)}
    assert facts.percent == 40
    empty = describe(part_of(tmp_path / "none", train=12, val=4, test=4)).sets[0]
    assert (empty.percent, empty.bytes_per_value, empty.padding) == (0, None, None)


def test_padding_does_not_count_as_bytes_of_a_value(tmp_path):
    whole = describe(sound_store(tmp_path / "a", train=32, val=0, test=0)).sets[0]
    padded = describe(sound_store(tmp_path / "b", train=25, val=0, test=0)).sets[0]
    assert whole.bytes == padded.bytes
    assert whole.bytes_per_value == padded.bytes_per_value
    assert (whole.padding, padded.padding) == (0, 7 / 32)


def test_a_compressed_set_says_how(tmp_path):
    url = sound_store(tmp_path / "s", train=8, val=0, test=0)
    features = FeatureCache.open(url).image_set()
    old = features.local(np.arange(8))
    codecs = [ZstdCodec(level=1), Crc32cCodec()]
    path = f"{features.path}/local"
    array = zarr.create_array(
        url, name=path, shape=old.shape, chunks=(4, 4, 16), shards=(8, 4, 16), dtype=old.dtype, compressors=codecs,
        overwrite=True,
    )  # fmt: skip
    array[...] = old
    features.cache.store.seal_group(features.path, features.attributes, list(features.attributes["arrays"]))
    assert describe(url).sets[0].codec == "zstd"


def test_the_stores_of_a_folder(tmp_path):
    for name in ("b.zarr", "a.zarr"):
        sound_store(tmp_path / "all" / name, train=8, val=0, test=0)
    (tmp_path / "all" / "pictures").mkdir()
    (tmp_path / "all" / "notes.txt").write_text("mine")
    folder = str(tmp_path / "all")
    assert stores_at(folder) == stores_at(folder + "/") == [f"{folder}/a.zarr", f"{folder}/b.zarr"]
    assert stores_at(f"{folder}/a.zarr") == [f"{folder}/a.zarr"]
    for place in (f"{folder}/pictures", f"{folder}/none", f"{folder}/notes.txt"):
        with pytest.raises(CacheError, match="neither a feature cache nor a folder that holds one"):
            stores_at(place)
