"""Imports of features that others extracted, and what a set of them has to hold."""

import os

import numpy as np
import pytest
from region_sources import ARRAYS, CHANNELS

from xret.pipeline.data.manifest import load_manifest
from xret.pipeline.exchange.importers.source import ImportOptions, SourceError
from xret.pipeline.exchange.importing import import_features
from xret.pipeline.store import FeatureCache
from xret.pipeline.store.inspect import verify


def bring(world, source, format_, url=None, **options):
    """Import and return summary and cache; of HDF5 the arrays that `World` writes, unless others are named."""
    url, own = str(url or world.folder / "s.zarr"), {"arrays": ARRAYS} if format_ == "hdf5" else {}
    summary = import_features(load_manifest(world.manifest), url, ImportOptions(format_, source, **own | options))
    return summary, FeatureCache.open(url)


def refused(sentence, *source, error=SourceError, **options):
    """Assert that an import is refused."""
    with pytest.raises(error, match=sentence):
        bring(*source, **options)


def assert_holds(cache, expected, extras=(), size=True, dtype=np.float16, kind="roi"):
    """Compare a set with the regions of all images, value by value, and what follows them."""
    images = cache.image_set()
    rows = np.arange(cache.images)
    local, global_ = images.local(rows), images.global_(rows)
    longest = max(len(regions["local"]) for regions in expected)
    assert local.shape == (len(expected), longest, CHANNELS)
    assert local.dtype == dtype
    for row, regions in enumerate(expected):
        count = len(regions["local"])
        assert images.length[row] == count
        assert np.array_equal(local[row, :count], regions["local"].astype(dtype))
        assert (local[row, count:] == 0).all()
        mean = sum(regions["local"].astype(np.float64)) / count
        assert np.allclose(global_[row], mean, rtol=2e-3, atol=1e-6)
        for name in extras:
            values = images.array(name, np.array([row]))[0]
            assert np.array_equal(values[:count], regions[name])
            assert (values[count:] == (-1 if name == "classes" else 0)).all()
        assert tuple(images.array("size", np.array([row]))[0]) == (regions["size"] if size else (0, 0))
    assert (images.status == 0).all()
    assert images.kind == kind
    assert set(images.array_names) == {"local", "global", "length", "size", "status", *extras}
    report = verify(cache.url)
    assert report.ok, report


class Bomb:
    """What makes a folder when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("exploded",)
