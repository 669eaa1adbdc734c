"""The features that a run needs, found in its own store or in another one."""

from collections.abc import Sequence

import numpy as np
import torch

from ...pipeline.cache import OK, Blocks, CaptionSet, FeatureCache, ImageSet
from ...pipeline.data.samples import tokenize
from ...pipeline.errors import CacheError, RunError
from ...pipeline.reading.batches import Batches, stored_batches
from ...pipeline.reading.placement import Placement, Resident
from ..model import Model
from ..recipes.blocks import Recipe
from .run import Run

Sets = tuple[ImageSet, CaptionSet]


def open_store(run: Run, store: str | None) -> FeatureCache:
    """Open the feature cache at `store`, or, where that is None, the one that `run` was trained on.

    Raises:
        CacheError: there is none at `store`, or it cannot be used.
        RunError: there is none where the run's own was, or it cannot be used.
    """
    try:
        return FeatureCache.open(store or run.info.store)
    except CacheError as error:
        if store is not None:
            raise
        raise RunError(
            f"the store of {run.path} is not there or not usable ({error}); name where it is now with --store"
        ) from error


def split_of_run(
    run: Run, cache: FeatureCache, split: str, model: Model, device: torch.device, view: int = 0
) -> Batches:
    """Return a split of `cache`, read from the feature sets that `run` was trained on, or from equal ones.

    Images come in the `view` of that number.

    Raises:
        RunError: the store holds no equal sets.
        CacheError: the split is unknown, empty or not complete.
    """
    sets = image_set_of_run(run, cache), caption_set_of_run(run, cache)
    return batches_of(sets, model, split, device, views=(view,))


def batches_of(
    sets: Sets,
    model: Model,
    split: str,
    device: torch.device,
    placement: Placement = "mapped",
    resident: Resident | None = None,
    views: Sequence[int] = (0,),
) -> Batches:
    """Return a split with what `model` reads of it; arguments and errors as of `stored_batches`."""
    return stored_batches(
        *sets,
        split,
        device=device,
        image_fields=model.image_fields,
        caption_fields=model.caption_fields,
        placement=placement,
        resident=resident,
        views=views,
    )


def views_to_draw(image_set: ImageSet, recipe: Recipe) -> Sequence[int]:
    """Return the views of an image that a training by `recipe` draws from."""
    return range(image_set.views) if recipe.data.views == "draw" else (0,)


def require_views(image_set: ImageSet) -> None:
    """Raise RunError where a set has a single view of each image, over which no mean can be taken."""
    if image_set.views == 1:
        raise RunError(
            f"'{image_set.name}' in {image_set.cache.url} has one view of each image, so that there is no mean over"
            " views; leave --views out, or train on features of `xret extract --views`"
        )


def image_set_of_run(run: Run, cache: FeatureCache) -> ImageSet:
    """Return the image features of `cache` that `run` was trained on, or equal ones; RunError if there are none."""
    name = run.info.image_set
    for candidate in _candidates(cache, "images", name):
        found = cache.image_set(candidate)
        if found.fingerprint == run.info.fingerprints["image"]:
            return found
    raise _refusal(run, cache, "images", name)


def caption_set_of_run(run: Run, cache: FeatureCache) -> CaptionSet:
    """Return the caption features of `cache` that `run` was trained on, or equal ones; RunError if there are none.

    Where the run knows words it has a vocabulary, and reads those of any store.
    """
    name = run.info.text_set
    for candidate in _candidates(cache, "captions", name):
        found = cache.caption_set(candidate)
        if found.fingerprint == run.info.fingerprints["text"]:
            return found
    if run.vocabulary is not None:
        return RetokenizedCaptions(cache, run.vocabulary)
    raise _refusal(run, cache, "captions", name)


def _candidates(cache: FeatureCache, modality: str, name: str) -> list[str]:
    """Return the sets that may be the one of this name: itself, or what a checkpoint in another folder made.

    The latter has another name and the same fingerprint, with which both names end.
    """
    ending = f"@{name.rpartition('@')[2]}"
    return sorted((there for there in cache.set_names(modality) if there.endswith(ending)), key=lambda own: own != name)


def _refusal(run: Run, cache: FeatureCache, modality: str, name: str) -> RunError:
    there = ", ".join(cache.set_names(modality)) or "none"
    tuned = run.info.tuned("image" if modality == "images" else "text")
    way = f"`xret extract … --from-run {run.path}`" if tuned else "the same encoder, weights and options"
    return RunError(
        f"{run.path} needs the feature set '{name}' of {modality}, and {cache.url} has {there}: extract it there with "
        f"{way}"
    )


class RetokenizedCaptions(CaptionSet):
    """The captions of any store as word ids of a run's vocabulary; for a head that was trained on another store.

    Args:
        cache: the store.
        vocabulary: the run's words by token id; the first one stands for all unknown ones.
    """

    def __init__(self, cache: FeatureCache, vocabulary: tuple[str, ...]) -> None:
        self.cache, self.vocabulary = cache, vocabulary
        self.name, self.kind = "words of the run", "words"
        self.channels = self.global_channels = None
        self.blocks = Blocks.choose(cache.splits)
        number = {word: position for position, word in enumerate(vocabulary)}
        texts = cache.caption_texts(0, cache.captions)
        ids = [[number.get(word, 0) for word in tokenize(text)] or [0] for text in texts]
        self.length = np.array([len(caption) for caption in ids], dtype=np.int32)
        self.status = np.full(len(ids), OK, dtype=np.uint8)
        self._start = np.cumsum(self.length, dtype=np.int64) - self.length
        self._ids = np.array([word for caption in ids for word in caption], dtype=np.int32)

    def done(self) -> np.ndarray:
        """Return True for every shard: nothing has to be extracted."""
        return np.ones(len(self.blocks), dtype=bool)

    def token(self, rows: np.ndarray) -> np.ndarray:
        """Return the token ids of these caption rows, packed int32 [sum of lengths]."""
        return np.concatenate([self._ids[a : a + n] for a, n in zip(self._start[rows], self.length[rows], strict=True)])
