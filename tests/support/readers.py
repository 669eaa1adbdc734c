"""What readers see of a store while another process writes to it; each function raises if it is not whole shards."""

import re
from dataclasses import replace

import numpy as np
from small_extraction import SMALL

from xret.pipeline.data.manifest import load_manifest
from xret.pipeline.errors import CacheError
from xret.pipeline.extraction.extraction import extract
from xret.pipeline.reading.batches import stored_batches
from xret.pipeline.store import FeatureCache
from xret.pipeline.store.upkeep.contents import describe
from xret.pipeline.store.upkeep.verify import verify

NOT_YET = r"no feature cache is there|was never finished|no feature set fits|has no features of|lacks \d+ of \d+ shard"
FIELDS = {"image_fields": {"local", "global"}, "caption_fields": {"token"}}


def write(manifest, url):
    """Extract as the writer does whom others read; a picture is broken, so that the set's attributes change too."""
    extract(load_manifest(manifest), str(url), replace(SMALL, on_error="skip", workers=1))


def list_sets(url, whole):
    """As `xret cache ls` and `info` do."""
    finished = {one.path: one for one in describe(whole).sets}
    facts = describe(url)
    for one in facts.sets:
        assert one.failed <= finished[one.path].failed
        assert one.padding is None or 0 <= one.padding < 1, one.padding


def check(url, _whole):
    """As `xret cache verify` does."""
    found = verify(url)
    assert found.ok, found.damaged


def read(url, whole):
    """As whoever opens sets and reads what is marked as done: all rows are those of the finished store."""
    cache, truth = FeatureCache.open(url), FeatureCache.open(whole)
    for path in cache.set_paths():
        ours, theirs = cache.set_at(path), truth.set_at(path)
        for shard in np.flatnonzero(ours.done()).tolist():
            rows = np.arange(*ours.rows_in(shard))
            assert np.array_equal(ours.status[rows], theirs.status[rows])
            for name in ("local", "global_") if ours.channels else ("token",):
                assert np.array_equal(getattr(ours, name)(rows), getattr(theirs, name)(rows), equal_nan=True)


def load(url, whole):
    """As training does: a split that is there has all its samples, in their order."""
    opened, truth = FeatureCache.open(url), FeatureCache.open(whole)
    theirs = stored_batches(truth.image_set(), truth.caption_set(), "train", **FIELDS)
    ours = stored_batches(opened.image_set(), opened.caption_set(), "train", **FIELDS)
    assert (ours.images, ours.captions, ours.skipped) == (theirs.images, theirs.captions, theirs.skipped)
    for name in ("image_features", "caption_features"):
        for one, other in zip(getattr(ours, name)(7), getattr(theirs, name)(7), strict=True):
            for field in ("length", "local", "global_", "token"):
                a, b = getattr(one, field), getattr(other, field)
                assert (a is None and b is None) or a.equal(b)


READERS = [list_sets, check, read, load]


def sees_whole_shards(reader, url, whole):
    """Return whether a reader got all it wants, and not a sentence that it is not there yet."""
    try:
        reader(str(url), str(whole))
    except CacheError as error:
        assert re.search(NOT_YET, str(error)), error
        return False
    return True
