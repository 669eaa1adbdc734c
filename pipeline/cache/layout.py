"""Creating caches and feature sets: every array at its full shape, before anything is computed."""

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..data.digests import BYTES
from ..data.manifest import SPLITS
from ..data.regions import REGION_ARRAYS
from ..data.samples import Samples
from ..data.sources import FOLDER
from ..errors import CacheError, OutputError
from ..files import partials_in, remove, require_writable
from ..wording import printable
from .blocks import Blocks
from .facts import SetFacts
from .feature_cache import FORMAT, VERSION, FeatureCache
from .feature_sets import NOT_DONE, CaptionSet, ImageSet
from .rules import require_root
from .storage.folder import home_of
from .storage.generations import begin, require_generation, require_later, store_of
from .storage.lease import alone
from .storage.store import Store

DEFAULT_SPLITS = ("train", "val", "test")
TEXTS = ("id", "file_name", "caption")  # arrays of the samples that are UTF-8 bytes
_BLOCK, _TOKEN_BLOCK = 8, 1024  # images and tokens in a checked block of a shard


def choose_splits(samples: Samples, wanted: tuple[str, ...]) -> list[str]:
    """Return those of `wanted` that the data set has, in row order.

    Raises:
        CacheError: the data set lacks one of them, or in case of the default all.
    """
    unknown = [split for split in wanted if split not in samples.splits]
    if unknown and (wanted != DEFAULT_SPLITS or len(unknown) == len(wanted)):
        there = ", ".join(samples.splits)
        mapped = ", or map their own names in the manifest with merge_splits" if "other" in samples.splits else ""
        raise CacheError(
            f"'{samples.dataset}' has no image in split {', '.join(unknown)}; it has {there}: choose with"
            f" --splits{mapped}"
        )
    return [split for split in samples.splits if split in wanted]


@contextmanager
def open_for_writing(
    url: str, samples: Samples, protocols: Iterable[str], *, repair: bool = False, is_new: bool = False
) -> Iterator[FeatureCache]:
    """Open the cache of these samples at `url`, or make one without feature sets; nobody else writes meanwhile.

    Args:
        url: of the cache, or of a generation of it.
        samples: its samples.
        protocols: what ``--protocol auto`` evaluates.
        repair: write its samples anew.
        is_new: an update makes the generation that `url` names, which is to become the current one.

    Raises:
        CacheError: something else is there, a generation that is named is not, or another process is writing, or has
            made a later generation.
    """
    home = Store(home_of(url)[0])
    with alone(home):
        store = store_of(url, home.writer)
        if is_new:
            require_later(store)
        else:
            require_generation(url)
        if store.url != home.url:
            begin(store)
        yield _open_or_create(store, samples, list(protocols), repair)


def find_cache(url: str, samples: Samples) -> FeatureCache | None:
    """Return the cache of these samples at `url`; None where there is none, or one that was never finished.

    Raises:
        CacheError: something else is there, or it is damaged.
    """
    store = store_of(url)
    if not store.was_finished():
        return None
    cache = FeatureCache.open(url)
    return cache if cache.manifest_sha256 == samples.digest else None


def require_place(url: str, samples: Samples, *, is_new: bool = False, updates: bool = True) -> None:
    """Refuse, before anything is computed, a place where the cache of these samples cannot be; as `open_for_writing`.

    `updates`: whether an update may bring them in, for which they need a manifest.

    Raises:
        OutputError: nothing can be written there.
        CacheError: something else is there, or a generation that is named is not.
    """
    if not is_new:
        require_generation(url)
    store = store_of(url)
    if store.is_local:
        root = Path(store.root)
        if root.exists() and not root.is_dir():
            raise OutputError(f"{url} is a file, and a store is a folder; choose another store")
        require_writable(root, "store")
    _is_there(store, samples, updates=updates)


def _is_there(store: Store, samples: Samples, *, updates: bool = True) -> bool:
    """Return whether a store is a cache of these samples; refuse one that is something else."""
    if not store.exists("zarr.json"):
        if store.names(""):
            raise CacheError(f"{store.url} is not empty and holds no feature cache; choose another store")
        return False
    root, damage = store.inspect_group("")
    if damage or (root.get("format"), root.get("version")) != (FORMAT, VERSION):
        return False
    require_root(store.url, root)
    if root["manifest_sha256"] != samples.digest:
        update = ", or let `xret extract … --update` take these into this one" if updates else ""
        raise CacheError(
            f"{store.url} holds other samples: data set '{root['dataset']}', manifest {root['manifest_sha256'][:8]},"
            f" not '{samples.dataset}', {samples.digest[:8]}; choose another store{update}"
        )
    return True


def _open_or_create(store: Store, samples: Samples, protocols: list[str], repair: bool) -> FeatureCache:
    if _is_there(store, samples):
        if repair or store.is_unfinished("samples"):
            _write_samples(store, samples)
    elif not store.exists("zarr.json") or store.is_unfinished(""):
        _create(store, samples, protocols)
    cache = FeatureCache.open(store.url, store.writer, home_of(store.url)[1] or 1)
    if store.is_local:  # what a killed writer left is never read
        for partial in partials_in(Path(home_of(store.root)[0])):
            remove(partial)
    return cache


def _create(store: Store, samples: Samples, protocols: list[str]) -> None:
    root = {
        "format": FORMAT,
        "version": VERSION,
        "dataset": samples.dataset,
        "manifest_sha256": samples.digest,
        "splits": {name: list(rows) for name, rows in samples.splits.items()},
        "protocols": protocols,
    }
    store.start_group("")
    _write_samples(store, samples)
    store.seal_group("", root, [])


def _write_samples(store: Store, samples: Samples) -> None:
    captions = [caption for image in samples.images for caption in image.captions]
    counts = np.array([len(image.captions) for image in samples.images], dtype=np.int32)
    texts: dict[str, list[str]] = {
        "id": [image.id for image in samples.images],
        "file_name": [image.file_name for image in samples.images],
        "caption": [caption.text for caption in captions],
    }
    numbers: dict[str, np.ndarray] = {
        "split": np.array([SPLITS.index(image.split) for image in samples.images], dtype=np.uint8),
        "cocoid": np.array([image.cocoid for image in samples.images], dtype=np.int64),
        "sentid": np.array([caption.sentid for caption in captions], dtype=np.int64),
        "caption_start": np.cumsum(counts, dtype=np.int64) - counts,
        "caption_count": counts,
        "caption_image": np.repeat(np.arange(len(counts), dtype=np.int64), counts),
    }
    if samples.source != FOLDER:
        numbers["place"] = np.array([image.place for image in samples.images], dtype=np.int64)
    store.start_group("samples")
    seals = {name: store.write_array(f"samples/{name}", values) for name, values in numbers.items()}
    for name, strings in texts.items():
        encoded = [text.encode() for text in strings]
        offsets = np.cumsum([0] + [len(text) for text in encoded], dtype=np.int64)
        seals[name] = store.write_array(f"samples/{name}", np.frombuffer(b"".join(encoded), dtype=np.uint8))
        seals[f"{name}_offset"] = store.write_array(f"samples/{name}_offset", offsets)
    attributes: dict[str, Any] = {"seals": seals}
    if samples.source != FOLDER:
        attributes["source"] = samples.source.to_json()
    if samples.left_out:
        attributes["left_out"] = list(samples.left_out)
    store.seal_group("samples", attributes, list(seals))
    for modality in ("images", "captions"):
        store.seal_group(modality, {}, [])


def find_set(cache: FeatureCache, path: str) -> ImageSet | CaptionSet | None:
    """Return the set at ``images/NAME`` or ``captions/NAME``, or None; one that was never finished is removed.

    Raises:
        CacheError: the set's metadata is damaged or missing.
    """
    if not cache.store.exists(path):
        return None
    if cache.store.is_unfinished(path) or not cache.store.names(path):
        cache.store.remove(path)
        return None
    return cache.set_at(path)


def image_set_to_fill(
    cache: FeatureCache,
    facts: SetFacts,
    rows: int,
    shard_images: int | None = None,
    extras: tuple[str, ...] = (),
    views: int = 1,
    digests: bool = False,
) -> ImageSet:
    """Return the image set of these facts, or make it with shards of `shard_images`; see `create_image_set`."""
    if not _is_begun(cache, "images", facts, shard_images):
        blocks = Blocks.choose(cache.splits, shard_images, views)
        create_image_set(cache, facts, rows, blocks, extras, views, digests)
    return cache.image_set(facts.name)


def caption_set_to_fill(
    cache: FeatureCache,
    facts: SetFacts,
    shard_images: int | None,
    count: Callable[[Blocks], tuple[list[int], dict[str, Any]]],
) -> CaptionSet:
    """Return the caption set of these facts, or make it with the captions of `shard_images` in a shard.

    `count` gives the last two arguments of `create_caption_set`; it is called for a new set only.
    """
    if not _is_begun(cache, "captions", facts, shard_images):
        blocks = Blocks.choose(cache.splits, shard_images)
        create_caption_set(cache, facts, blocks, *count(blocks))
    return cache.caption_set(facts.name)


def _is_begun(cache: FeatureCache, modality: str, facts: SetFacts, shard_images: int | None) -> bool:
    """Return whether there is a set of these facts, and note how it differs in what does not decide its features."""
    features = find_set(cache, f"{modality}/{facts.name}")
    if features is None:
        return False
    length = features.blocks.length
    before = {**features.attributes["recorded"], "shard_images": length}
    now = {**facts.recorded, "shard_images": shard_images or length}
    changed = [f"{key} {before.get(key)} (now {value})" for key, value in now.items() if before.get(key) != value]
    if changed:
        print(printable(f"Note: '{features.name}' was begun with {', '.join(changed)}."), file=sys.stderr)
    return True


def create_image_set(
    cache: FeatureCache,
    facts: SetFacts,
    rows: int,
    blocks: Blocks,
    extras: tuple[str, ...] = (),
    views: int = 1,
    digests: bool = False,
) -> None:
    """Create an empty image set of `rows` local rows an image; `extras` are names in `REGION_ARRAYS`.

    Local and global features of several views have an axis of views after that of the images. Without channels there
    are no local features. With `digests` it says of which files its features are.
    """
    shard, dtype = blocks.length, facts.dtype
    axis, apart = ((views,), True) if views > 1 else ((), False)
    local, global_ = (*axis, rows, facts.channels or 0), (*axis, facts.global_channels or 0)
    arrays = {"local": _Array(local, dtype, shard, math.gcd(shard, _BLOCK), fill=np.nan, apart=apart)}
    if facts.channels is None:
        arrays = {}
    arrays |= {
        "global": _Array(global_, dtype, shard, fill=np.nan, apart=apart),
        "length": _Array((), "int32", shard),
        "size": _Array((2,), "int32", shard),
        "status": _Array((), "uint8", shard, fill=NOT_DONE),
    }
    if digests:
        arrays["digest"] = _Array((BYTES,), "uint8", shard)
    for name in extras:
        shape, kind, fill = REGION_ARRAYS[name]
        arrays[name] = _Array((rows, *shape), kind, shard, fill=fill)
    attributes = {**facts.attributes(blocks), "rows": rows, **({"views": views} if views > 1 else {})}
    _create_set(cache, f"images/{facts.name}", attributes, arrays, blocks)


def create_caption_set(
    cache: FeatureCache, facts: SetFacts, blocks: Blocks, tokens: list[int], extra: dict[str, Any]
) -> None:
    """Create an empty caption set.

    Args:
        cache: where.
        facts: what is known of the set.
        blocks: the images of each shard, whose captions it holds.
        tokens: how many tokens each shard holds; empty: there are global features alone.
        extra: further attributes: the vocabulary, counts for the summary.
    """
    shard = max(int(cache.caption_count[slice(*blocks.images(number))].sum()) for number in range(len(blocks)))
    most = max(tokens, default=0)
    inner = min(_TOKEN_BLOCK, -(-most // 8) * 8)
    token_shard = -(-most // inner) * inner if tokens else 0
    arrays = {
        "start": _Array((), "int64", shard),
        "length": _Array((), "int32", shard),
        "status": _Array((), "uint8", shard, fill=NOT_DONE),
        "token": _Array((), "int32", token_shard, inner),
    }
    if not tokens:
        del arrays["start"], arrays["token"]
    if facts.channels is not None:
        arrays["local"] = _Array((facts.channels,), facts.dtype, token_shard, inner, fill=np.nan)
    if facts.global_channels is not None:
        arrays["global"] = _Array((facts.global_channels,), facts.dtype, shard, fill=np.nan)
    attributes = {**facts.attributes(blocks), "shard_captions": shard, "shard_tokens": token_shard, **extra}
    _create_set(cache, f"captions/{facts.name}", attributes, arrays, blocks)


class _Array(NamedTuple):
    """An array of a set; the arguments of `Store.create_array`, of which `row` is the shape without the first axis."""

    row: tuple[int, ...]
    dtype: str
    shard: int
    inner: int | None = None
    fill: float = 0
    apart: bool = False


def _create_set(
    cache: FeatureCache, path: str, attributes: dict[str, Any], arrays: dict[str, _Array], blocks: Blocks
) -> None:
    files = sum(array.row[0] if array.apart else 1 for array in arrays.values())
    every = arrays | {"seal": _Array((files,), "uint32", 1), "done": _Array((), "uint8", 1)}
    cache.store.start_group(path)
    for name, array in every.items():
        row, dtype, shard, inner, fill, apart = array
        shape = (len(blocks) * shard, *row)
        cache.store.create_array(f"{path}/{name}", shape, shard, dtype, inner=inner, fill=fill, apart=apart)
    cache.store.seal_group(path, attributes, list(every))
