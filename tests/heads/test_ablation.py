"""Ablations: what they plan and refuse, that a kill changes nothing, and their tables against hand calculation."""

import csv
import io
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
import weakref
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import numpy as np
import pytest
import torch
from distributed import LocalCluster
from safetensors.torch import load_file
from small_store import make_store

from xret.heads import ablation_cells
from xret.heads.ablation import ROWS, ablate
from xret.heads.ablation_cells import Cell, at_once, load_features
from xret.heads.ablation_plan import grid_names, plan_grid, plan_variation, read_grid
from xret.heads.ablation_table import METRICS, as_csv, as_latex, as_text, plot, plotted_key, summarise
from xret.heads.evaluation import evaluate
from xret.heads.recipe import load_recipe
from xret.heads.run import Run
from xret.heads.training import train
from xret.pipeline.errors import CacheError, DeviceError, RecipeError, RunError
from xret.pipeline.rows import Rows

# Dask's own threads and sockets outlive a closed cluster for a moment.
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:.*:DeprecationWarning:distributed"),
]
NARROW = ["model.dim=8", "adapter.words.word_dim=4"]
SMALL = [*NARROW, "data.batch_size=8", "schedule.epochs=2"]
MARGIN = "loss.triplet.margin=0.1,0.2"
TOO_LARGE = "adapter.words.word_dim=1000000000000,4"


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """Give the store of a kind of images and a kind of captions, made once."""
    made = {}

    def of(image="grid", text="words"):
        if (image, text) not in made:
            url = tmp_path_factory.mktemp("store") / "small.zarr"
            made[image, text] = make_store(url, train=12, val=4, test=4, image=image, text=text)
        return made[image, text]

    return of


def plan_of(*vary, settings=(), recipe="vsepp"):
    fixed = [setting for setting in SMALL if not any(text.startswith(setting.split("=")[0]) for text in vary)]
    return plan_variation(recipe, vary or [MARGIN], [*fixed, *settings])


def numbers(entries):
    """What must repeat: all but where the runs lie."""
    return [{key: value for key, value in entry.items() if key != "run"} for entry in entries]


# --- What is planned


def test_every_combination_is_a_variant_with_its_own_folder():
    plan = plan_of(MARGIN, "similarity=cosine", "optimizer.lr=1e-2,0.001")
    assert [variant.values for variant in plan.variants] == [
        {"loss.triplet.margin": margin, "similarity": "cosine", "optimizer.lr": lr}
        for margin in (0.1, 0.2)
        for lr in (0.01, 0.001)
    ]
    for variant in plan.variants:
        assert variant.recipe.loss["triplet"]["margin"] == variant.values["loss.triplet.margin"]
        assert variant.recipe.optimizer.lr == variant.values["optimizer.lr"]
    names = [variant.name for variant in plan.variants]
    assert names[0] == "loss.triplet.margin=0.1,similarity=cosine,optimizer.lr=0.01"
    assert len(set(names)) == 4


def test_keys_that_vary_together():
    plan = plan_variation("setdiv", ["aggregator.image.slots,aggregator.text.slots=2,3"], NARROW)
    assert [v.values for v in plan.variants] == [
        {"aggregator.image.slots": k, "aggregator.text.slots": k} for k in (2, 3)
    ]
    assert [v.recipe.aggregator["text"]["slots"] for v in plan.variants] == [2, 3]


def test_names_are_safe_and_never_collide():
    files = ["a/b", "a=b", "../x", "a b", "a%2Fb", "ä", "a;b", "é" * 200, "é" * 201]
    vary = f"adapter.words.vectors={','.join(files)}"
    names = [variant.name for variant in plan_variation("vsepp", [vary], NARROW).variants]
    assert len(set(names)) == len(files)
    for name in names:
        assert set(name) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-~%=,")
        assert len(name) <= 200


def test_all_faults_are_said_at_once():
    vary = ["loss.triplet.margn=1,2", "similarity=cosine,cosin", "optimizer.lr", "schedule.step=3,x"]
    with pytest.raises(RecipeError) as caught:
        plan_variation("vsepp", [*vary, "model.dim=4,4"], [*NARROW, "data.batchsize=3"])
    sentence = str(caught.value)
    for fault in (
        "loss.triplet.margn is not a key (did you mean 'margin'?)",
        "did you mean 'cosine'?",
        "--vary 'optimizer.lr' must have the form KEY=V1,V2",
        "schedule.step must be a whole number, not 'x'",
        "--vary 'model.dim=4,4' names a value twice",
        "model.dim is varied and set as well",
        "data.batchsize is not a key",
    ):
        assert sentence.count(fault) == 1, sentence


def test_a_value_in_other_words_is_the_same_value():
    for values in ("0.001,1e-3", "1,1.0", "true,True"):
        with pytest.raises(RecipeError, match="names a value twice"):
            plan_variation("vsepp", [f"optimizer.lr={values}"])
    with pytest.raises(RecipeError, match=r"optimizer\.lr is varied twice"):
        plan_variation("vsepp", ["optimizer.lr=1,2", "optimizer.lr=3"])
    with pytest.raises(RecipeError, match=r"there is no recipe 'setdif' \(did you mean 'setdiv'"):
        plan_variation("setdif", [MARGIN])


def test_the_papers_value_stands_beside_the_recipe_as_it_is_and_no_other():
    paper = [v.paper for v in plan_variation("vsepp/f30k-resnet152-gru", ["loss.triplet.margin=0.1,0.2"]).variants]
    assert paper == [{}, {"f30k": {"rsum": 363.0}}]
    changed = plan_variation("vsepp/f30k-resnet152-gru", ["loss.triplet.margin=0.2"], ["schedule.epochs=1"])
    assert changed.variants[0].paper == {}
    slower = plan_variation("vsepp/f30k-resnet152-gru", ["runtime.precision=float32"])
    assert slower.variants[0].paper == {"f30k": {"rsum": 363.0}}


# --- Ready-made grids


def test_the_grids_that_are_asked_for_are_there():
    wanted = {f"vse-infty-{name}" for name in ("table1", "table4", "table6", "table7", "table11", "table12")}
    wanted |= {"setdiv-table3", "setdiv-table4", "setdiv-b1", "setdiv-b3", "vse-infty-figure4", "vse-infty-figure6"}
    wanted |= {"maxmatch-table3", "maxmatch-table5", "maxmatch-table6"}
    wanted |= {f"gaussian-table{number}" for number in (5, 6, 7, 8)}
    assert wanted <= set(grid_names())
    with pytest.raises(RecipeError, match=r"there is no grid 'setdiv-tabel3' \(did you mean 'setdiv-table3'\?\)"):
        plan_grid("setdiv-tabel3")
    with pytest.raises(RecipeError, match="names a recipe for each of its cells"):
        plan_grid("maxmatch-table6", "setdiv", NARROW)


@pytest.mark.parametrize("name", grid_names())
def test_every_grid_resolves_and_fits_features_of_its_kinds(name, stores, tmp_path, monkeypatch):
    grid = read_grid(name)
    assert set(grid) <= {"source", "recipe", "split", "cells"}
    assert all(set(cell) <= {"label", "recipe", "set", "paper"} for cell in grid["cells"])
    plan = plan_grid(name, settings=NARROW)
    assert (
        len({variant.name for variant in plan.variants}) == len({v.label for v in plan.variants}) == len(grid["cells"])
    )
    for variant in plan.variants:
        for key, value in variant.values.items():
            found = variant.recipe.to_dict()
            for step in key.split("."):
                found = found.get(step, {}) if isinstance(found, dict) else found
            found = found.get("name", 0) if isinstance(found, dict) else found  # a loss of weight 0 is not there
            assert found == value
        assert set(variant.paper) <= set(ROWS.values())
        for row in variant.paper.values():
            assert set(row) <= set(METRICS)
            assert all(0 <= number <= 600 for metric, number in row.items() if metric != "log_circular_variance")
    assert any(variant.paper for variant in plan.variants)
    data = plan.variants[0].recipe.data
    monkeypatch.setattr("xret.heads.ablation.run_cell", lambda *_: "not trained")
    entries = ablate(stores(data.image_kind, data.text_kind), plan, tmp_path / "out", device="cpu")
    assert [entry["error"] for entry in entries] == ["not trained"] * len(plan.variants)


@pytest.mark.parametrize("name", grid_names())
def test_a_papers_value_of_a_grid_is_that_of_the_recipe_where_a_cell_is_the_recipe(name):
    """Two files that a person typed agree; means of five runs (Tables 7 and 8) are other values."""
    for cell in read_grid(name)["cells"]:
        recipe = cell.get("recipe", read_grid(name).get("recipe"))
        if "set" in cell or name in ("gaussian-table7", "gaussian-table8"):
            continue
        expected = load_recipe(recipe, ["model.dim=8"]).to_dict()["expected"]
        for row, values in cell["paper"].items():
            rsum = values if isinstance(values, float) else values.get("rsum")
            known = expected.get(row)
            assert known is None or rsum is None or rsum == pytest.approx(known, abs=1.0), (cell, known)


def test_another_recipe_in_a_grid_has_no_paper_and_keeps_the_settings():
    plan = plan_grid("setdiv-table4", "setdiv", NARROW)
    assert all(variant.paper == {} for variant in plan.variants)
    assert plan.variants[0].recipe.name == "setdiv"
    assert plan.variants[0].recipe.aggregator["image"]["slots"] == 1


@pytest.mark.slow
def test_a_grid_is_trained(stores, tmp_path):
    plan = plan_grid("setdiv-table3", settings=SMALL)
    lines = summarise(ablate(stores("roi"), plan, tmp_path / "out", device="cpu"))
    assert [line.seeds for line in lines] == [1] * 6
    assert [line.paper["rsum"] for line in lines] == [491.7, 490.5, 499.6, 483.3, 496.1, 500.8]
    assert "paper: F30K" in as_text(lines)


# --- What is trained


@pytest.fixture(scope="module")
def whole(stores, tmp_path_factory):
    """An ablation that nobody disturbed: its folder and what it returned."""
    out = tmp_path_factory.mktemp("whole") / "out"
    return out, ablate(stores(), plan_of(), out, seeds=2, device="cpu")


def test_a_cell_is_a_run_and_its_table(whole):
    out, entries = whole
    assert [(entry["cell"]["loss.triplet.margin"], entry["seed"]) for entry in entries] == [
        (0.1, 0), (0.1, 1), (0.2, 0), (0.2, 1),
    ]  # fmt: skip
    for entry in entries:
        run = Path(entry["run"])
        assert run == out / f"loss.triplet.margin={entry['cell']['loss.triplet.margin']}" / f"seed={entry['seed']}"
        assert Run(run).info["seed"] == entry["seed"]
        assert Run(run).recipe.loss["triplet"]["margin"] == entry["cell"]["loss.triplet.margin"]
        (result,) = json.loads((run / "eval.json").read_text())["results"]
        assert (
            entry["rsum"]
            == result["rsum"]
            == pytest.approx(
                sum(result[side][f"R@{k}"] for side in ("image_to_text", "text_to_image") for k in (1, 5, 10))
            )
        )
        assert (entry["status"], entry["error"], entry["paper"]) == ("done", None, None)
        assert (entry["split"], entry["protocol"], result["images"]) == ("test", "full", 4)


def test_finished_cells_are_kept_and_values_and_seeds_may_be_added(stores, whole, capsys):
    out, entries = whole
    written = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    more = ablate(stores(), plan_of("loss.triplet.margin=0.2,0.1,0.3"), out, seeds=2, device="cpu")
    assert "4 of 6 cells are finished already" in capsys.readouterr().err
    assert more[:4] == [*entries[2:], *entries[:2]]
    assert [entry["cell"] for entry in more[4:]] == [{"loss.triplet.margin": 0.3}] * 2
    assert {path: path.stat().st_mtime_ns for path in written} == written


def test_a_run_that_was_learnt_from_other_stores_as_well_is_no_cell(stores, whole, tmp_path):
    out = shutil.copytree(whole[0], tmp_path / "out")
    file = next(out.glob("*/seed=0/run.json"))
    file.write_text(json.dumps({**json.loads(file.read_text()), "also": ["other 01234567"]}))
    with pytest.raises(RunError, match=r"begun otherwise: also is \['other 01234567'\] there and None now"):
        ablate(stores(), plan_of(), out, seeds=2, device="cpu")


def test_another_split_is_evaluated_without_training(stores, whole, monkeypatch):
    out, entries = whole
    other = ablate(stores(), plan_of(), out, seeds=1, device="cpu", split="val")
    for entry in other:
        run = Run(entry["run"])
        assert entry["rsum"] == pytest.approx(run.info["best_rsum"])
        assert len(run.metrics()) == 2
    assert numbers(ablate(stores(), plan_of(), out, seeds=2, device="cpu")) == numbers(entries)


KILLED = """
import sys
import torch
from xret.heads.ablation import ablate
from xret.heads.ablation_plan import plan_variation
torch.set_num_threads(1)
store, out, jobs, *settings = sys.argv[1:]
plan = plan_variation("vsepp", ["loss.triplet.margin=0.1,0.2"], settings)
ablate(store, plan, out, seeds=2, device="cpu", jobs=int(jobs))
"""


def started(store, out, jobs, settings):
    """Begin the ablation of `KILLED` in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", KILLED, store, str(out), str(jobs), *settings],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.DEVNULL,
    )


def test_killed_in_the_middle_of_a_cell_and_run_again_equals_uninterrupted(stores, tmp_path):
    settings = [*SMALL[:-1], "schedule.epochs=12"]
    plan = plan_variation("vsepp", [MARGIN], settings)
    out = tmp_path / "killed"
    child = started(stores(), out, 1, settings)
    second = out / plan.variants[0].name / "seed=1"
    while child.poll() is None and not (second / "state.pt").exists():
        time.sleep(0.002)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert (second.parent / "seed=0" / "eval.json").exists()
    assert not (second / "eval.json").exists(), "the kill came too late"
    complete = len(Run(second).metrics())
    assert 1 <= complete < 12
    resumed = ablate(stores(), plan, out, seeds=2, device="cpu")
    undisturbed = ablate(stores(), plan, tmp_path / "whole", seeds=2, device="cpu")
    assert numbers(resumed) == numbers(undisturbed)
    assert as_text(summarise(resumed)) == as_text(summarise(undisturbed))
    assert len(Run(second).metrics()) == 12


def test_a_cell_that_fails_stops_no_other_and_is_tried_again(stores, tmp_path, monkeypatch, capsys):
    out, plan = tmp_path / "out", plan_of(TOO_LARGE)
    entries = ablate(stores(), plan, out, seeds=2, device="cpu")
    assert [entry["status"] for entry in entries] == ["failed", "failed", "done", "done"]
    assert "does not fit in the memory" in entries[0]["error"]
    assert entries[0]["rsum"] is None
    record = out / plan.variants[0].name / "seed=0.failed"
    assert record.read_text().strip() == entries[0]["error"]
    assert capsys.readouterr().err.count("failed: ") == 2

    def broken(*_, **__):
        raise TypeError("not for users\nsecond line")

    monkeypatch.setattr("xret.heads.ablation_cells.train", broken)
    again = ablate(stores(), plan, out, seeds=2, device="cpu")
    assert [entry["error"] for entry in again] == ["TypeError: not for users"] * 2 + [None] * 2
    assert again[2:] == entries[2:]
    monkeypatch.undo()
    monkeypatch.setattr("xret.heads.ablation_cells.train", lambda *_, **__: None)
    monkeypatch.setattr(
        "xret.heads.ablation_cells.evaluate", lambda runs, **_: (runs[0].mkdir(), json.loads(finished))[1]
    )
    finished = (Path(entries[2]["run"]) / "eval.json").read_text()
    assert [entry["status"] for entry in ablate(stores(), plan, out, seeds=2, device="cpu")] == ["done"] * 4
    assert not record.exists()


def weights(run):
    return load_file(Path(run) / "model.safetensors")


@pytest.mark.parametrize("place", ["auto", "pinned", "stream"])
def test_cells_read_the_features_once_and_equal_a_run_alone(stores, tmp_path, monkeypatch, place):
    """The last of two cells: it finds all in memory, or its shards checked and open."""
    read, original = [], Rows._read
    monkeypatch.setattr(Rows, "_read", lambda self, shard: read.append((self._folder, shard)) or original(self, shard))
    settings = [*SMALL[:-1], "schedule.epochs=1", f"runtime.cache={place}"]
    plan = plan_variation("vsepp", ["aggregator.image=average,gpo"], settings)
    entries = ablate(stores(), plan, tmp_path / "out", device="cpu")
    of_train = [one for one in read if "images" in one[0] and one[1] < 2]  # evaluation opens what it reads
    assert sorted(of_train) == sorted(set(of_train))
    assert {shard for _, shard in of_train} == {0, 1}
    train(stores(), plan.variants[-1].recipe, tmp_path / "alone", device="cpu", seed=0)
    for name, value in weights(tmp_path / "alone").items():
        assert torch.equal(weights(entries[-1]["run"])[name], value)


def test_cells_of_other_features_begin_without_those_before_in_memory(stores, tmp_path, monkeypatch):
    """`auto` would otherwise find less room than for a run alone, and shuffle otherwise."""
    seen = []

    def note(cell, resident):
        same = seen and seen[-1][1]() is resident
        alive = sum(reference() is not None for _, reference, _ in seen)
        seen.append((cell.recipe.data.image, weakref.ref(resident), (bool(same), alive > 0)))
        return "not trained"

    monkeypatch.setattr("xret.heads.ablation.run_cell", note)
    entries = ablate(stores(), plan_of(MARGIN, "data.image=auto,grid"), tmp_path / "out", seeds=2, device="cpu")
    assert [image for image, _, _ in seen] == ["auto"] * 4 + ["grid"] * 4
    assert [rest for _, _, rest in seen] == ([(False, False)] + [(True, True)] * 3) * 2
    assert [entry["cell"]["data.image"] for entry in entries] == ["auto", "auto", "grid", "grid"] * 2


def test_what_only_one_cell_stumbles_over_is_left_to_it(stores, tmp_path, monkeypatch):
    cells = [Cell(str(tmp_path / v.name), stores(), v.recipe, 0, "test", "cpu") for v in plan_of().variants]
    Path(cells[0].run).mkdir()  # something that is no run
    assert len(load_features(cells)._columns) == 2
    monkeypatch.setattr("xret.heads.ablation_cells.batches_of", lambda *_: (_ for _ in ()).throw(OSError("disk")))
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
        assert torch.equal(column.fetch(np.array([2, 1])), theirs._columns[key].fetch(np.array([2, 1])))


def test_too_little_shared_memory_is_a_sentence(stores, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9, 9, 0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(4))
    settings = ["runtime.cache=pinned"]
    with pytest.raises(RunError, match=r"the features take .* has 0\.0 MB free; set runtime\.cache to stream, or"):
        ablate(stores(), plan_of(settings=settings), tmp_path / "out", device="cpu", jobs=2)


def test_on_a_cpu_cells_beside_each_other_need_cores(monkeypatch, capsys):
    cpu = torch.device("cpu")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    for threads, jobs, expected in ((1, 4, 4), (1, 9, 8), (3, 4, 2), (8, 4, 1), (16, 2, 1), (4, 1, 1)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert at_once(jobs, cpu) == expected
        said = capsys.readouterr().err
        assert bool(said) is (expected < jobs)
        assert ("OMP_NUM_THREADS=1" in said) is (expected < jobs and threads > 1)
    assert at_once(4, torch.device("cuda")) == 4


@pytest.mark.parametrize("seeds", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_processes_give_the_same_numbers(stores, whole, tmp_path, monkeypatch, seeds):
    """As many processes as seeds: each takes seconds to begin."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(2))
    plan = plan_of("loss.triplet.margin=0.1", settings=["runtime.cache=pinned"])
    entries = ablate(stores(), plan, tmp_path / "out", seeds=seeds, device="cpu", jobs=2)
    assert numbers(entries) == numbers(whole[1][:seeds])
    logs = sorted((tmp_path / "out").rglob("*.log"))
    assert len(logs) == seeds
    assert "epoch 2/2" in logs[0].read_text()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
def test_processes_that_share_the_tables_of_a_gpu_give_the_numbers_of_a_run_alone(stores, tmp_path):
    plan = plan_of(settings=["runtime.cache=device"])
    entries = ablate(stores(), plan, tmp_path / "out", device="cuda", jobs=2)
    for entry, variant in zip(entries, plan.variants, strict=True):
        train(stores(), variant.recipe, tmp_path / variant.name, device="cuda", seed=0)
        for name, value in weights(tmp_path / variant.name).items():
            assert torch.equal(weights(entry["run"])[name], value)


@pytest.mark.slow
def test_a_process_that_dies_takes_one_cell_with_it(stores, tmp_path, monkeypatch):
    out, plan = tmp_path / "out", plan_of("loss.triplet.margin=0.1,0.2,0.3")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(2))
    victim = str(out / plan.variants[0].name / "seed=0")
    monkeypatch.setattr("xret.heads.ablation_cells._work", DiesIn(victim))
    entries = ablate(stores(), plan, out, device="cpu", jobs=2)
    assert [entry["status"] for entry in entries] == ["failed", "done", "done"]
    assert "its process ended with exit code -9" in entries[0]["error"]


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


class DiesIn:
    """In the place of a process's work: it is killed by one cell and answers others at once."""

    def __init__(self, run):
        self.run = run

    def __call__(self, cells, threads, resident):
        try:
            while True:
                if cells.recv().run == self.run:
                    os.kill(os.getpid(), signal.SIGKILL)
                cells.send([entry("1", 0, 5.0)])
        except EOFError:
            pass


def test_a_cluster_trains_the_same_cells(stores, whole, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with LocalCluster(n_workers=1, threads_per_worker=2, processes=False, dashboard_address=":0") as cluster:
        address = cluster.scheduler_address
        entries = ablate(stores(), plan_of(), "out", seeds=2, device="cpu", scheduler=address)
        assert numbers(entries) == numbers(whole[1])
        assert "Dask dashboard: http://" in capsys.readouterr().err
        failing = ablate(stores(), plan_of(TOO_LARGE), "other", device="cpu", scheduler=address)
    assert [entry["status"] for entry in failing] == ["failed", "done"]
    assert [entry["run"] for entry in entries] == [
        str(tmp_path / "out" / Path(entry["run"]).relative_to(whole[0])) for entry in whole[1]
    ]


def test_no_scheduler(stores, tmp_path, monkeypatch):
    monkeypatch.setattr("xret.pipeline.engine.PATIENCE", 1.0)
    with pytest.raises(CacheError, match="no Dask scheduler answers"):
        ablate(stores(), plan_of(), tmp_path / "out", scheduler="tcp://127.0.0.1:9")


# --- What is refused before anything is trained


def test_a_folder_belongs_to_one_ablation(stores, whole, tmp_path):
    out, entries = whole
    for plan, sentence in (
        (plan_of("optimizer.lr=0.1"), r"vary is \['loss.triplet.margin'\] there and \['optimizer.lr'\] now"),
        (plan_of(settings=["optimizer.clip=1"]), "set is .* there and .*optimizer.clip=1.* now"),
        (plan_of(recipe="vse-infty"), "recipe is vsepp there and vse-infty now"),
        (plan_grid("vse-infty-table4", settings=NARROW), "grid is None there and vse-infty-table4 now"),
    ):
        url = stores("frames") if plan.source else stores()
        with pytest.raises(RunError, match=f"belongs to another ablation: .*{sentence}.*; take another --out"):
            ablate(url, plan, out, device="cpu")
    other = make_store(tmp_path / "other.zarr", train=10, val=4, test=4)
    with pytest.raises(RunError, match="belongs to another ablation: manifest_sha256 is"):
        ablate(other, plan_of(), out, device="cpu")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    with pytest.raises(RunError, match="is not empty and no ablation"):
        ablate(stores(), plan_of(), tmp_path / "full", device="cpu")
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="cannot be made: File exists"):
        ablate(stores(), plan_of(), tmp_path / "file", device="cpu")
    assert numbers(ablate(stores(), plan_of(), out, seeds=2, device="cpu")) == numbers(entries)


def test_a_recipe_file_that_changed_is_refused_though_its_name_is_the_same(stores, tmp_path):
    file = tmp_path / "own.yaml"
    file.write_text("base: vsepp\nname: own\n")
    ablate(stores(), plan_of(recipe=str(file)), tmp_path / "out", device="cpu")
    file.write_text("base: vsepp\nname: own\noptimizer: {clip: 1.0}\n")
    with pytest.raises(RunError, match=r"optimizer\.clip is 2\.0 there and 1\.0 now"):
        ablate(stores(), plan_of(recipe=str(file)), tmp_path / "out", device="cpu")


def test_two_at_work_in_a_folder(stores, tmp_path, monkeypatch):
    def nested(*_):
        with pytest.raises(RunError, match="another ablation is at work in"):
            ablate(stores(), plan_of(), tmp_path / "out", device="cpu")
        return "not trained"

    monkeypatch.setattr("xret.heads.ablation.run_cell", nested)
    assert len(ablate(stores(), plan_of(), tmp_path / "out", device="cpu")) == 2


def test_what_does_not_fit_the_store_is_refused_for_all_cells_at_once(stores, tmp_path):
    out = tmp_path / "out"
    unfit = plan_of("aggregator.text=global,average,max", settings=["adapter.words.local=embedding"])
    with pytest.raises(RecipeError) as caught:
        ablate(stores(), unfit, out, device="cpu")
    assert str(caught.value).count("keeps the width of the local rows") == 2
    with pytest.raises(RecipeError, match="holds its paper's values for image features of kind 'roi'"):
        ablate(stores(), plan_grid("setdiv-b3", settings=NARROW), out, device="cpu")
    with pytest.raises(CacheError, match="has no split 'dev'; it has train, val, test"):
        ablate(stores(), plan_of(), out, device="cpu", split="dev")
    with pytest.raises(CacheError, match="no feature set"):
        ablate(stores(), plan_of(settings=["data.image=resnet"]), out, device="cpu")
    with pytest.raises(CacheError, match="no feature cache is there"):
        ablate(str(tmp_path / "none"), plan_of(), out, device="cpu")
    with pytest.raises(DeviceError):
        ablate(stores(), plan_of(), out, device="cuda:77")
    assert not out.exists()


# --- Tables


def entry(label, seed, rsum, *, protocol="full", paper=None, variance=None):
    recalls = {"R@1": rsum / 10, "R@5": rsum / 5, "R@10": rsum / 5}
    return {
        "cell": {"k": int(label)}, "label": label, "seed": seed, "status": "done", "run": "r", "split": "test",
        "protocol": protocol, "rsum": rsum, "image_to_text": recalls, "text_to_image": recalls,
        "log_circular_variance": variance, "paper": paper, "error": None,
    }  # fmt: skip


def failed(label, seed):
    numbers = dict.fromkeys(("protocol", "rsum", "image_to_text", "text_to_image", "log_circular_variance", "paper"))
    return {"cell": {"k": int(label)}, "label": label, "seed": seed, "status": "failed", "run": "r", "split": "test",
            **numbers, "error": "too large"}  # fmt: skip


ENTRIES = [
    entry("1", 0, 100.0, paper={"row": "f30k", "rsum": 105.5, "image_to_text R@1": 11.0}, variance=-2.0),
    entry("1", 1, 104.0, paper={"row": "f30k", "rsum": 105.5, "image_to_text R@1": 11.0}, variance=-3.0),
    entry("1", 2, 108.0, paper={"row": "f30k", "rsum": 105.5, "image_to_text R@1": 11.0}, variance=-4.0),
    entry("2", 0, 200.0),
    failed("2", 1),
    failed("4", 0),
]


def test_the_table_against_hand_calculation():
    one, two, four = summarise(ENTRIES)
    assert (one.seeds, one.failed, two.seeds, two.failed, four.seeds, four.failed) == (3, 0, 1, 1, 0, 1)
    assert one.mean["rsum"] == 104
    assert one.std["rsum"] == 4  # sqrt((16 + 0 + 16) / 2)
    assert one.mean["image_to_text R@1"] == pytest.approx(10.4)
    assert one.std["text_to_image R@10"] == pytest.approx(0.8)
    assert (one.mean["log_circular_variance"], one.std["log_circular_variance"]) == (-3, 1)
    assert one.paper == {"rsum": 105.5, "image_to_text R@1": 11.0}
    assert two.std == {}
    assert "log_circular_variance" not in two.mean
    assert (four.mean, four.std, four.paper) == ({}, {}, {})


def test_the_text_is_aligned():
    title, head, *rows = as_text(summarise(ENTRIES)).splitlines()
    assert title == "split test, protocol full; mean ± standard deviation over 3 seeds; paper: F30K"
    assert head.split() == [
        "i2t", "R@1", "paper", "R@5", "R@10", "t2i", "R@1", "R@5", "R@10", "RSUM", "paper", "log", "var.", "failed",
    ]  # fmt: skip
    assert [row.split()[0] for row in rows] == ["1", "2", "4"]
    at = head.index("RSUM") + len("RSUM")
    assert [row[:at].split()[-1] for row in rows] == ["4.00", "200.00", "-"]
    assert len({len(line) for line in (head, *rows)}) == 1


def test_protocols_are_parts_of_their_own_and_failures_are_in_each():
    both = [entry("1", 0, 50.0, protocol="1k-folds"), entry("1", 0, 40.0), failed("2", 0)]
    lines = summarise(both)
    assert [(line.label, line.protocol, line.seeds, line.failed) for line in lines] == [
        ("1", "1k-folds", 1, 0), ("2", "1k-folds", 0, 1), ("1", "full", 1, 0), ("2", "full", 0, 1),
    ]  # fmt: skip
    assert as_text(lines).count("split test, protocol") == 2
    assert as_latex(lines).count("\\begin{tabular}") == 2
    nothing = summarise([failed("1", 0)])
    assert [(line.protocol, line.failed) for line in nothing] == [(None, 1)]
    assert as_text(nothing).splitlines()[-1].split() == ["1", "-", "1"]


def test_csv_reads_back():
    rows = list(csv.DictReader(io.StringIO(as_csv(summarise(ENTRIES)))))
    assert [row["k"] for row in rows] == ["1", "2", "4"]
    assert [float(row["rsum mean"] or math.nan) for row in rows][:2] == [104, 200]
    assert rows[0]["rsum std"] == "4.0"
    assert rows[0]["rsum paper"] == "105.5"
    assert rows[0]["row"] == "f30k"
    assert (rows[1]["rsum std"], rows[2]["rsum mean"], rows[2]["failed"]) == ("", "", "1")


def test_latex_reads_back_and_is_escaped():
    odd = dict(entry("7", 0, 60.0), label=r"50% a_b & {c} #1 $x \y ~z^2")
    text = as_latex(summarise([*ENTRIES, odd]))
    body = text[text.index("\\toprule") : text.index("\\bottomrule")]
    rows = [line.removesuffix(r" \\").replace(r"\&", "AND").split(" & ") for line in body.splitlines() if "&" in line]
    columns = text.split("{tabular}{")[1].split("}")[0]
    assert {len(row) for row in rows} == {len(columns)}
    head, first, second, _, last = rows
    assert (first[head.index("RSUM")], second[head.index("RSUM")]) == (r"104.00 $\pm$ 4.00", "200.00")
    assert first[head.index("RSUM") + 1] == "105.5"
    assert last[0] == r"50\% a\_b AND \{c\} \#1 \$x \textbackslash{}y \textasciitilde{}z\textasciicircum{}2"


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_a_plot_over_numbers(tmp_path, ending):
    pytest.importorskip("matplotlib")
    file = tmp_path / f"k.{ending}"
    plot(summarise(ENTRIES), file)
    assert file.read_bytes()[:4] in (b"\x89PNG", b"%PDF", b"<?xm")


def test_a_plot_of_nothing_is_empty(tmp_path):
    pytest.importorskip("matplotlib")
    plot(summarise([failed("1", 0), failed("2", 0)]), tmp_path / "k.svg")
    assert "<svg" in (tmp_path / "k.svg").read_text()


def test_what_can_be_plotted():
    assert plotted_key([{"a": 1}, {"a": 2.5}]) == "a"
    assert plotted_key([{"a": 1, "b": 1}, {"a": 2, "b": 2}]) == "a"
    for values in ([{"a": 1, "b": 2}], [{"a": "x"}], [{"a": True}], [{"a": 1}, {"b": 1}]):
        with pytest.raises(ValueError, match="a single varied key"):
            plotted_key(values)


def test_a_plot_without_matplotlib_is_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(RunError, match=r"pip install xret\[plots\]"):
        plot(summarise(ENTRIES), tmp_path / "k.png")


def test_protocols_of_precisions_have_their_own_columns(tmp_path):
    precise = entry("1", 0, 0.0, protocol="eccv") | {"rsum": None}
    for way, value in (("image_to_text", 31.0), ("text_to_image", 33.0)):
        precise[way] = {"mAP@R": value, "R-P": value + 10, "R@1": value + 30}
    (line,) = summarise([precise])
    assert line.mean["text_to_image R-P"] == 43
    assert "rsum" not in line.mean
    head, row = as_text([line]).splitlines()[1:]
    assert head.split() == ["i2t", "R@1", "mAP@R", "R-P", "t2i", "R@1", "mAP@R", "R-P"]
    assert row.split() == ["1", "61.00", "31.00", "41.00", "63.00", "33.00", "43.00"]
    with pytest.raises(RunError, match="no protocol of this data set has an RSUM"):
        plot([line], tmp_path / "plot.svg")
    assert not (tmp_path / "plot.svg").exists()
    plot(summarise([precise, entry("1", 0, 90.0)]), tmp_path / "plot.svg")


def test_a_cell_whose_first_protocol_has_no_rsum_is_told_of(stores, tmp_path, monkeypatch, capsys):
    def judged(runs, **options):
        tables = evaluate(runs, **options)
        (full,) = tables["results"]
        ways = {way: {"mAP@R": 12.5} for way in ("image_to_text", "text_to_image")}
        return tables | {"results": [full | ways | {"protocol": "eccv", "rsum": None, "mean_recall": None}, full]}

    monkeypatch.setattr(ablation_cells, "evaluate", judged)
    entries = ablate(stores(), plan_of(), tmp_path / "out", device="cpu")
    assert {entry["status"] for entry in entries} == {"done"}
    assert "mAP@R 12.50 / 12.50, RSUM " in capsys.readouterr().err
