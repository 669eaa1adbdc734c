"""A series of trainings on a Dask cluster; what they compute is tested where they come from."""

import threading
from types import SimpleNamespace

import pytest
from distributed import LocalCluster

from xret.heads.series import cluster
from xret.heads.series.processes import Series

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:.*:DeprecationWarning:distributed"),
]


told = threading.Event()


def work(job, _):
    """Do a job at once, or the first only when a note was printed."""
    if job.run == "runs/a":
        told.wait(60)
    return job.run


def test_a_training_that_does_not_end_is_told_of(monkeypatch, capsys):
    monkeypatch.setattr(cluster, "SILENCE", 0.2)
    real, recorded = cluster.some_of, []

    def some_of(lines):
        told.set()
        return real(lines)

    monkeypatch.setattr(cluster, "some_of", some_of)
    recipe = SimpleNamespace(data=SimpleNamespace(image="i", text="t"))
    jobs = [SimpleNamespace(run=f"runs/{name}", store="s", recipe=recipe, device="cpu") for name in "ab"]

    series = Series(iter([*jobs, None]).__next__, work, lambda job, run: recorded.append(run), pytest.fail)
    with LocalCluster(n_workers=1, threads_per_worker=2, processes=False, dashboard_address=":0") as local:
        cluster.on_cluster(series, local.scheduler_address, "series", all_at_once=False)
    assert sorted(recorded) == ["runs/a", "runs/b"]
    notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("Note: ")]
    assert notes[0].startswith("Note: no training has ended for 0.2 seconds: runs/a on inproc://")
    assert "run the same command again: it goes on where it was" in notes[0]
