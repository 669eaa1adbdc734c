"""What ranks the samples of a store: a run, or frozen encoders without any head.

Encoders that were trained together, as the towers of a CLIP, say so by the `space` of their feature sets. The cosine of
their cached global features is then a ranking by itself, and the row that a head on these features has to beat.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ...pipeline.errors import RunError
from ...pipeline.store import FeatureCache
from ..model import Branch, Model
from ..modules.adapters import Adapted
from ..modules.aggregators import Global
from ..modules.parameters import Part
from ..modules.similarity import SIMILARITIES
from ..runs.features import Sets, caption_set_of_run, image_set_of_run, open_store
from ..runs.run import Run
from .metrics import recalls
from .scoring import Scores, score_sets


@dataclass(frozen=True)
class Ranker:
    """A run, or frozen encoders, on a store.

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


def open_rankers(paths: Sequence[str | Path], store: str | None = None, features: str = "auto") -> list[Ranker]:
    """Open run folders, and stores for the frozen encoders of their features.

    Args:
        paths: of runs and stores.
        store: where the runs' features are, if not where they were trained.
        features: see `sets_in_one_space`.

    Raises:
        RunError: a run, or its store, cannot be used; or a store has no features in one space, or several.
        CacheError: a store cannot be used.
    """
    rankers = []
    for path in paths:
        if is_store(path):
            cache = FeatureCache.open(str(path))
            rankers.append(Ranker(None, cache, sets_in_one_space(cache, features)))
        else:
            run = Run(path)
            cache = open_store(run, store)
            rankers.append(Ranker(run, cache, (image_set_of_run(run, cache), caption_set_of_run(run, cache))))
    return rankers


def is_store(path: str | Path) -> bool:
    """Return whether the path is a feature store; URLs always are."""
    return "://" in str(path) or ((Path(path) / "zarr.json").exists() and not (Path(path) / "run.json").exists())


def sets_in_one_space(cache: FeatureCache, features: str = "auto") -> Sets:
    """Return the image and the caption set of a store whose global features lie in one space.

    Args:
        cache: the store.
        features: how the names of the image and of the caption set begin, as ``grid@3f,tokens``; ``auto``: any.

    Raises:
        RunError: there are none, or several.
    """
    image, _, text = ("" if features == "auto" else features).partition(",")
    images = [cache.image_set(name) for name in cache.set_names("images") if name.startswith(image.strip())]
    captions = [cache.caption_set(name) for name in cache.set_names("captions") if name.startswith(text.strip())]
    found = [(one, other) for one in images for other in captions if in_one_space((one, other))]
    if len(found) == 1:
        return found[0]
    if found:
        pairs = "; ".join(f"{one.name},{other.name}" for one, other in found)
        raise RunError(
            f"{cache.url} has several image and caption sets in one space: {pairs}; choose by --features IMAGE,TEXT"
        )
    names = ", ".join(cache.set_paths()) or "none"
    asked = "" if features == "auto" else f" whose names begin with {features}"
    raise RunError(
        f"{cache.url} has no image and caption features in one space{asked}, which cosine could compare without a head"
        f" (feature sets: {names}); extract both towers of one model with `xret extract … --encoder hf:MODEL`, or name"
        " a run"
    )


def in_one_space(sets: Sets) -> bool:
    """Return whether the global features of an image and a caption set can be compared by their cosine."""
    images, captions = (getattr(features, "space", None) for features in sets)
    return images is not None and images == captions


def untrained_rsum(sets: Sets, split: str, device: torch.device) -> float | None:
    """Return the RSUM of frozen encoders without a head, of 600, ties pessimistic; None where no space is common."""
    if not in_one_space(sets):
        return None
    scores = score_sets(untrained(device), sets, split, device)
    return recalls(scores.similarity, scores.caption_image, "full", "pessimistic").rsum


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
