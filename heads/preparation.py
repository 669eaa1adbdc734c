"""Before the first step of a training: what the store must have, the run folder, and the first word vectors."""

import sys
from pathlib import Path
from typing import Any

import torch

from ..pipeline.batches import Batches
from ..pipeline.cache import FeatureCache
from ..pipeline.errors import CacheError, RecipeError, RunError
from ..pipeline.placement import Placement
from ..pipeline.word_vectors import read_word_vectors
from .model import Model, feature_facts
from .ranks import Ranks
from .recipe import Recipe
from .run import Run, absolute, versions


def require_splits(cache: FeatureCache) -> None:
    """Raise CacheError if the store lacks a split that training needs."""
    for split, purpose in (("train", "learn from"), ("val", "choose its best epoch")):
        if split not in cache.splits:
            raise CacheError(
                f"{cache.url} has no split '{split}', which training needs to {purpose} (it has "
                f"{', '.join(cache.splits)}); add a split column to the data set, or map one with merge_splits in its "
                "manifest, and extract into another --store"
            )


def placement_of(out: str | Path, recipe: Recipe, resume: bool) -> Placement:
    """Return where the features shall lie; a run that was begun in the order of ``stream`` goes on in it."""
    if recipe.runtime.cache == "auto" and resume and Path(out).exists() and Run(out).info.get("streamed"):
        return "stream"
    return recipe.runtime.cache


def open_run(
    out: str | Path, recipe: Recipe, split: Batches, target: torch.device, ranks: Ranks, *, seed: int, resume: bool
) -> tuple[Run, bool]:
    """Make the run folder of a training on `split`, or open it to go on; return whether it was made.

    Raises:
        RunError: it is there and shall not be resumed, or was begun otherwise.
    """
    cache, image_set, caption_set = split.image_set.cache, split.image_set, split.caption_set
    facts = {
        "manifest_sha256": cache.manifest_sha256,
        "image_set": image_set.name,
        "text_set": caption_set.name,
        "fingerprints": {"image": image_set.fingerprint, "text": caption_set.fingerprint},
        "seed": seed,
    }
    streamed = split.placement == "stream"
    if ranks.agree(streamed, target) != streamed:
        raise RunError("the features fit the memory of some ranks and not of others; set runtime.cache=stream")
    created = not (resume and Path(out).exists())
    ranks.wait()  # all have looked, before the first makes it
    if created and ranks.first:
        info = {"store": absolute(cache.url), **facts, "device": str(target), "versions": versions()}
        info |= {"streamed": streamed, "best_epoch": None, "best_rsum": None}
        Run.create(out, info, recipe, feature_facts(image_set), feature_facts(caption_set), caption_set.vocabulary)
    ranks.wait()
    run = Run(out)
    if not created:
        run.refuse_difference(facts, recipe)
        if run.info.get("streamed", False) != streamed:
            then, now = ("in groups of shards", "as a whole") if not streamed else ("as a whole", "in groups of shards")
            raise RunError(
                f"{run.path} cannot be resumed: its samples were shuffled {then}, and with the features in "
                f"'{split.placement}' they are {now}; set runtime.cache, or free memory"
            )
        if ranks.first:
            run.record_store(absolute(cache.url))
    return run, created


def load_vectors(model: Model, path: str, vocabulary: tuple[str, ...]) -> None:
    """Begin the text branch's word embeddings with the vectors of a GloVe or fastText file; say how many lack one.

    Raises:
        VectorsError: the file cannot be read.
        RecipeError: its vectors are of another width than `adapter.words.word_dim`.
    """
    read = read_word_vectors(path, vocabulary)
    adapter: Any = model.text.adapter
    try:
        adapter.load_vectors(torch.from_numpy(read.vectors), torch.from_numpy(read.found))
    except ValueError as error:
        raise RecipeError(f"adapter.words: {error}") from error
    passed = f"; {read.undecodable} undecodable lines were passed over" if read.undecodable else ""
    print(f"{len(read.missing)} of {len(read.found)} words have no vector in {path}{passed}.", file=sys.stderr)
