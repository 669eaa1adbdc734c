"""Trainings beside each other: how many fit, and what their processes share."""

import os
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import numpy as np
import pytest
import torch
from small_ablations import Stores, plan_of

from xret.heads.ablation.cells import Cell
from xret.heads.series.processes import at_once, load_features

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    return Stores(tmp_path_factory)


def test_what_only_one_cell_stumbles_over_is_left_to_it(stores, tmp_path, monkeypatch):
    cells = [Cell(str(tmp_path / v.name), stores(), v.recipe, 0, "test", "cpu") for v in plan_of().variants]
    Path(cells[0].run).mkdir()  # something that is no run
    assert len(load_features(cells)._columns) == 2
    monkeypatch.setattr("xret.heads.series.processes.batches_of", lambda *_: (_ for _ in ()).throw(OSError("disk")))
    assert not load_features(cells)._columns


def test_processes_that_are_started_share_the_memory_of_the_features(stores, tmp_path):
    plan = plan_of(settings=["runtime.cache=pinned"])
    cells = [Cell(str(tmp_path / v.name), stores(), v.recipe, 0, "test", "cpu") for v in plan.variants]
    ours = load_features(cells)
    theirs = ForkingPickler.loads(ForkingPickler.dumps(ours))
    assert len(ours._columns) == 2  # global features and word ids, for both cells
    assert ours._columns.keys() == theirs._columns.keys()
    for key, column in ours._columns.items():
        column.table[0] = 7
        assert (theirs._columns[key].table[0] == 7).all()
        assert torch.equal(column.fetch(np.array([2, 1]))(), theirs._columns[key].fetch(np.array([2, 1]))())


def test_on_a_cpu_cells_beside_each_other_need_cores(monkeypatch, capsys):
    cpu = torch.device("cpu")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    for threads, jobs, expected in ((1, 4, 4), (1, 9, 8), (3, 4, 2), (8, 4, 1), (16, 2, 1), (4, 1, 1)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert at_once(jobs, cpu) == expected
        said = capsys.readouterr().err
        assert bool(said) is (expected < jobs)
        assert ("OMP_NUM_THREADS=1" in said) is (expected < jobs and threads > 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(1))
    assert at_once(2, cpu) == 1
    assert capsys.readouterr().err.startswith(
        "--jobs 2: 1 at once, because each takes 4 threads and this machine has 1 core"
    )
    assert at_once(4, torch.device("cuda")) == 4
