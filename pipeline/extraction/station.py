"""What the tasks of an extraction share in one process: the encoders, the open store, and threads that read pictures.

It closes when the extraction ends.
"""

import multiprocessing
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from ..device import cores, pick_device
from ..encoders.registry import is_own, load_text_layers, load_visual_layers
from ..encoders.spec import EncoderSpec
from ..encoders.words import WordsEncoder
from ..errors import EncoderError
from ..store import CaptionSet, FeatureCache, FeatureSet, ImageSet
from .reuse import Reusable

_THREADS = 8  # that read by default at most: 16 on as many cores read less, since they wait for the interpreter


@dataclass(frozen=True)
class Job:
    """What tasks have in common."""

    key: str  # of the extraction and its sets
    url: str  # of the store
    paths: tuple[str, ...]  # of the sets, whose chunks have the same rows
    folder: str  # where the names of pictures, or of the files that hold them, start
    specs: tuple[EncoderSpec, ...]  # of the encoders, which differ in their layers alone
    device: str  # ``auto`` is decided where the task runs
    batch_size: int
    splits: tuple[str, ...]  # whose images are encoded; captions are encoded by whole chunks
    skip: bool = False  # record samples that cannot be read, and go on
    threads: int | None = None  # or processes that read pictures; None: one a core, of threads eight at most
    reuse: str | None = None  # the other store whose features are copied


class Station:
    """What tasks share in one process; `encoders` and `sets` are those that it has already."""

    def __init__(self, job: Job, encoders: Sequence[Any] = (), sets: Sequence[FeatureSet] = ()) -> None:
        self.job, self.device, self.batch_size = job, str(pick_device(job.device)), job.batch_size
        if not sets:
            cache = FeatureCache.open(job.url, writable=True)
            sets = [cache.set_at(path) for path in job.paths]
        self.sets: Sequence[Any] = sets
        self.encoders: Sequence[Any] = encoders or _load(job, sets[0], self.device)
        for features, encoder in zip(sets, self.encoders, strict=True):
            if features.identity != encoder.identity:
                raise EncoderError(
                    f"the weights or preprocessing of '{job.specs[0].name}' are not those that '{features.name}' was"
                    " begun with; use the same weights on every worker"
                )
        self._missing = [set(features.missing(job.splits)) for features in sets]
        self.reusable = [Reusable(job.reuse, features) for features in sets] if job.reuse else []
        self.pictures: Any = None
        self.digests: Any = None  # of pictures that a set of the store has features of, uint8 [I,16]; else zeros
        if isinstance(sets[0], ImageSet):
            cache = sets[0].cache
            self.pictures, self.digests = cache.open_pictures(job.folder, 0, cache.images), cache.known_digests()
        threads = job.threads or min(_THREADS, cores())
        self.threads = ThreadPoolExecutor(threads, "xret-read")
        self.ahead = max(job.batch_size, 2 * threads)  # pictures that are read beyond the batches being encoded
        self.lock = threading.Lock()  # of what is left of each chunk
        self.stopped = False

    @property
    def processes(self) -> int:
        """How many processes read pictures for a GPU, which threads are too slow for; 0: threads read.

        Processes read what becomes tensors of one shape, where the system can fork and this process may. What a user's
        own encoder decodes with may not bear it, the GPU for one.
        """
        alike = getattr(self.encoders[0], "kind", None) == "grid" and not is_own(self.job.specs[0].name)
        may_fork = hasattr(os, "fork") and not multiprocessing.current_process().daemon
        return self.job.threads or cores() if self.device != "cpu" and alike and may_fork else 0

    def lacking(self, chunk: int) -> list[int]:
        """Return the numbers of the sets that lack samples of a chunk."""
        return [number for number, missing in enumerate(self._missing) if chunk in missing]

    def close(self) -> None:
        """Stop the tasks that run."""
        self.stopped = True
        self.threads.shutdown(wait=True, cancel_futures=True)


_stations: dict[str, Station] = {}
_lock = threading.Lock()


def open_station(job: Job, encoders: Sequence[Any] = (), sets: Sequence[FeatureSet] = ()) -> Station:
    """Return the station of a job in this process, opened by the first task."""
    with _lock:
        if job.key not in _stations:
            _stations[job.key] = Station(job, encoders, sets)
        return _stations[job.key]


def close_station(key: str) -> None:
    """Close a station, if this process has it."""
    with _lock:
        station = _stations.pop(key, None)
    if station is not None:
        station.close()


def _load(job: Job, features: FeatureSet, device: str) -> Sequence[Any]:
    if isinstance(features, ImageSet):
        return load_visual_layers(job.specs, device)
    words = features.vocabulary if isinstance(features, CaptionSet) else None
    return load_text_layers(job.specs, device) if words is None else [WordsEncoder(words)]
