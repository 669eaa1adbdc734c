"""The features that a run needs, found in its own store or in another one."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ...pipeline.data.samples import tokenize
from ...pipeline.errors import CacheError, RunError, StoreError
from ...pipeline.reading.batches import Batches, stored_batches
from ...pipeline.reading.joined_sets import Captions, Images, joined
from ...pipeline.reading.placement import Placement, Resident
from ...pipeline.store import OK, CaptionSet, FeatureCache, FeatureSet, ImageSet
from ..model import Model, facts_of_each, feature_facts, require_kinds
from ..recipes.blocks import Recipe
from .info import BranchName, several
from .run import Run

Sets = tuple[Images, Captions]
log = logging.getLogger("xret")


def sets_named(cache: FeatureCache, recipe: Recipe) -> Sets:
    """Return the feature sets of `cache` that a recipe names, of each side one or several.

    Raises:
        CacheError: none or several fit a name, or two names mean one set.
        RecipeError: that is so of the captions, and the recipe does not take the images.
    """
    images = [cache.image_set(name) for name in several(recipe.data.image)]
    _require_different(images, "data.image")
    try:
        captions = [cache.caption_set(name) for name in several(recipe.data.text)]
    except CacheError:  # which captions is the second question, if the recipe does not take these images
        require_kinds(recipe, "image", facts_of_each(feature_facts(joined(images))))
        raise
    _require_different(captions, "data.text")
    return joined(images), joined(captions)


def _require_different(found: Sequence[FeatureSet], key: str) -> None:
    names = [features.name for features in found]
    for name in names:
        if names.count(name) > 1:
            raise CacheError(f"{key} names the feature set '{name}' of {found[0].cache.url} twice; leave one out")


def on_own_sets(recipe: Recipe, cache: FeatureCache, *, image: Any, text: Any) -> Recipe:
    """Return the recipe with the feature sets that something was begun with, where it means them.

    It means them by ``auto``, or by what their names begin with, whatever else `cache` holds meanwhile.

    Args:
        recipe: resolved.
        cache: the store.
        image: the name of a set as `run.json` tells it, or a list of names.
        text: likewise.
    """
    own: dict[str, Any] = {
        key: told
        for key, modality, told in (("image", "images", image), ("text", "captions", text))
        if _means(cache, modality, several(getattr(recipe.data, key)), several(told))
    }
    return replace(recipe, data=replace(recipe.data, **own))


def _means(cache: FeatureCache, modality: str, said: Sequence[str], names: Sequence[str]) -> bool:
    """Return whether what a recipe says means the sets of these names, of which `cache` has all."""
    if not all(name in cache.set_names(modality) for name in names):
        return False
    fits = [[one == "auto" or cache.fits(f"{modality}/{name}", one) for name in names] for one in said]
    return said == ("auto",) or (
        len(said) == len(names) and all(map(any, fits)) and all(map(any, zip(*fits, strict=True)))
    )


def open_store(run: Run, store: str | None) -> FeatureCache:
    """Open the feature store at `store`, or, where that is None, the one that `run` was trained on.

    A warning says where it holds other samples than those of the training.

    Raises:
        CacheError: there is none at `store`, or it cannot be used.
        RunError: there is none where the run's own was, or it cannot be used.
    """
    try:
        cache = FeatureCache.open(store or run.info.store)
    except (CacheError, StoreError) as error:
        if store is not None:
            raise
        raise RunError(
            f"the store of {run.path} is not there or not usable ({error}); name where it is now with --store"
        ) from error
    if store is None and cache.manifest_sha256 != run.info.manifest_sha256:
        log.warning("%s holds other samples than those that %s was trained on", cache.url, run.path)
    return cache


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
    placement: Placement = "stream",
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


def views_to_draw(image_set: Images, recipe: Recipe) -> Sequence[int]:
    """Return the views of an image that a training by `recipe` draws from."""
    return range(image_set.views) if recipe.data.views == "draw" else (0,)


def require_views(image_set: Images) -> None:
    """Raise RunError where a set has a single view of each image, over which no mean can be taken."""
    if image_set.views == 1:
        raise RunError(
            f"'{image_set.name}' in {image_set.cache.url} has one view of each image, so that there is no mean over"
            " views; leave --views out, or train on features of `xret extract --views`"
        )


def image_set_of_run(run: Run, cache: FeatureCache) -> Images:
    """Return the image features of `cache` that `run` was trained on, or equal ones; RunError if there are none."""
    found = []
    for name, made in zip(run.info.names("image"), run.info.prints("image"), strict=True):
        features = next((one for one in _candidates(cache, "images", name) if one.fingerprint == made), None)
        if not isinstance(features, ImageSet):
            raise _refusal(run, cache, "images", name)
        found.append(features)
    return joined(found)


def caption_set_of_run(run: Run, cache: FeatureCache) -> Captions:
    """Return the caption features of `cache` that `run` was trained on, or equal ones; RunError if there are none.

    Where the run knows words it has a vocabulary, and reads those of any store.
    """
    found: list[CaptionSet] = []
    told = zip(run.info.names("text"), run.info.prints("text"), facts_of_each(run.text_facts), strict=True)
    for name, made, facts in told:
        features = next((one for one in _candidates(cache, "captions", name) if one.fingerprint == made), None)
        if isinstance(features, CaptionSet):
            found.append(features)
        elif facts.kind == "words" and run.vocabulary is not None:
            found.append(RetokenizedCaptions(cache, run.vocabulary))
        else:
            raise _refusal(run, cache, "captions", name)
    return joined(found)


def _candidates(cache: FeatureCache, modality: str, name: str) -> Iterator[ImageSet | CaptionSet]:
    """Yield the sets that may be the one of this name: itself, or what a checkpoint in another folder made.

    The latter has another name and the same fingerprint, with which both names end.
    """
    ending = f"@{name.rpartition('@')[2]}"
    there = [found for found in cache.set_names(modality) if found.endswith(ending)]
    return (cache.set_at(f"{modality}/{found}") for found in sorted(there, key=lambda found: found != name))


def _refusal(run: Run, cache: FeatureCache, modality: str, name: str) -> RunError:
    there = ", ".join(cache.set_names(modality)) or "none"
    branch: BranchName = "image" if modality == "images" else "text"
    way = (
        f"`xret extract … --from-run {run.path}`" if run.info.tuned(branch) else "the same encoder, weights and options"
    )
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
