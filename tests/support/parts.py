"""Small stores in which nothing is missing, and what one machine would have of them."""

import numpy as np
from small_store import make_store, seal_anew

from xret.pipeline.cache.feature_cache import FeatureCache
from xret.pipeline.cache.records import record_failures
from xret.pipeline.cache.storage.store import Store


def sound_store(url, failed=None, **options):
    """Make a store as `make_store` does, with every file an extraction writes; `failed` is {row: reason}."""
    make_store(url, text=options.pop("text", "tokens"), broken=tuple(failed or ()), **options)
    cache = FeatureCache.open(str(url))
    for name in cache.set_names("images"):
        images = cache.image_set(name)
        size = cache.store.open_array(f"{images.path}/size", writable=True)
        size[...] = np.arange(2 * size.shape[0]).reshape(-1, 2)
        seal_anew(images)
        record_failures(images, [], {str(row): reason for row, reason in (failed or {}).items()})
    return str(url)


def part_of(url, *splits, **options):
    """Make a store that has finished only these splits: of the others no shard was ever written."""
    sound_store(url, **options)
    cache = FeatureCache.open(str(url))
    for features in (cache.image_set(), cache.caption_set()):
        for split in set(cache.splits) - set(splits):
            for shard in features.blocks.of_split(split):
                for name in features.attributes["arrays"]:
                    array = cache.store.open_array(f"{features.path}/{name}")
                    cache.store.remove("/".join([array.path, "c", str(shard), *["0"] * (array.ndim - 1)]))
        here = {str(row) for split in splits for row in range(*cache.splits[split])}
        attributes = Store(str(url)).read_group(features.path)
        attributes["failed"] = {key: why for key, why in attributes["failed"].items() if key in here}
        order = cache.store.inspect_group(features.path)[0]["arrays"]
        cache.store.seal_group(features.path, attributes, list(order))
    return str(url)
