"""What can be evaluated on a store: a run, or frozen encoders without any head.

Encoders that were trained together, as the towers of a CLIP, say so by the `space` of their feature sets. The cosine of
their cached global features is then a ranking by itself, and the row that a head on these features has to beat.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ...pipeline.cache.feature_cache import FeatureCache
from ...pipeline.cache.storage.generations import store_of
from ...pipeline.errors import RunError
from ..model import Branch, Model
from ..modules.adapters import Adapted
from ..modules.aggregators import Global
from ..modules.parameters import Part
from ..modules.similarity import SIMILARITIES
from ..runs.features import Sets, caption_set_of_run, image_set_of_run, open_store
from ..runs.run import Run
from .protocols import recalls
from .scoring import Scores, score_sets


@dataclass(frozen=True)
class Subject:
    """What is evaluated on a store.

    Attributes:
        run: the run; None: the frozen encoders by themselves.
        cache: the store.
        sets: what is read of it.
    """

    run: Run | None
    cache: FeatureCache
    sets: Sets

    @property
    def name(self) -> str:
        """The run folder, or which encoders."""
        images, captions = self.sets
        return f"untrained {images.name} and {captions.name}" if self.run is None else str(self.run.path)

    def model(self, device: torch.device) -> Model:
        """Return what embeds and compares, ready on `device`."""
        return untrained(device) if self.run is None else self.run.model(device)

    def score(self, split: str, device: torch.device, views: int = 1) -> Scores:
        """Return how it compares the images and captions of a split; see `score_sets`."""
        return score_sets(self.model(device), self.sets, split, device, views)


def open_subjects(
    paths: Sequence[str | Path], store: str | None = None, image: str = "auto", text: str = "auto"
) -> list[Subject]:
    """Open run folders, and stores for the frozen encoders of their features.

    Args:
        paths: of runs and stores.
        store: where the runs' features are, if not where they were trained.
        image, text: of a store, how the names of the feature sets begin; ``auto``: those in one space.

    Raises:
        RunError: a run, or its store, cannot be used; or a store has no features in one space, or several.
        CacheError: a store cannot be used.
    """
    opened: dict[tuple[str, int | None, str | None], FeatureCache] = {}
    subjects = []
    for path in paths:
        if is_store(path):
            cache = FeatureCache.open(str(path))
            subjects.append(Subject(None, cache, sets_in_one_space(cache, image, text)))
        else:
            run = Run(path)
            url = store or run.info.store
            place = url, run.info.generation, run.info.manifest_sha256
            cache = opened.get(place) or opened.setdefault(place, open_store(run, store))
            subjects.append(Subject(run, cache, (image_set_of_run(run, cache), caption_set_of_run(run, cache))))
    if store is not None and all(subject.run is None for subject in subjects):
        raise RunError(f"--store {store} says where the features of runs are, and {paths[0]} is a store; leave it out")
    named = {"image": image, "text": text}
    for key, prefix in named.items():
        if prefix != "auto" and all(subject.run is not None for subject in subjects):
            raise RunError(f"--{key} {prefix} chooses features of a store, and a run has its own; leave it out")
    return subjects


def is_store(path: str | Path) -> bool:
    """Return whether a feature cache lies there, or something that is no run; a run is a folder of this machine."""
    if "://" in str(path):
        return True
    return not (Path(path) / "run.json").exists() and store_of(str(path)).exists("zarr.json")


def sets_in_one_space(cache: FeatureCache, image: str = "auto", text: str = "auto") -> Sets:
    """Return the image and the caption set of a store whose global features lie in one space.

    Args:
        cache: the store.
        image, text: how their names begin; ``auto``: any.

    Raises:
        RunError: there are none, or several.
        CacheError: a name fits none, or several.
    """
    images = [cache.image_set(name) for name in _named(cache, "images", image)]
    captions = [cache.caption_set(name) for name in _named(cache, "captions", text)]
    found = [(one, other) for one in images for other in captions if in_one_space((one, other))]
    if len(found) == 1:
        return found[0]
    if found:
        pairs = "; ".join(f"{one.name} and {other.name}" for one, other in found)
        raise RunError(
            f"{cache.url} has several image and caption sets in one space: {pairs}; choose by --image and --text"
        )
    names = ", ".join(cache.set_paths()) or "none"
    raise RunError(
        f"{cache.url} has no image and caption features in one space, which cosine could compare without a head"
        f" (feature sets: {names}); extract both towers of one model with `xret extract … --encoder hf:MODEL`, or name"
        " a run"
    )


def _named(cache: FeatureCache, modality: str, prefix: str) -> list[str]:
    if prefix == "auto":
        return cache.set_names(modality)
    found = cache.image_set(prefix, "--image") if modality == "images" else cache.caption_set(prefix, "--text")
    return [found.name]


def in_one_space(sets: Sets) -> bool:
    """Return whether the global features of an image and a caption set can be compared by their cosine."""
    images, captions = (getattr(features, "space", None) for features in sets)
    return images is not None and images == captions


def untrained_rsum(sets: Sets, split: str, device: torch.device) -> float | None:
    """Return the RSUM of frozen encoders without a head, of 600, ties pessimistic; None where no space is common."""
    if not in_one_space(sets):
        return None
    scores = score_sets(untrained(device), sets, split, device)
    return recalls(scores.similarity, scores.caption_image, "full", "pessimistic", "").rsum


def untrained(device: torch.device) -> Model:
    """Return what compares cached global features by their cosine."""
    image, text = (Branch(_AsCached(), Global(0, 0)) for _ in ("image", "text"))
    return Model(image, text, SIMILARITIES["cosine"]()).to(device).eval()


class _AsCached(Part):
    """The adapter of features that nothing is trained on."""

    def fields(self, uses_local: bool) -> set[str]:
        """Return what it reads."""
        return {"global"}

    def forward(
        self,
        length: Tensor,
        local: Tensor | None = None,
        global_: Tensor | None = None,
        token: Tensor | None = None,
        *,
        uses_local: bool = True,
    ) -> Adapted:
        """Return the cached global features `[B, D]`, float32."""
        assert global_ is not None, "fields() asks for it"
        return Adapted(None, length, global_.float())
