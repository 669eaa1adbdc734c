"""The features that a run needs, found in its own store or in another one."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch

from ...pipeline.data.samples import tokenize
from ...pipeline.errors import CacheError, RunError, StoreError
from ...pipeline.reading.batches import Batches, stored_batches
from ...pipeline.reading.joined_sets import Captions, Images, joined
from ...pipeline.reading.placement import Placement, Resident
from ...pipeline.store import OK, CaptionSet, FeatureCache, ImageSet
from ..model import Model, facts_of_each, feature_facts, require_kinds
from ..recipes.blocks import Recipe
from .info import BranchName, as_told, as_tuple
from .run import Run

Sets = tuple[Images, Captions]
_log = logging.getLogger("xret")
S = TypeVar("S", ImageSet, CaptionSet)


def sets_named(cache: FeatureCache, recipe: Recipe) -> Sets:
    """Return the feature sets of `cache` that a recipe names, of each side one or several.

    Raises:
        CacheError: none or several fit a name, or two names mean one set.
        RecipeError: that is so of the captions, and the recipe does not take the images.
    """
    images = [cache.image_set(name) for name in as_tuple(recipe.data.image)]
    _require_different(images, "data.image")
    try:
        captions = [cache.caption_set(name) for name in as_tuple(recipe.data.text)]
    except CacheError:  # which captions is the second question, if the recipe does not take these images
        require_kinds(recipe, "image", facts_of_each(feature_facts(joined(images))))
        raise
    _require_different(captions, "data.text")
    return joined(images), joined(captions)


def _require_different(found: Sequence[ImageSet] | Sequence[CaptionSet], key: str) -> None:
    names = [features.name for features in found]
    for name in names:
        if names.count(name) > 1:
            raise CacheError(f"{key} names the feature set '{name}' of {found[0].cache.url} twice; leave one out")


def on_sets_of(run: Run, recipe: Recipe, cache: FeatureCache) -> Recipe:
    """Return the recipe of a resumed training with the run's own feature sets, whatever else `cache` holds meanwhile.

    They are meant by the same names as when the run began, or by what their own names begin with.
    """
    own: dict[str, Any] = {
        side: as_told(run.info.sides[side])
        for side, modality in (("image", "images"), ("text", "captions"))
        if set(run.info.sides[side]) <= set(cache.set_names(modality))
        and _means(getattr(recipe.data, side), getattr(run.recipe.data, side), run.info.sides[side])
    }
    return replace(recipe, data=replace(recipe.data, **own))


def _means(now: str | list[str], then: str | list[str], names: Sequence[str]) -> bool:
    wanted = sorted(name.rpartition("/")[2] for name in as_tuple(now))
    prefixes = len(wanted) == len(names) and all(map(str.startswith, sorted(names), wanted))
    return now in (then, "auto") or prefixes


def open_store(run: Run, store: str | None) -> FeatureCache:
    """Open the feature cache at `store`, or, where that is None, the one that `run` was trained on.

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
        _log.warning("%s holds other samples than those that %s was trained on", cache.url, run.path)
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
    sets = [cache.image_set(name) for name in cache.set_names("images")]
    return joined([_equal_set(run, "image", print_, sets, cache) for print_ in run.info.prints("image")])


def caption_set_of_run(run: Run, cache: FeatureCache) -> Captions:
    """Return the caption features of `cache` that `run` was trained on, or equal ones; RunError if there are none.

    Where the run knows words it has a vocabulary, and reads those of any store.
    """
    sets = [cache.caption_set(name) for name in cache.set_names("captions")]
    found: list[CaptionSet] = []
    for print_, facts in zip(run.info.prints("text"), facts_of_each(run.text_facts), strict=True):
        if facts.kind == "words" and run.vocabulary is not None and print_ not in [one.fingerprint for one in sets]:
            found.append(RetokenizedCaptions(cache, run.vocabulary))
        else:
            found.append(_equal_set(run, "text", print_, sets, cache))
    return joined(found)


def _equal_set(run: Run, branch: BranchName, fingerprint: str, sets: Sequence[S], cache: FeatureCache) -> S:
    """Return the set with a fingerprint: what a checkpoint in another folder made has another name."""
    equal = [features for features in sets if features.fingerprint == fingerprint]
    if equal:
        return next((features for features in equal if features.name in run.info.names(branch)), equal[0])
    name = run.info.names(branch)[run.info.prints(branch).index(fingerprint)]
    there = ", ".join(features.name for features in sets) or "none"
    modality, way = "images" if branch == "image" else "captions", "the same encoder, weights and options"
    if run.info.tuned(branch):
        way = f"`xret extract … --from-run {run.path}`"
    raise RunError(
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
