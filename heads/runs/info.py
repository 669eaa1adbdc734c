"""`run.json` of a run: what was trained on what, how far it is, and all that rebuilds the model."""

import logging
import platform
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import torch

from ...pipeline.encoders.origin import Origin
from ...pipeline.reading.joined_sets import Captions, Images, digest_of_pictures, parts_of
from ...pipeline.reading.split import AS_A_WHOLE
from ..model import Facts, FeatureFacts, feature_facts, fitted
from ..recipes.blocks import Recipe, role
from ..recipes.own import known_sources
from ..recipes.recipe import own_names, resolve

FORMAT = "xret-run 3"
_log = logging.getLogger("xret")
BranchName = Literal["image", "text"]
BRANCHES: tuple[BranchName, ...] = ("image", "text")


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """The content of `run.json`, whose keys are the fields, and ``runtime`` beside the recipe."""

    recipe: Recipe
    image_facts: Facts
    text_facts: Facts
    vocabulary: tuple[str, ...] | None = None  # the words by token id, where captions are words
    image: tuple[Origin, ...]  # the feature sets that it reads; of a fine-tuned side, those that its backbone makes
    text: tuple[Origin, ...]
    store: str  # the feature cache, named so that it can be opened from any folder
    manifest_sha256: str | None = None  # of its samples
    pictures: dict[str, str] | None = None  # by split, a digest of the files that its features are of
    also: list[str] | None = None  # data sets that are learnt as well, by names that do not change with their place
    also_stores: list[str] | None = None  # where they are
    seed: int = 0  # of the first weights and the order of samples
    skipped: int = 0  # samples of the splits it learns from that have no features; a repair changes the order
    shuffled: str = AS_A_WHOLE  # how an epoch mixes its samples, in words
    init_from: str | None = None  # the run whose best weights it began with
    distil: str | None = None  # the run whose scores it learns, too
    teacher: str | None = None  # a digest of that run's weights
    head: str | None = None  # of a fine-tuning: the folder of the head
    average: dict[str, float] | None = None  # of an average: the runs as they were named, and their weights
    finetuned: dict[str, Any] | None = None  # its epoch, its fingerprints, and which backbones were put back
    device: str | None = None  # where it began
    versions: dict[str, str] | None = None  # and with which xret, torch and Python
    epochs: int = 0  # complete ones
    best_epoch: int | None = None  # counted from 1; 0: what a residual begins with
    best_rsum: float | None = None  # its validation RSUM, of 600

    @classmethod
    def of(cls, images: Images, captions: Captions, **values: Any) -> "RunInfo":
        """Return what is known of a training on feature sets before its first epoch."""
        return cls(
            image_facts=feature_facts(images),
            text_facts=feature_facts(captions),
            vocabulary=captions.vocabulary,
            image=tuple(map(Origin.of, parts_of(images))),
            text=tuple(map(Origin.of, parts_of(captions))),
            versions=versions(),
            **values,
        )

    @classmethod
    def from_json(cls, values: dict[str, Any], title: str, folder: Path, trust: bool = False) -> "RunInfo":
        """Return what `to_json` gave; ValueError, TypeError or KeyError where it is something else.

        Modules of parts of one's own are looked for in `folder` first. RecipeError where one was not trained with
        here, or has changed since; with `trust` it is imported, and a warning says the latter.
        """
        names, code = own_names(values["recipe"]), values["recipe"].get("code") or {}
        sources = {} if trust else known_sources(str(folder), names, [folder], code)
        runtime = {"runtime": values.pop("runtime")} if "runtime" in values else {}  # once it stood in the recipe
        recipe = resolve(values["recipe"] | runtime, title=title, folders=[folder], sources=sources)
        for module, digest in code.items():
            if recipe.code.get(module) != digest:
                file = recipe.sources.get(module) or module
                _log.warning("%s is not what %s was trained with: its file has changed since", file, folder)
        image, text = (tuple(FeatureFacts(**one) for one in values[f"{side}_facts"]) for side in BRANCHES)
        found: dict[str, Any] = {
            **{side: tuple(map(Origin.from_json, values[side])) for side in BRANCHES},
            "vocabulary": None if values["vocabulary"] is None else tuple(values["vocabulary"]),
            **{"image_facts": image, "text_facts": text},
            "recipe": recipe if values.get("average") else fitted(recipe, image, text),
        }
        return cls(**values | found)

    def to_json(self) -> dict[str, Any]:
        """Return the content of `run.json`."""
        values = {**asdict(self), "recipe": self.recipe.to_dict(), "runtime": asdict(self.recipe.runtime)}
        for side in BRANCHES:
            values[side] = [origin.to_json() for origin in self.origins(side)]
        return values

    def origins(self, branch: BranchName) -> tuple[Origin, ...]:
        """Return what made the feature sets of ``image`` or ``text``."""
        return self.image if branch == "image" else self.text

    def names(self, branch: BranchName) -> tuple[str, ...]:
        """Return the names of the feature sets of ``image`` or ``text``."""
        return tuple(origin.name for origin in self.origins(branch))

    def fingerprints(self, branch: BranchName) -> tuple[str, ...]:
        """Return the fingerprints of the feature sets of ``image`` or ``text``."""
        return tuple(origin.fingerprint for origin in self.origins(branch))

    def tuned(self, branch: BranchName) -> bool:
        """Return whether the run has a backbone of its own for ``image`` or ``text``."""
        return self.finetuned is not None and branch in self.finetuned["reattach"]

    @property
    def lasting(self) -> dict[str, Any]:
        """What stays the same when a training is resumed, the recipe's values by dotted key included."""
        return {
            "samples": self.manifest_sha256,
            "pictures": self.pictures,
            "samples without features": self.skipped,
            "also": self.also,
            "seed": self.seed,
            "finetuned": self.finetuned,
            "the order of samples (by runtime.cache)": self.shuffled,
            **{key: v for key, v in self.recipe.flat().items() if role(key) not in ("computed", "described")},
        }


def versions() -> dict[str, str]:
    """Return the versions that numbers may depend on."""
    try:
        own = version("xret")
    except PackageNotFoundError:
        own = "unknown"
    return {"xret": own, "torch": torch.__version__, "python": platform.python_version()}


def pictures_of(split: str, *images: Images) -> str:
    """Return a digest of the files that the features of a split are of, in one store or several."""
    return " ".join(digest_of_pictures(one, one.rows_of(split))[:12] for one in images)


def absolute(url: str) -> str:
    """Return a store's URL so that it can be opened from any folder."""
    return url if "://" in url else str(Path(url).resolve())
