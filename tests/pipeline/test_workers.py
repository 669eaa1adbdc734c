"""Tasks on a cluster: few stand at its scheduler, errors name the worker, and a task runs wherever there is room."""

import pytest
from distributed import Client, LocalCluster
from distributed.security import Security
from small_ablations import DASK

from xret.pipeline.errors import CacheError, OutputError, SampleError
from xret.pipeline.workers import connect, run_tasks

pytestmark = DASK


@pytest.fixture(scope="module")
def cluster():
    with LocalCluster(n_workers=2, threads_per_worker=2, processes=False, dashboard_address=":0") as started:
        yield started


@pytest.mark.parametrize("each", [1, 2, 3])
def test_few_tasks_stand_at_the_scheduler(cluster, each):
    stand = []
    with connect(cluster.scheduler_address) as client:
        for task, square in run_tasks(client, lambda number: number**2, range(100), each=each):
            assert square == task**2
            stand.append(len(cluster.scheduler.tasks))
    assert len(stand) == 100 and max(stand) <= 2 * min(each, 2) + 1  # the last one is not forgotten yet


@pytest.mark.parametrize(
    ("error", "raised", "sentence"),
    [
        (SampleError("a.jpg", "it is broken"), SampleError, r"^a\.jpg: it is broken \(worker [01]\)$"),
        (CacheError("no store"), CacheError, r"^no store \(worker [01]\)$"),
        (OSError(28, "No space left", "/s/c.0"), OutputError, r"^/s/c\.0: No space left \(worker [01]\)$"),
        (ZeroDivisionError("division"), ZeroDivisionError, "^division$"),
    ],
)
def test_what_fails_names_the_worker(cluster, error, raised, sentence):
    def fail(_):
        raise error

    with Client(cluster, set_as_default=False) as client, pytest.raises(raised, match=sentence):
        list(run_tasks(client, fail, [0]))


def test_a_cluster_with_certificates_is_reached_by_the_current_client():
    pytest.importorskip("cryptography", reason="Dask makes certificates with cryptography")
    how = {"security": Security.temporary(), "protocol": "tls://", "dashboard_address": ":0"}
    with LocalCluster(n_workers=1, processes=False, **how) as cluster:
        address, sentence = cluster.scheduler_address, r"no Dask scheduler answers at tls://.* \(.*TLS"
        with pytest.raises(CacheError, match=sentence), connect(address):
            pass
        with Client(cluster), connect(address) as client:
            assert list(run_tasks(client, abs, [-1])) == [(-1, 1)]
