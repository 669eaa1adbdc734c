"""One outcome in one call: candidates are fitted, validation chooses, and the frozen encoder is among them.

    OUT/features.zarr    their features, unless a store was given
    OUT/candidates/      a run each; none is below what it begins with, on `val`
    OUT/curve/           the best fitted one, from a part of the training pictures
    OUT/fit.json         what is fitted
    OUT/report.html      the page
    OUT/run.json, …      the chosen run, so that OUT is a run

Called again it goes on where it was stopped, to the same outcome.
"""

import logging
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from ...pipeline.errors import RunError
from ...pipeline.files import locked, writing
from ...pipeline.progress import Progress
from ...pipeline.reading.joined_sets import parts_of
from ...pipeline.reading.placement import Resident
from ...pipeline.reading.split import Split
from ...pipeline.store import FeatureCache
from ...pipeline.store.leaks import find_leaks
from ...pipeline.wording import in_time
from ..evaluation.comparison import compare_runs
from ..evaluation.evaluation import evaluate
from ..evaluation.number_table import NumberTable, Rows
from ..model import in_one_space
from ..recipes.blocks import Recipe
from ..recipes.recipe import changed, load_recipe
from ..report import write_report
from ..report.tables import Chart, Opening, line_chart
from ..runs.features import Sets
from ..runs.info import absolute
from ..runs.run import CHECKPOINT, Run
from ..series import claim, make_folder
from ..training.callbacks import Callback
from ..training.train import train
from .curve import FEWEST, SHARES, Curve, learning_curve
from .data import ENCODER, choose_sets, encode, find_source, read, require_different_pictures

FROZEN, CLOSED = "frozen", "cca"
TRAINED = ("linear", "mlp")
# Of what begins with a model already: longer schedules overfit small validation splits, and cost more.
SHORT = {"schedule.epochs": 20, "schedule.patience": 8}
_SECONDS = 5, 0.003  # of a CPU core: of any fit, and for each caption
_log = logging.getLogger("xret")


@dataclass(frozen=True)
class Row:
    """A candidate: mean recalls in percent, on `val`, which chooses, and on `test`."""

    name: str
    run: str
    val: float
    test: float
    corrected: float  # on test, with hubness corrected
    first: tuple[float, float]  # R@1 on test, image to text and text to image
    complete: bool  # its training ended by itself


@dataclass(frozen=True)
class Fit:
    """What `fit` finds; ``str`` shows it as a table."""

    run: str  # the folder, which is a run
    store: str
    pictures: str | None  # the folder of the pictures, if that is known
    images: Mapping[str, int]  # by split
    rows: tuple[Row, ...]
    chosen: str
    before: str  # what the chosen one is compared with: the frozen encoders, or the closed form
    gain: tuple[float, float, float]  # of the chosen one over that on test, in mean recall, and its 95% interval
    curve: Curve | None  # None: there was no time for it, or there are fewer than `FEWEST` training pictures
    leaks: str
    report: str

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return asdict(self)

    @property
    def table(self) -> NumberTable:
        """The rows; the chosen one has a star."""
        caption = (
            "mR is the mean of the six recalls, in %; *: chosen by val"
            f" ({self.images['val']:,} pictures), and judged by test ({self.images['test']:,})"
        )
        rows: Rows = [
            [f"{'*' if one.name == self.chosen else ' '} {one.name}", one.val, one.test, one.corrected, *one.first]
            for one in self.rows
        ]
        return NumberTable(caption, ["", "val mR", "test mR", "--hubness", "i→t R@1", "t→i R@1"], rows, 1)

    @property
    def sentences(self) -> list[str]:
        """What the table does not show."""
        difference, low, high = self.gain
        over = f"{self.chosen} over {self.before} on test: {difference:+.1f} mR (95%: {low:+.1f} to {high:+.1f})"
        lines = [over if self.chosen != self.before else f"nothing that was fitted is better on val than {self.before}"]
        why = "the time was over before there was a learning curve; give more to go on"
        if self.images["train"] < FEWEST:
            why = f"a learning curve takes {FEWEST} training pictures"
        lines.append(str(self.curve or why))
        lines += [f"{row.name} was stopped by the time that was given" for row in self.rows if not row.complete]
        return [*lines, self.leaks] if self.leaks else lines

    @property
    def chart(self) -> Chart | None:
        """The learning curve, and how it is expected to go on."""
        if self.curve is None:
            return None
        images, recalls = zip(*self.curve.points, strict=True)
        beyond = [images[-1], 2 * images[-1]], [recalls[-1], recalls[-1] + self.curve.gain]
        lines = {self.curve.name: (images, recalls), "expected": beyond}
        return line_chart("Mean recall on test by training pictures", lines, "training pictures")

    def __str__(self) -> str:
        return "\n".join([str(self.table), *self.sentences])


@contextmanager
def _said_once() -> Iterator[None]:
    """Let no sentence be logged twice: the data are read before each step."""
    said: set[str] = set()

    def is_new(record: logging.LogRecord) -> bool:
        before = len(said)
        said.add(record.getMessage())
        return len(said) > before

    _log.addFilter(is_new)
    try:
        yield
    finally:
        _log.removeFilter(is_new)


@_said_once()
def fit(
    data: str | Path,
    captions: str | Path | None = None,
    *,
    out: str | Path,
    encoder: str | None = None,
    minutes: float | None = None,
    seed: int = 0,
    device: str = "auto",
    features: str = "auto",
    data_root: str | Path | None = None,
    on_error: Literal["fail", "skip"] = "fail",
    trust: bool = False,
) -> Fit:
    """Make the best retrieval model of pictures and captions, and say how good it is (``xret fit``).

    Candidates are the frozen encoders by themselves, where they share a space, canonical correlations, and a linear and
    a two-layer head that begin with one of these. Validation chooses one; the test split is looked at after
    that. Called again it goes on where it was stopped.

    Args:
        data: a folder of pictures, a manifest or a feature store.
        captions: of a folder, the file of captions; see the manifest's ``captions``.
        out: the folder of all that is made; it is a run.
        encoder: of pictures and captions, ``hf:ID``, ``hf:DIR`` or ``open_clip:ARCH/TAG``; None: a CLIP of the hub.
        minutes: after so many no training goes on. What is encoded is always finished.
        seed: of all trainings.
        device: ``auto``, ``cpu`` or ``cuda``.
        features: of a store with several sets, how the names of one of each side begin, ``IMAGE,TEXT``.
        data_root: the folder that a manifest's paths start from; None: the manifest's own.
        on_error: at a picture or caption that cannot be read, ``fail`` or ``skip`` it.
        trust: let a program that a checkpoint comes with run.

    Raises:
        ManifestError, SampleError: the data cannot be read, or nothing can be learnt from them.
        EncoderError: the encoder is unknown, or cannot be loaded.
        CacheError: a store cannot be used.
        RunError: `out` belongs to something else, or is in use.
    """
    began, root = time.monotonic(), Path(out).resolve()
    source = find_source(data, captions, root, data_root, encoder)
    given = {"data": absolute(str(data)), "captions": captions and absolute(str(captions)), "seed": seed}
    given |= {"features": features, "encoder": None if source.manifest is None else encoder or ENCODER}
    with _claimed(root, given):
        _log.info("[1/4] Reading")
        splits, texts = read(source, on_error)
        counts = ", ".join(f"{count:,} {split}" for split, count in splits.items())
        fits = in_time(_SECONDS[0] + _SECONDS[1] * texts)
        what = "Encoding" if source.manifest else "There are features of"
        _log.info(f"[2/4] {what} {counts}; to fit them will take about {fits} of a CPU core")
        encode(source, splits, encoder, device=device, trust=trust, on_error=on_error)
        cache = FeatureCache.open(source.store)
        require_different_pictures(cache)
        _log.info("[3/4] Fitting")
        end = None if minutes is None else began + 60 * minutes
        fitting = _Fitting(choose_sets(cache, features), root, seed, device, end)
        chosen, fitted = fitting.run()
        _log.info("[4/4] Judging")
        found = Fit(
            run=str(out),
            store=cache.url,
            pictures=None if source.pictures is None else str(source.pictures),
            images=splits,
            rows=tuple(_row(name, run, fitting.complete[name], device) for name, run in fitting.runs.items()),
            chosen=chosen,
            before=next(iter(fitting.runs)),
            gain=fitting.gain(chosen, "test"),
            curve=learning_curve(fitted, fitting.parts, device) if fitting.parts else None,
            leaks=find_leaks(cache).sentence,
            report=str(Path(out, "report.html")),
        )
        shown = [fitting.runs[name] for name in dict.fromkeys((found.before, chosen))]
        opening = Opening("Fit", found.table, found.chart, found.sentences)
        write_report(shown, root / "report.html", data_root=source.pictures, seed=seed, device=device, opening=opening)
        _install(fitting.runs[chosen], root)
        return found


@contextmanager
def _claimed(root: Path, description: Mapping[str, Any]) -> Iterator[None]:
    """Lock the folder for a fit; where nothing came of it, a corrected command may take the same one."""
    make_folder(root)
    with locked(root, RunError(f"another fit is at work in {root}; wait until it has ended")):
        claim(root, "fit", description)
        try:
            yield
        except BaseException:
            if [path.name for path in root.iterdir()] == ["fit.json"]:
                shutil.rmtree(root)
            raise


class _OutOfTime(Exception):
    """A training has used its share of the time."""


class _Clock(Callback):
    """Counts epochs, and ends the training at `end`."""

    def __init__(self, tick: Callable[[int], None], end: float) -> None:
        self.tick, self.end = tick, end

    def on_epoch(self, epoch: int, step: int, values: Mapping[str, float]) -> None:
        """Count an epoch."""
        self.tick(1)
        if time.monotonic() > self.end:
            raise _OutOfTime


class _Fitting:
    def __init__(self, sets: Sets, root: Path, seed: int, device: str, end: float | None) -> None:
        self.sets, self.store = sets, sets[0].cache.absolute_url
        self.root, self.seed, self.device, self.end = root, seed, device, end
        self.images = len(Split.of(*self.sets, "train").images)
        self.runs: dict[str, Path] = {}
        self.parts: dict[int, Path] = {}  # those of the curve, by training pictures; none if one was stopped
        self.complete: dict[str, bool] = {}
        self.resident = Resident()

    def run(self) -> tuple[str, str]:
        """Fit all; return the chosen candidate, and the best but for the frozen one, whose parts are fitted, too."""
        how = self._common()
        recipes = {FROZEN: load_recipe("cca", {**how, "model.residual": "frozen"})} if in_one_space(*self.sets) else {}
        if not self.sets[1].vocabulary:
            recipes[CLOSED] = load_recipe("cca", how)
        for name, recipe in recipes.items():
            self._fit(name, recipe)
        # The maps of few pairs are chosen by few pictures, and may be far worse than they look there; what is added to
        # frozen encoders stays near them.
        if {FROZEN, CLOSED} <= recipes.keys() and self.gain(CLOSED, "val")[1] <= 0:
            del recipes[CLOSED]  # is shown, and neither chosen nor begun with
        base = next(reversed(recipes), "none")
        how |= {"model.residual": base, **(SHORT if base != "none" else {})}
        recipes |= (heads := {name: load_recipe(name, how) for name in TRAINED})
        epochs = next(iter(heads.values())).schedule.epochs
        shares = SHARES if self.images >= FEWEST else ()
        parts = len(heads) + len(shares)
        with Progress("Fitting", parts * epochs, "epochs") as progress:
            self.progress, self.counted, self.left = progress, 0, parts
            for number, (name, recipe) in enumerate(heads.items(), 1):
                self._fit(name, recipe)
                self._tick(number * epochs - self.counted)
            chosen, fitted = self._best(recipes), self._best([name for name in recipes if name != FROZEN])
            complete = self.complete[fitted] and len(shares) > 0
            for share in shares:
                run = self.parts[round(share * self.images)] = self.root / "curve" / f"{fitted}-{share:.0%}"
                complete &= self._train(changed(recipes[fitted], {"data.share": share}), run)
            self.parts[self.images] = self.runs[fitted]
            if not complete:
                self.parts.clear()
            self._tick(parts * epochs - self.counted)
        return chosen, fitted

    def _common(self) -> dict[str, Any]:
        """Return the settings of all candidates: the sets, and that a vector which a text encoder has is read."""
        captions = parts_of(self.sets[1])[0]
        names = {"data.image": self.sets[0].name, "data.text": self.sets[1].name}
        cached = captions.kind == "tokens" and captions.global_channels
        return {**names, "adapter.tokens.global": "cached"} if cached else names

    def _best(self, names: Sequence[str] | Mapping[str, Recipe]) -> str:
        return max(names, key=lambda name: Run(self.runs[name]).info.best_rsum or 0)

    def gain(self, name: str, split: str) -> tuple[float, float, float]:
        """Return how far a candidate's mean recall lies above that of the first one, and its 95% interval."""
        before = next(iter(self.runs))
        if name == before:
            return 0.0, 0.0, 0.0
        found = compare_runs(self.runs[before], self.runs[name], split=split, device=self.device).differences[-1]
        return (found.second - found.first) / 6, found.low / 6, found.high / 6

    def _fit(self, name: str, recipe: Recipe) -> None:
        self.runs[name] = self.root / "candidates" / name
        self.complete[name] = self._train(recipe, self.runs[name])

    def _train(self, recipe: Recipe, run: Path) -> bool:
        """Train a run, or go on with it, as long as its share of the time lasts; return whether it ended by itself."""
        how: dict[str, Any] = {"seed": self.seed, "device": self.device, "resident": self.resident, "title": None}
        if recipe.schedule.epochs:
            share = (self.end - time.monotonic()) / self.left if self.end is not None else math.inf
            how["callbacks"], self.left = [_Clock(self._tick, time.monotonic() + share)], self.left - 1
        try:
            train(self.store, recipe, run, resume=True, **how)
            return True
        except _OutOfTime:
            return False

    def _tick(self, epochs: int) -> None:
        self.counted += epochs
        self.progress.update(epochs)


def _row(name: str, run: Path, complete: bool, device: str) -> Row:
    found = evaluate(run, protocol="full", hubness=True, device=device)
    (result, *_), corrected = found.results, [one for one, hubs in found.tables if hubs]
    recalls = [one.mean_recall or 0.0 for one in (result, *corrected)]
    best = (Run(run).info.best_rsum or 0.0) / 6
    first = result.image_to_text["R@1"], result.text_to_image["R@1"]
    return Row(name, str(run), best, recalls[0], recalls[-1], first, complete)


def _install(run: Path, root: Path) -> None:
    """Copy the files of a run into the folder of all, so that this is the run; `run.json` comes last."""
    (root / "run.json").unlink(missing_ok=True)
    for file in sorted(filter(Path.is_file, run.iterdir()), key=lambda one: one.name == "run.json"):
        if file.name != CHECKPOINT:
            with writing(root / file.name, RunError) as partial:
                shutil.copyfile(file, partial)
