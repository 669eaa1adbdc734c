"""What an extraction will take, after a hundred pictures that are encoded into a passing store, here or on a worker."""

import logging
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

from ..data.image_columns import Images
from ..data.manifest import Manifest
from ..data.samples import Samples
from ..device import pick_device
from ..encoders.spec import EncoderSpec
from ..progress import silent
from ..store import FeatureCache
from ..store.store import find_store, open_for_writing
from ..wording import counted, in_bytes, in_time
from ..workers import connect, run_tasks
from .cluster import SECONDS
from .extraction import Extractor, create_sets, load_encoders, set_of, settle
from .options import Options

log = logging.getLogger("xret")
_MEASURED, _WARM = 100, 8  # pictures; the first ones would also measure what a process does once


@dataclass(frozen=True)
class SidePlan:
    """What is left to do of the images, or of the captions."""

    side: str
    samples: int
    bytes: int
    tasks: int
    seconds: float  # that one worker takes


@dataclass(frozen=True)
class Plan:
    """What `plan` foresees; ``str`` shows it."""

    dataset: str
    store: str
    workers: int  # of the cluster; 1: this machine
    measured: int  # pictures
    sides: tuple[SidePlan, ...]
    price: float | None = None  # of an hour of a worker

    @property
    def bytes(self) -> int:
        """What the features will take."""
        return sum(side.bytes for side in self.sides)

    @property
    def tasks(self) -> int:
        """How many tasks of Dask that are."""
        return sum(side.tasks for side in self.sides)

    @property
    def hours(self) -> float:
        """How long the workers will take together."""
        return sum(side.seconds for side in self.sides) / 3600 / self.workers

    @property
    def cost(self) -> float | None:
        """The price of all workers in these hours; None without a price."""
        return None if self.price is None else self.price * self.hours * self.workers

    def to_json(self) -> dict[str, Any]:
        """Return all of it."""
        return asdict(self) | {name: getattr(self, name) for name in ("bytes", "tasks", "hours", "cost")}

    def __str__(self) -> str:
        if not self.measured:
            return f"{self.dataset}: {self.store} is complete; nothing is left to encode"
        lines = [
            f"{self.dataset}: measured on {counted(self.measured, 'picture')}; nothing was written to {self.store}"
        ]
        for side in self.sides:
            much = f"{side.samples:,} {side.side}, {in_bytes(side.bytes)}, {counted(side.tasks, 'task')}"
            lines.append(f"  {much}, {in_time(side.seconds)} of a worker")
        much = f"{in_bytes(self.bytes)}, {counted(self.tasks, 'task')}"
        cost = "" if self.cost is None else f", {self.cost:,.2f} at {self.price:g} an hour of a worker"
        lines.append(f"in all {much}, {in_time(3600 * self.hours)} on {counted(self.workers, 'worker')}{cost}")
        return "\n".join(lines)


def plan(manifest: Manifest, url: str | Path, options: Options, price: float | None = None) -> Plan:
    """Foresee what `extract` will take for what the store at `url` lacks; nothing is written there.

    A worker of the cluster measures, if the options name one, else this process. Errors as of `extract`.
    """
    url, samples, options = settle(manifest, url, options)
    known = find_store(url, samples)
    left = {
        side: max(_left(known, samples, side, spec, options.splits) for spec in options.of_layers(side))
        for side in options.sides
    }
    trial = _trial(samples, options.splits)
    task = replace(manifest, images=manifest.images.resolve()), trial, replace(options, repair=False)
    pictures, measured, workers = 0, dict.fromkeys(left, (0.0, 0.0)), 1
    with connect(options.cluster) if options.cluster else nullcontext() as client:
        if client is not None:
            workers = len(client.nthreads())
        if any(left.values()):
            if options.visual and known is None:
                Extractor(samples, manifest, options).require_pictures()
            pictures = len(trial.images)
            log.info("measuring on %s", counted(pictures, "picture"))
            measured = _measure(task) if client is None else next(run_tasks(client, _measure, [task]))[1]
    sides = []
    for side, samples_left in left.items():
        seconds, size = (value * samples_left for value in measured[side])
        tasks = ceil(seconds / SECONDS if options.cluster else samples_left / options.batch_size)
        sides.append(SidePlan(side, samples_left, round(size), tasks, seconds))
    return Plan(samples.dataset, url, workers, pictures, tuple(sides), price)


def _left(known: FeatureCache | None, samples: Samples, side: str, spec: EncoderSpec, splits: Sequence[str]) -> int:
    """Return how many samples of a side the set of a spec lacks, in a store that may not be there."""
    if known is not None and (features := set_of(known, side, spec)) is not None:
        return len(features.rows_left(splits))
    images = [image for split in splits for image in samples.images[slice(*samples.splits[split])]]
    return len(images) if side == "images" else sum(len(image.captions) for image in images)


def _trial(samples: Samples, splits: Sequence[str]) -> Samples:
    """Return pictures from all over these splits: ``train`` is what is measured, ``val`` what is done before."""
    rows = np.concatenate([np.arange(*samples.splits[split]) for split in splits])
    rows = rows[np.linspace(0, len(rows) - 1, min(len(rows), _MEASURED + _WARM)).astype(int)]
    warm = min(_WARM, len(rows) // 2)
    images = [replace(samples.images[row], split="val" if at < warm else "train") for at, row in enumerate(rows)]
    ranges = {"train": (0, len(rows) - warm), "val": (len(rows) - warm, len(rows))}
    ranges = {split: edges for split, edges in ranges.items() if edges[0] < edges[1]}
    return replace(samples, images=Images.of([*images[warm:], *images[:warm]]), splits=ranges)


def _measure(task: tuple[Manifest, Samples, Options]) -> dict[str, tuple[float, float]]:
    """Encode a trial; return the seconds and bytes of a sample by side."""
    (manifest, trial, options), device = task, str(pick_device(task[2].device))
    options = replace(options, workers=None if options.cluster else options.workers)
    found = {}
    with (
        silent(),
        tempfile.TemporaryDirectory(prefix="xret-plan-") as folder,
        open_for_writing(Path(folder, "trial.zarr"), trial, manifest.protocols) as cache,
    ):
        for side, encoders in load_encoders(options, trial, device).items():
            sets = create_sets(cache, side, encoders, options, device, parts=1)
            size = -sum(cache.folder.size(features.path) for features, _ in sets)
            for split in reversed(trial.splits):
                if side == "captions":  # whose whole chunks the first pass has encoded
                    sets = [(features.forget(*features.written()), encoder) for features, encoder in sets]
                began = time.monotonic()
                done = Extractor(trial, manifest, replace(options, splits=(split,))).fill(sets)[0]
                seconds = time.monotonic() - began
            size += sum(cache.folder.size(features.path) for features, _ in sets)
            rows = sets[0][0].chunks * sets[0][0].chunk_rows
            found[side] = seconds / max(1, done.samples + done.reused), size / rows
    return found
