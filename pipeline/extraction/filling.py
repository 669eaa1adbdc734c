"""Fills a feature set: one Dask task a missing shard, whether it encodes or imports.

Only this process marks a shard as done, when the task's receipt comes, so that a kill at any moment loses at most the
shards in flight.
"""

import os
import time
from collections.abc import Callable
from typing import Any

import zarr

from ..cache import FAILED, CaptionSet, ImageSet
from ..cache.records import record_failures
from ..cache.upkeep.verify import broken_shards
from ..errors import CacheError
from ..progress import Progress
from ..versions import note_version
from ..wording import printable
from .schedule import run_here, run_on_cluster, shard_task
from .shards import Receipt, metered
from .summary import SetSummary
from .updates.reuse import forgetting


def fill(
    features: ImageSet | CaptionSet,
    work: Callable[[Any, int], Receipt],
    job_of: Callable[[int], Any],
    splits: list[str],
    *,
    workers: int | None = None,
    scheduler: str | None = None,
    repair: Callable[[list[int]], None] | None = None,
) -> SetSummary:
    """Compute the shards of these splits that are not done yet.

    Args:
        features: the set.
        work: takes a job and a shard, writes the shard and returns a receipt.
        job_of: gives the job of a shard.
        splits: which.
        workers: threads of this process; None: one a core, at least two.
        scheduler: address of a Dask scheduler; None: this process.
        repair: is called with the shards that are damaged or hold samples that failed, which are then computed again;
            None: they are not.

    Raises:
        CacheError: no sample of a split could be read; or as for `run_on_cluster`.
        XretError: whatever a task raises.
    """
    note_version("dask")
    marks = features.cache.store.open_array(f"{features.path}/done", writable=True)
    wanted = [shard for split in splits for shard in features.blocks.of_split(split)]
    if repair is not None:
        broken = sorted(set(broken_shards(features)).intersection(wanted))
        repair(broken)
        for shard in broken:
            marks[shard] = 0
    done = features.done()
    missing = [shard for shard in wanted if not done[shard]]
    total, left = (sum(map(features.samples_in, shards)) for shards in (wanted, missing))
    receipts = _Receipts(features, marks)
    began = time.monotonic()
    with Progress(printable(features.name), total, features.modality, done=total - left) as progress:
        task = shard_task(work, job_of, features.name)
        if not scheduler:
            with forgetting(), metered(features.cache.address, features.name, progress.update):
                run_here((task(shard, 0) for shard in missing), workers or max(2, os.cpu_count() or 2), receipts.take)
        elif missing:
            run_on_cluster(task, missing, scheduler, lambda receipt: progress.update(receipts.take(receipt)))
    seconds = time.monotonic() - began
    filled = type(features)(features.cache, features.name)
    for split in splits:
        _require_some(filled, split, marks)
    return SetSummary(
        name=features.name,
        samples=receipts.samples,
        found=receipts.found,
        shards=len(missing),
        shards_before=len(wanted) - len(missing),
        failed=int((filled.status == FAILED).sum()),
        reasons=tuple(reason for _, reason in filled.failures),
        seconds=seconds,
        shares=receipts.shares,
    )


class _Receipts:
    """Marks the shards whose receipts come, and adds the receipts up."""

    def __init__(self, features: ImageSet | CaptionSet, marks: "zarr.Array[Any]") -> None:
        self.features, self.marks = features, marks
        self.samples = self.found = 0
        self.shares = {"read": 0.0, "encode": 0.0, "write": 0.0}

    def take(self, receipt: Receipt) -> int:
        """Record which samples failed, then mark the shard; return how many samples it has."""
        if receipt.failed or self.features.failed:
            ids = self.features.cache.ids(*self.features.blocks.images(receipt.shard))
            record_failures(self.features, ids, receipt.failed)
        self.marks[receipt.shard] = 1
        self.samples += receipt.samples - receipt.failures - receipt.found
        self.found += receipt.found
        for share, seconds in receipt.seconds.items():
            self.shares[share] += seconds
        return receipt.samples


def _require_some(features: ImageSet | CaptionSet, split: str, marks: "zarr.Array[Any]") -> None:
    """Refuse a split whose samples have all failed, and let it be tried again."""
    if not (features.status[features.rows_of(split)] == FAILED).all():
        return
    cache = features.cache
    for shard in features.blocks.of_split(split):
        marks[shard] = 0
    ids = cache.ids(*cache.splits[split])
    record_failures(features, ids, {})
    example = next(reason for key, reason in features.failures if key in ids)
    what = features.modality[:-1]
    raise CacheError(
        f"no {what} of split '{split}' could be read; for example {example}; fix that, or choose other --splits"
    )
