"""The features that a run needs, found in its own store or in another one."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch

from ...pipeline.data.samples import tokenize
from ...pipeline.device import pick_device
from ...pipeline.errors import CacheError, RunError, StoreError
from ...pipeline.reading.batches import Batches, stored_batches
from ...pipeline.reading.dataset import Field, fields_there
from ...pipeline.reading.joined_sets import Captions, Images, joined
from ...pipeline.store import OK, CaptionSet, FeatureCache, ImageSet
from ..model import Model
from ..recipes.blocks import Recipe
from .info import BranchName, RunInfo
from .run import Run

Sets = tuple[Images, Captions]
_log = logging.getLogger("xret")
S = TypeVar("S", ImageSet, CaptionSet)


def sets_named(
    cache: FeatureCache,
    image: str | list[str],
    text: str | list[str],
    keys: tuple[str, str] = ("--set data.image", "--set data.text"),
) -> Sets:
    """Return the feature sets of `cache` with these names, or prefixes of them, of each side one or several.

    CacheError where none or several fit a name, or two names mean one set; the message has the `keys` that name them.
    """
    images, captions = _named(cache.image_set, image, keys[0]), _named(cache.caption_set, text, keys[1])
    return joined(images), joined(captions)


def _named(find: Callable[[str, str], S], names: str | list[str], key: str) -> list[S]:
    found = {one.name: one for one in (find(name, key) for name in ([names] if isinstance(names, str) else names))}
    if isinstance(names, list) and len(found) < len(names):
        raise CacheError(f"{key}={', '.join(names)} names a feature set twice ({', '.join(found)}); leave one out")
    return list(found.values())


def open_store(run: Run, store: str | Path | None) -> FeatureCache:
    """Open the feature cache at `store`, or, where that is None, the one that `run` was trained on.

    A warning says where it holds other samples than those of the training. CacheError where `store` cannot be used,
    RunError where the run's own cannot.
    """
    if store is not None:
        return FeatureCache.open(store)
    try:
        cache = FeatureCache.open(run.info.store)
    except (CacheError, StoreError) as error:
        raise RunError(
            f"the store of {run.path} is not there or not usable ({error}); name where it is now with --store"
        ) from error
    if cache.manifest_sha256 != run.info.manifest_sha256:
        _log.warning("%s holds other samples than those that %s was trained on", cache.url, run.path)
    return cache


def batches_of(sets: Sets, model: Model, split: str | Sequence[str], device: torch.device, **how: Any) -> Batches:
    """Return a split, or several, with what `model` reads of it; `how` and errors as of `stored_batches`."""
    fields: dict[str, Any] = {"image_fields": model.image_fields, "caption_fields": model.caption_fields}
    images, captions = sets
    return stored_batches(images, captions, split, device=device, **fields, **how)


def batches(
    store: str | Path,
    split: str = "train",
    *,
    image: str | list[str] = "auto",
    text: str | list[str] = "auto",
    fields: Field | Sequence[Field] | None = None,
    device: str = "auto",
    cache: Literal["auto", "memory", "stream"] = "auto",
) -> Batches:
    """Read a split in batches as training does: gathered beside the computation, on the device.

        data = xret.batches("holiday.zarr")
        for batch in data.epoch(unit="image", batch_size=128, seed=0, epoch=epoch):
            batch.images.local, batch.images.length, batch.captions.global_, batch.positives

    `Batches.epoch` has the arguments, `Batch` and `Features` the shapes. Features come in the dtype of the store, rows
    padded with zeros. `FeatureDataset` reads the same for a DataLoader.

    Args:
        store: the feature store.
        split: one of its splits.
        image, text: prefix of a feature set's name, or several of them; ``auto``: the only one there.
        fields: what to read, of ``local``, ``global`` and ``token``; None: all there is.
        device: ``auto``, ``cpu`` or ``cuda``.
        cache: where the features lie: in ``memory``, or in the store (``stream``); ``auto``: as they fit.

    Raises:
        CacheError: the store, a set or a field is missing, or the split is missing, incomplete or empty.
        RunError: memory does not suffice.
    """
    if cache not in ("auto", "memory", "stream"):
        raise CacheError(f"cache is '{cache}'; give auto, memory or stream")
    images, captions = sets_named(FeatureCache.open(store), image, text, ("image", "text"))
    of_images, of_captions = fields_there(images, captions, fields)
    how: dict[str, Any] = {"image_fields": of_images, "caption_fields": of_captions, "placement": cache}
    return stored_batches(images, captions, split, device=pick_device(device), **how)


def views_to_draw(image_set: Images, recipe: Recipe) -> Sequence[int]:
    """Return the views of an image that a training by `recipe` draws from."""
    return range(image_set.views) if recipe.data.views == "draw" else (0,)


def sets_of_run(run: Run, cache: FeatureCache) -> Sets:
    """Return the feature sets of `cache` that `run` was trained on, or equal ones; RunError if there are none."""
    return equal_sets(run.info, cache, str(run.path))


def equal_sets(info: RunInfo, cache: FeatureCache, source: str) -> Sets:
    """Return the feature sets of `cache` that are equal to those in `info`; its vocabulary reads any captions.

    RunError where there are none; `source` names the run or store that has them.
    """
    images = [cache.image_set(name) for name in cache.set_names("images")]
    captions = [cache.caption_set(name) for name in cache.set_names("captions")]
    known = [one.fingerprint for one in captions]
    for origin in info.text:
        if origin.kind == "words" and info.vocabulary is not None and origin.fingerprint not in known:
            captions.append(RetokenizedCaptions(cache, info.vocabulary, origin.fingerprint))
    return joined(_equal(info, "image", images, cache, source)), joined(_equal(info, "text", captions, cache, source))


def _equal(info: RunInfo, branch: BranchName, there: Sequence[S], cache: FeatureCache, source: str) -> list[S]:
    found = []
    for origin in info.origins(branch):
        # What a checkpoint in another folder made has another name.
        equal = [one for one in there if one.fingerprint == origin.fingerprint]
        if not equal:
            names = ", ".join(one.name for one in there) or "none"
            way = f"`xret extract … --encoder {source}`" if info.tuned(branch) else f"the options of {source}"
            raise RunError(
                f"{cache.url} has no {branch} features equal to '{origin.name}' (it has {names}); extract it there with"
                f" {way}"
            )
        found.append(next((one for one in equal if one.name == origin.name), equal[0]))
    return found


class RetokenizedCaptions(CaptionSet):
    """The captions of any store as word ids of a run's vocabulary; for a head that was trained on another store.

    The first word stands for all unknown ones; `fingerprint` is that of the run's set of words.
    """

    def __init__(self, cache: FeatureCache, vocabulary: tuple[str, ...], fingerprint: str = "") -> None:
        self.cache, self.vocabulary, self.fingerprint = cache, vocabulary, fingerprint
        self.name, self.kind = "words of the run", "words"
        self.channels = self.global_channels = None
        self.chunk_rows = max(1, cache.captions)
        number = {word: position for position, word in enumerate(vocabulary)}
        texts = cache.caption_texts(0, cache.captions)
        ids = [[number.get(word, 0) for word in tokenize(text)] or [0] for text in texts]
        self.length = np.array([len(caption) for caption in ids], dtype=np.int32)
        self.status = np.full(len(ids), OK, dtype=np.uint8)
        self._start = np.cumsum(self.length, dtype=np.int64) - self.length
        self._ids = np.array([word for caption in ids for word in caption], dtype=np.int32)

    def token(self, rows: np.ndarray) -> np.ndarray:
        """Return the token ids of these caption rows, packed int32 [sum of lengths]."""
        return np.concatenate([self._ids[a : a + n] for a, n in zip(self._start[rows], self.length[rows], strict=True)])
