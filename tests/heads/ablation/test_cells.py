"""The cells of an ablation: each equals a run alone, in turn, in processes beside each other, and on a cluster."""

import os
import shutil
import signal
import time
import weakref
from pathlib import Path

import pytest
import torch
from distributed import LocalCluster
from small_ablations import FAILING, MARGIN, SMALL, Stores, ablated, numbers, plan_of, started, weights

from xret.heads.ablation.plan import plan_variation
from xret.heads.evaluation.evaluation import Evaluation, Result
from xret.heads.training.training import train
from xret.pipeline.cache.rows import Rows
from xret.pipeline.errors import CacheError, RunError

# Dask's own threads and sockets outlive a closed cluster for a moment.
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:.*:DeprecationWarning:distributed"),
]


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    return Stores(tmp_path_factory)


@pytest.fixture(scope="module")
def whole(stores, tmp_path_factory):
    """An ablation that nobody disturbed: its folder and what it returned."""
    out = tmp_path_factory.mktemp("whole") / "out"
    return out, ablated(stores(), plan_of(), out, seeds=2, device="cpu")


@pytest.mark.parametrize("place", ["auto", "pinned", "stream"])
def test_cells_read_the_features_once_and_equal_a_run_alone(stores, tmp_path, monkeypatch, place):
    """The last of two cells: it finds all in memory, or its shards checked and open."""
    read, original = [], Rows._open
    monkeypatch.setattr(Rows, "_open", lambda self, shard: read.append((self._name, shard)) or original(self, shard))
    settings = [*SMALL[:-1], "schedule.epochs=1", f"runtime.cache={place}"]
    plan = plan_variation("vsepp", ["aggregator.image=average,gpo"], settings)
    entries = ablated(stores(), plan, tmp_path / "out", device="cpu")
    of_train = [one for one in read if "images" in one[0] and one[1] < 2]  # evaluation opens what it reads
    assert sorted(of_train) == sorted(set(of_train))
    assert {shard for _, shard in of_train} == {0, 1}
    train(stores(), plan.variants[-1].recipe, tmp_path / "alone", device="cpu", seed=0)
    for name, value in weights(tmp_path / "alone").items():
        assert torch.equal(weights(entries[-1].run)[name], value)


def test_cells_of_other_features_begin_without_those_before_in_memory(stores, tmp_path, monkeypatch):
    """`auto` would otherwise find less room than for a run alone, and shuffle otherwise."""
    seen = []

    def note(cell, resident):
        same = seen and seen[-1][1]() is resident
        alive = sum(reference() is not None for _, reference, _ in seen)
        seen.append((cell.recipe.data.image, weakref.ref(resident), (bool(same), alive > 0)))
        return "not trained"

    monkeypatch.setattr("xret.heads.ablation.ablation.run_cell", note)
    entries = ablated(stores(), plan_of(MARGIN, "data.image=auto,grid"), tmp_path / "out", seeds=2, device="cpu")
    assert [image for image, _, _ in seen] == ["auto"] * 4 + ["grid"] * 4
    assert [rest for _, _, rest in seen] == ([(False, False)] + [(True, True)] * 3) * 2
    assert [entry.cell["data.image"] for entry in entries] == ["auto", "auto", "grid", "grid"] * 2


def test_too_little_shared_memory_is_a_sentence(stores, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9, 9, 0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(4))
    settings = ["runtime.cache=pinned"]
    with pytest.raises(RunError, match=r"the features take .* has 0\.0 kB free; set runtime\.cache to stream, or"):
        ablated(stores(), plan_of(settings=settings), tmp_path / "out", device="cpu", jobs=2)


@pytest.mark.parametrize("seeds", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_processes_give_the_same_numbers(stores, whole, tmp_path, monkeypatch, seeds):
    """As many processes as seeds: each takes seconds to begin."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(2))
    plan = plan_of("loss.triplet.margin=0.1", settings=["runtime.cache=pinned"])
    entries = ablated(stores(), plan, tmp_path / "out", seeds=seeds, device="cpu", jobs=2)
    assert numbers(entries) == numbers(whole[1][:seeds])
    logs = sorted((tmp_path / "out").rglob("seed=*.log"))
    assert len(logs) == seeds
    assert "epoch 2/2" in logs[0].read_text()
    assert "epoch 2/2: loss" in (logs[0].with_suffix("") / "train.log").read_text()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
def test_processes_that_share_the_tables_of_a_gpu_give_the_numbers_of_a_run_alone(stores, tmp_path):
    plan = plan_of(settings=["runtime.cache=device"])
    entries = ablated(stores(), plan, tmp_path / "out", device="cuda", jobs=2)
    for entry, variant in zip(entries, plan.variants, strict=True):
        train(stores(), variant.recipe, tmp_path / variant.name, device="cuda", seed=0)
        for name, value in weights(tmp_path / variant.name).items():
            assert torch.equal(weights(entry.run)[name], value)


@pytest.mark.slow
def test_a_process_that_dies_takes_one_cell_with_it(stores, tmp_path, monkeypatch):
    out, plan = tmp_path / "out", plan_of("loss.triplet.margin=0.1,0.2,0.3")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(2))
    victim = str(out / plan.variants[0].name / "seed=0")
    monkeypatch.setattr("xret.heads.series.processes._serve", DiesIn(victim))
    entries = ablated(stores(), plan, out, device="cpu", jobs=2)
    assert [entry.status for entry in entries] == ["failed", "done", "done"]
    assert "its process ended with exit code -9" in entries[0].error


@pytest.mark.slow
def test_the_processes_end_with_the_one_that_began_them(stores, tmp_path):
    """Else a second start would train the same cells beside them."""
    out = tmp_path / "out"
    child = started(stores(), out, 2, [*SMALL[:-1], "schedule.epochs=100000"])
    while child.poll() is None and len(list(out.rglob("state.pt"))) < 2:
        time.sleep(0.05)
    workers = [int(pid) for pid in Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()]
    assert len(workers) >= 2
    child.kill()
    child.wait()
    until = time.monotonic() + 10
    while any(running(pid) for pid in workers) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(running(pid) for pid in workers)


def running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


RESULT = Result("test", "full", 4, 8, 2.0, 0, "pessimistic", {}, {}, 5.0, 5 / 6, None, None)
EVALUATION = Evaluation(("run",), ("store",), (1,), (RESULT,))


class DiesIn:
    """In the place of a process's work: it is killed by one cell and answers others at once."""

    def __init__(self, run):
        self.run = run

    def __call__(self, cells, work, threads, resident):
        try:
            while True:
                if cells.recv().run == self.run:
                    os.kill(os.getpid(), signal.SIGKILL)
                cells.send(EVALUATION)
        except EOFError:
            pass


def test_a_cluster_trains_the_same_cells(stores, whole, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with LocalCluster(n_workers=1, threads_per_worker=2, processes=False, dashboard_address=":0") as cluster:
        address = cluster.scheduler_address
        entries = ablated(stores(), plan_of(), "out", seeds=2, device="cpu", scheduler=address)
        assert numbers(entries) == numbers(whole[1])
        assert "Dask dashboard: http://" in capsys.readouterr().err
        failing = ablated(stores(), plan_of(FAILING), "other", device="cpu", scheduler=address)
    assert [entry.status for entry in failing] == ["failed", "done"]
    assert [entry.run for entry in entries] == [
        str(tmp_path / "out" / Path(entry.run).relative_to(whole[0])) for entry in whole[1]
    ]


def test_no_scheduler(stores, tmp_path, monkeypatch):
    monkeypatch.setattr("xret.pipeline.extraction.schedule.PATIENCE", 1.0)
    with pytest.raises(CacheError, match="no Dask scheduler answers"):
        ablated(stores(), plan_of(), tmp_path / "out", scheduler="tcp://127.0.0.1:9")
