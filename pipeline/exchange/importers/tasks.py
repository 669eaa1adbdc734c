"""The task that imports: one shard, read from the source, checked and written once. It runs on any Dask worker."""

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np

from ...cache import FAILED, OK, FeatureCache, ImageSet
from ...cache.facts import require_dtype, require_on_error
from ...cache.layout import DEFAULT_SPLITS
from ...data.regions import REGION_ARRAYS, Regions, lay_out
from ...errors import CacheError, SampleError
from ...extraction.shards import Receipt, tell, write_shard
from . import open_source
from .source import Source, SourceError, shown

_KINDS = {"f": "floats", "iu": "whole numbers", "fiu": "numbers"}  # of NumPy's dtypes
_opening = threading.Lock()


@dataclass(frozen=True)
class ImportOptions:
    """How to import; the command line's options, with its defaults."""

    format_: str  # one of `FORMATS` or `EMBEDDINGS`
    source: Path  # file or folder of the features
    arrays: Mapping[str, str] = field(default_factory=dict)  # for ``hdf5``, the name in the file of each role
    dtype: str = "float16"  # ``float16`` or ``float32``
    splits: tuple[str, ...] = DEFAULT_SPLITS  # which splits to write now
    on_error: str = "fail"  # ``fail`` or ``skip``
    workers: int | None = None  # threads that read and write; None: one a core, at least two
    scheduler: str | None = None  # address of a Dask scheduler; None: this process
    encoder: tuple[str, ...] = ()  # of `EMBEDDINGS`, the model that made them, or that of images and that of captions

    def __post_init__(self) -> None:
        require_dtype(self.dtype)
        require_on_error(self.on_error)


@dataclass(frozen=True)
class ImportJob:
    """What the task of a shard is told."""

    options: ImportOptions  # with an absolute source
    dataset: str  # the data set's name
    url: str = ""  # the cache
    set_name: str = ""  # the feature set
    entries: tuple[int, ...] = ()  # the source's entry of each image of the shard; -1 for an image that it lacks
    writer: str | None = None  # on an object store, whose lease it is to write under


@contextmanager
def looked_through(job: ImportJob) -> Iterator[Source]:
    """Look through the source of a job, for this block and for the tasks that run here meanwhile.

    Raises:
        SourceError: there is nothing, or it is not of the format.
    """
    try:
        yield _source(job)
    finally:
        _open.cache_clear()  # its files may change from now on


def _source(job: ImportJob) -> Source:
    options = job.options
    with _opening:
        return _open(options.format_, options.source, tuple(options.arrays.items()), job.dataset)


@lru_cache(maxsize=4)
def _open(format_: str, source: Path, arrays: tuple[tuple[str, str], ...], dataset: str) -> Source:
    return open_source(format_, source, dataset, dict(arrays))


def _source_of(features: ImageSet, job: ImportJob) -> Source:
    """Return the source that a set was begun with; a worker looks through it once, and again if it was replaced."""
    for _ in range(2):
        source = _source(job)
        if features.identity == {"encoder": job.options.format_, **source.identity}:
            return source
        _open.cache_clear()
    raise SourceError(
        f"{job.options.source} is not what '{features.name}' was begun with; give every worker the same files and"
        " import again"
    )


def write_imported_shard(job: ImportJob, shard: int) -> Receipt:
    """Read the features of the images of one shard and write it.

    Raises:
        SourceError: the source is not what it was when the import began.
        SampleError: the features of an image are damaged, and the job does not skip.
        CacheError: a value does not fit the set's dtype.
    """
    features = FeatureCache.open(job.url, job.writer).image_set(job.set_name)
    receipt = Receipt(shard, len(job.entries))
    began = time.perf_counter()
    source = _source_of(features, job)
    first, last = features.rows_in(shard)
    names, ids = features.cache.file_names(first, last), features.cache.ids(first, last)
    arrays = features.blank_shard()
    for row in np.argsort(job.entries, kind="stable").tolist():  # in the source's order: a disk likes that
        try:
            regions = _read(source, job.entries[row], features, names[row])
            lay_out(arrays, row, regions)
            arrays["size"][row], arrays["status"][row] = regions.size, OK
        except SampleError as error:
            if job.options.on_error == "fail":
                advice = "repair the source, or record such images with --on-error skip"
                raise SampleError(names[row], f"{error.reason}; {advice}") from error
            receipt.fail(ids[row], f"{names[row]}: {error.reason}")
            arrays["status"][row] = FAILED
        tell(job.url, job.set_name, 1)
    receipt.timed("read", began)
    write_shard(features, shard, arrays, receipt)
    return receipt


def _read(source: Source, entry: int, features: ImageSet, name: str) -> Regions:
    """Return the regions of an entry if they fit the set; refuse them otherwise."""
    if entry < 0:
        raise SampleError(name, "the source has no features of it")
    regions = source.read(entry)
    local = regions.local
    if local.ndim != 2 or local.shape[1] != source.channels or not 1 <= len(local) <= features.rows:
        found = " x ".join(map(str, local.shape))
        expected = f"1 to {features.rows} regions x {source.channels} channels"
        raise SampleError(name, f"its features are {found}, not {expected}")
    shapes: dict[str, tuple[int, ...]] = {key: (len(local), *REGION_ARRAYS[key][0]) for key in source.extras}
    for key, shape in {"local": local.shape, **shapes}.items():
        values, kinds = getattr(regions, key), {"local": "f", "classes": "iu"}.get(key, "fiu")
        if values is None or values.shape != shape or values.dtype.kind not in kinds:
            found = "missing" if values is None else shown(values)
            expected = f"{' x '.join(map(str, shape))} {_KINDS[kinds]}"
            raise SampleError(name, f"its {key} are {found}, not {expected}")
        if not np.isfinite(values).all():
            raise SampleError(name, f"its {key} hold NaN or infinity")
        if key != "local":
            kept = np.dtype(REGION_ARRAYS[key][1])
            largest = np.iinfo(kept).max if kept.kind == "i" else np.finfo(kept).max
            if ((values > largest) | (values < -largest)).any():
                raise SampleError(name, f"its {key} hold values beyond {kept}")
    if not all(0 <= side < 2**31 for side in regions.size):
        raise SampleError(name, f"its size is {regions.size[0]:.3g} x {regions.size[1]:.3g} pixels")
    peak = float(np.abs(local).max())
    if peak > float(np.finfo(features.dtype).max):
        raise CacheError(f"'{name}': a value of {peak:.3g} is beyond {features.dtype}; import with --dtype float32")
    return regions
