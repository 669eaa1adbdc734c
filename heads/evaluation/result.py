"""What an evaluation finds: the tables of its protocols, of hubness corrected, and of probabilities."""

from dataclasses import asdict, dataclass
from typing import Any

from ...pipeline.wording import counted
from ..modules.similarity.sets import Direction
from .calibration import CalibrationReport
from .hubness import CHOOSE
from .metrics import WAYS, Ties

FEW = 100  # fewer images say next to nothing: one of them is a percent of the recalls, and chance finds many


@dataclass(frozen=True)
class Result:
    """What a protocol finds on a split; ``str`` shows it as a table."""

    split: str
    protocol: str
    images: int
    captions: int
    captions_per_image: float  # on average
    skipped: int  # samples without features, because they could not be read
    ties: Ties  # how equal scores are counted, see `metrics.recall`
    image_to_text: dict[str, float]  # R@1, R@5 and R@10 in percent and medr, the median rank; or see `protocols`
    text_to_image: dict[str, float]
    rsum: float | None  # the sum of the six recalls; None for protocols of R-Precision, as their mean
    mean_recall: float | None
    paper_rsum: float | None  # that of the recipe's paper; None for ensembles, hubness corrected, and no such row
    log_circular_variance: float | None  # of embedding sets; None for ensembles
    chance_rsum: float | None  # what a random order is expected to have
    frozen: bool = False  # whether the recipe's paper trains encoders, and this run's are as they were

    @property
    def difference(self) -> float | None:
        """How far the RSUM lies above the paper's; None if one of them is unknown."""
        return None if self.rsum is None or self.paper_rsum is None else self.rsum - self.paper_rsum

    @property
    def caveat(self) -> str:
        """What the paper's values have to be read with, to stand behind them; else empty."""
        return " (the paper trains its encoders, which are frozen here)" if self.frozen else ""

    def __str__(self) -> str:
        lines = [
            f"split {self.split}, protocol {self.protocol}: {counted(self.images, 'image')}, "
            f"{counted(self.captions, 'caption')} ({self.captions_per_image:.2f} an image), "
            f"{self.skipped:,} skipped, ties {self.ties}",
            f"{'':15}" + "".join(f"{name:>9}" for name in self.image_to_text),
        ]
        for way in WAYS:
            values = getattr(self, way).items()
            cells = "".join(f"{value:9.{1 if name == 'medr' else 2}f}" for name, value in values)
            lines.append(f"{way.replace('_', ' '):15}{cells}")
        known = {
            "RSUM": self.rsum,
            "mean recall": self.mean_recall,
            "chance RSUM": self.chance_rsum,
            "log circular variance": self.log_circular_variance,
        }
        if last := ", ".join(f"{name} {value:.2f}" for name, value in known.items() if value is not None):
            lines.append(last)
        if self.difference is not None:
            lines.append(f"the paper's RSUM {self.paper_rsum:.2f}, difference {self.difference:+.2f}{self.caveat}")
        if self.images < FEW:
            lines.append(f"{too_few(self.images)} to tell how good this is; take {FEW} or more")
        return "\n".join(lines)


def too_few(images: int) -> str:
    """Return that so many are too few, for a sentence that says for what."""
    return f"{counted(images, 'image')} {'is' if images == 1 else 'are'} too few"


@dataclass(frozen=True)
class Hubness:
    """What the correction of hubness changes, see `hubness`; ``str`` shows it as tables."""

    scale: float | None  # times one over the deviation of the similarities on `val`; None: none was better than without
    scales: tuple[float, ...]  # of the similarities of each run; empty without
    val_rsum: dict[str, float]  # of each scale that was tried, times one over the deviation, and of "none"
    skewness: dict[str, dict[str, float]]  # "without" and "with", of how often an item is among the first ten
    results: tuple[Result, ...]  # one a protocol

    def __str__(self) -> str:
        before = self.val_rsum["none"]
        first = f"hubness: no scale is better on {CHOOSE} than none (RSUM {before:.2f})"
        if self.scale is not None:
            scales, after = ", ".join(f"{scale:.3g}" for scale in self.scales), self.val_rsum[f"{self.scale:g}"]
            first = f"hubness corrected with scale {scales}, chosen on {CHOOSE} (RSUM {before:.2f} to {after:.2f})"
        lines = ["", first]
        if skewed := self.skewness["with"]:
            skews = [f"{way.split('_')[-1]}s {self.skewness['without'][way]:.2f} to {skewed[way]:.2f}" for way in WAYS]
            lines.append(f"skewness of how often an item is among the first ten: {', '.join(skews)}")
        if self.scale is not None:
            lines += map(str, self.results)
        return "\n".join(lines)


@dataclass(frozen=True)
class Evaluation:
    """What `evaluate` finds; ``str`` shows it as tables."""

    runs: tuple[str, ...]  # the run folders; of frozen encoders "untrained", and which
    stores: tuple[str, ...]  # the feature cache of each
    views: tuple[int, ...]  # over how many views of an image each takes the mean
    results: tuple[Result, ...]  # one a protocol
    hubness: Hubness | None = None  # where it was asked for
    calibration: CalibrationReport | None = None  # likewise
    direction: Direction | None = None  # of the elements that look for their nearest; None: as each run was trained

    @classmethod
    def of_one(cls, content: dict[str, Any]) -> "Evaluation":
        """Return the evaluation of one run that was written down with `to_dict`; KeyError or TypeError if it is not."""
        results, hubness = tuple(Result(**result) for result in content["results"]), None
        if given := content.get("hubness"):
            corrected = tuple(Result(**result) for result in given["results"])
            hubness = Hubness(**given | {"scales": tuple(given["scales"]), "results": corrected})
        return cls((content["run"],), (content["store"],), (content["views"],), results, hubness)

    @property
    def tables(self) -> list[tuple[Result, bool]]:
        """All results, those with hubness corrected at the end, and whether it is."""
        corrected = () if self.hubness is None else self.hubness.results
        return [*((result, False) for result in self.results), *((result, True) for result in corrected)]

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON has it: a value where the runs have one in common, else a list of each run's."""
        return {
            "run": self.runs[0] if len(self.runs) == 1 else list(self.runs),
            "store": self.stores[0] if len(set(self.stores)) == 1 else list(self.stores),
            "views": self.views[0] if len(set(self.views)) == 1 else list(self.views),
            "results": [asdict(result) for result in self.results],
            **({} if self.hubness is None else {"hubness": asdict(self.hubness)}),
            **({} if self.calibration is None else {"calibration": asdict(self.calibration)}),
            **({} if self.direction is None else {"direction": self.direction}),
        }

    def __str__(self) -> str:
        first = f"{', '.join(self.runs)} on {'; '.join(self.stores if len(set(self.stores)) > 1 else self.stores[:1])}"
        if max(self.views) > 1:
            first += f", mean over {' and '.join(map(str, dict.fromkeys(self.views)))} views of each image"
        if self.direction is not None:
            first += f", direction {self.direction}"
        last = [str(part) for part in (self.hubness, self.calibration) if part is not None]
        return "\n".join([first, *map(str, self.results), *last])
