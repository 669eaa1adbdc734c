"""What hears of finished samples."""

import threading

import pytest
from dask.delayed import delayed

from xret.pipeline.extraction import shards
from xret.pipeline.extraction.schedule import run_here
from xret.pipeline.extraction.shards import Receipt, metered, tell


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


@pytest.mark.parametrize("stop", [KeyboardInterrupt, ZeroDivisionError])
def test_a_task_under_way_ends_when_what_began_it_is_stopped(stop):
    stopped, ended, told = threading.Event(), threading.Event(), []

    def long_task():
        try:
            stopped.wait(20)
            tell("a.zarr", "grid", 1)
            told.append("went on")
        finally:
            ended.set()

    def record(_receipt):
        raise stop

    tasks = [delayed(long_task, pure=False)(), delayed(Receipt, pure=False)(0, 1)]
    with pytest.raises(stop), metered("a.zarr", "grid", told.append):
        run_here(tasks, 2, record)
    stopped.set()
    assert ended.wait(20)
    assert told == []
    with metered("a.zarr", "grid", told.append):
        tell("a.zarr", "grid", 2)  # another one is not stopped
    assert told == [2]
