"""What all tasks that fill a shard have in common: they report progress, write, and return a receipt."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from threading import Event

import numpy as np

from ..cache import FeatureSet
from ..cache.feature_sets import BETWEEN_REASONS
from ..wording import printable

# What hears of finished samples, by the URL and name of the set that is filled, since a shard takes long. Only tasks of
# this process are heard.
_METERS: dict[tuple[str, str], Callable[[int], None]] = {}


# Whether what began a task is over, and left it; Dask's threads have the context of whoever began their tasks.
_OVER: ContextVar[Event | None] = ContextVar("over", default=None)


class Unwanted(Exception):
    """Ends a task that nobody waits for."""


@dataclass
class Receipt:
    """What a finished task returns."""

    shard: int
    samples: int
    found: int = 0  # of them, those that another generation of the cache had
    failed: dict[str, str] = field(default_factory=dict)  # id of the image of a failed sample → reason
    seconds: dict[str, float] = field(default_factory=dict)  # by share of the work: ``read``, ``encode``, ``write``
    duration: float = 0.0  # seconds that the task took, also those in which it waited for the device
    began: float = field(default_factory=time.perf_counter)

    @property
    def failures(self) -> int:
        """How many samples failed."""
        return sum(len(reasons.split(BETWEEN_REASONS)) for reasons in self.failed.values())

    def fail(self, key: str, reason: str) -> None:
        """Note why a sample of the image `key` failed; of an image's captions several may."""
        reason = printable(reason)
        self.failed[key] = f"{self.failed[key]}{BETWEEN_REASONS}{reason}" if key in self.failed else reason

    def timed(self, share: str, began: float) -> float:
        """Add the time since `began` to a share of the work; return the time now."""
        now = time.perf_counter()
        self.seconds[share] = self.seconds.get(share, 0.0) + now - began
        return now


@contextmanager
def metered(url: str, set_name: str, meter: Callable[[int], None]) -> Iterator[None]:
    """Let `meter` hear of the samples that tasks of this process finish.

    After an error, or Ctrl-C, tasks that were begun meanwhile end at what they tell next: this process can only end
    with its threads.
    """
    over = Event()
    _METERS[url, set_name], before = meter, _OVER.set(over)
    try:
        yield
    except BaseException:
        over.set()
        raise
    finally:
        _OVER.reset(before)
        del _METERS[url, set_name]


def tell(url: str, set_name: str, samples: int) -> None:
    """Report samples of a shard as finished; Unwanted where nobody waits for the shard any more."""
    if (over := _OVER.get()) is not None and over.is_set():
        raise Unwanted
    if (meter := _METERS.get((url, set_name))) is not None:
        meter(samples)


def write_shard(
    features: FeatureSet,
    shard: int,
    arrays: dict[str, np.ndarray],
    receipt: Receipt,
    shared: tuple[FeatureSet, int] | None = None,
) -> None:
    """Write and seal all arrays of a shard; `shared` as of `FeatureSet.write`."""
    began = time.perf_counter()
    features.write(shard, arrays, shared)
    receipt.duration = receipt.timed("write", began) - receipt.began
