"""What all tasks that fill a shard have in common: they report progress, write, and return a receipt."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from ..cache import FeatureSet

# What hears of finished samples, by the URL and name of the set that is filled, since a shard takes long. Only tasks of
# this process are heard.
_METERS: dict[tuple[str, str], Callable[[int], None]] = {}


@dataclass
class Receipt:
    """What a finished task returns."""

    shard: int
    samples: int
    found: int = 0  # of them, those that another generation of the cache had
    failed: dict[str, str] = field(default_factory=dict)  # id of a failed sample → reason
    seconds: dict[str, float] = field(default_factory=dict)  # by share of the work: ``read``, ``encode``, ``write``
    duration: float = 0.0  # seconds that the task took, also those in which it waited for the device
    began: float = field(default_factory=time.perf_counter)

    def timed(self, share: str, began: float) -> float:
        """Add the time since `began` to a share of the work; return the time now."""
        now = time.perf_counter()
        self.seconds[share] = self.seconds.get(share, 0.0) + now - began
        return now


@contextmanager
def metered(url: str, set_name: str, meter: Callable[[int], None]) -> Iterator[None]:
    """Let `meter` hear of the samples that tasks of this process finish."""
    _METERS[url, set_name] = meter
    try:
        yield
    finally:
        del _METERS[url, set_name]


def tell(url: str, set_name: str, samples: int) -> None:
    """Report samples of a shard as finished."""
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
