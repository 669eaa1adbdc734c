"""What hears of finished samples."""

import pytest

from xret.pipeline.extraction import shards
from xret.pipeline.extraction.shards import metered, tell


def test_sets_of_one_name_in_two_stores_are_heard_apart():
    heard = []
    with metered("a.zarr", "grid", lambda count: heard.append(("a", count))):
        with metered("b.zarr", "grid", lambda count: heard.append(("b", count))):
            tell("a.zarr", "grid", 3)
            tell("b.zarr", "grid", 4)
        tell("a.zarr", "grid", 5)
        tell("b.zarr", "grid", 6)
    assert heard == [("a", 3), ("b", 4), ("a", 5)]


def test_nothing_is_kept_after_a_failure():
    with pytest.raises(ZeroDivisionError), metered("a.zarr", "grid", print):
        _ = 1 / 0
    assert shards._METERS == {}
