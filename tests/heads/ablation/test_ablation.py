"""Ablations: what they train and keep, that a kill changes nothing, and what they refuse before they begin."""

import json
import os
import shutil
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from dask_processes import cluster
from small_ablations import (
    DASK,
    FAILING,
    MARGIN,
    NARROW,
    SMALL,
    ablated,
    killed_in_second_epoch,
    numbers,
    plan_of,
    varied,
    weights,
)
from small_store import make_store

from xret.heads.ablation import ablation as module
from xret.heads.ablation.ablation import ablate
from xret.heads.ablation.table import as_text, summarise
from xret.heads.evaluation.evaluation import evaluate
from xret.heads.evaluation.paper_rows import ROWS, Row
from xret.heads.evaluation.result import Evaluation, Result
from xret.heads.recipes.recipe import load_recipe
from xret.heads.recipes.settings import nested
from xret.heads.runs.run import Run
from xret.heads.training.train import train
from xret.pipeline.errors import CacheError, RecipeError, RunError

pytestmark = DASK


@pytest.fixture(scope="module")
def whole(stores, tmp_path_factory):
    """An ablation that nobody disturbed: its folder and what it returned."""
    out = tmp_path_factory.mktemp("whole") / "out"
    return out, ablated(stores(), varied(), out, seeds=2)


def test_a_cell_is_a_run_and_its_table(whole):
    out, entries = whole
    assert [(entry.values["loss.triplet.margin"], entry.seed) for entry in entries] == [
        (0.1, 0), (0.1, 1), (0.2, 0), (0.2, 1),
    ]  # fmt: skip
    for entry in entries:
        run = Path(entry.run)
        assert run == out / f"loss.triplet.margin={entry.values['loss.triplet.margin']}" / f"seed={entry.seed}"
        assert Run(run).info.seed == entry.seed
        assert Run(run).recipe.loss["triplet"]["margin"] == entry.values["loss.triplet.margin"]
        (result,) = json.loads((run / "eval.json").read_text())["results"]
        recalls = [result[side][f"R@{k}"] for side in ("image_to_text", "text_to_image") for k in (1, 5, 10)]
        assert entry.rsum == result["rsum"] == pytest.approx(sum(recalls))
        assert (entry.error, entry.paper, entry.result.split, entry.result.images) == (None, {}, "test", 4)


def test_cells_with_shared_features_equal_a_run_alone(stores, whole, tmp_path):
    train(stores(), plan_of().variants[-1].recipe, tmp_path / "alone", device="cpu", seed=1)
    for name, value in weights(tmp_path / "alone").items():
        assert torch.equal(weights(whole[1][-1].run)[name], value)


def test_processes_and_clusters_give_the_same_numbers(stores, whole, tmp_path, monkeypatch):
    from distributed import LocalCluster

    entries = ablated(stores(), varied({"loss.triplet.margin": [0.1]}), tmp_path / "out", seeds=2, jobs=2)
    assert numbers(entries) == numbers(whole[1][:2])
    monkeypatch.chdir(tmp_path)
    with LocalCluster(n_workers=1, threads_per_worker=2, processes=False, dashboard_address=":0") as cluster:
        entries = ablated(stores(), varied(), "cluster", seeds=2, jobs=cluster.scheduler_address)
        failing = ablated(stores(), varied(FAILING), "failing", jobs=cluster.scheduler_address)
    assert numbers(entries) == numbers(whole[1])
    assert [entry.error is None for entry in failing] == [False, True]


@pytest.mark.slow
def test_a_process_that_dies_takes_one_cell_with_it(stores, tmp_path, monkeypatch):
    out, vary = tmp_path / "out", {"loss.triplet.margin": [0.1, 0.2, 0.3]}
    monkeypatch.setattr(module, "run_cell", DiesIn(str(out / plan_of(vary).variants[0].name / "seed=0")))
    entries = ablated(stores(), varied(vary), out, jobs=2)
    assert [entry.error is None for entry in entries] == [False, True, True]
    assert "its process died" in entries[0].error


class DiesIn:
    """In the place of `run_cell`: its process is killed by one cell, and others are done at once."""

    def __init__(self, run):
        self.run = run

    def __call__(self, cell, resident):
        if cell.run == self.run:
            os.kill(os.getpid(), signal.SIGKILL)
        result = Result("test", "full", 4, 8, 2.0, 0, "pessimistic", {}, {}, 5.0, 5 / 6, None, None, None)
        return Evaluation((cell.run,), ("store",), (1,), (result,))


@pytest.mark.slow
def test_a_worker_that_is_killed_loses_no_cell(stores, whole, tmp_path):
    out = tmp_path / "out"
    with cluster(tmp_path, [""] * 2) as (address, (_, victim, _)):

        def kill():
            until = time.monotonic() + 120
            while not list(out.glob("*/*/metrics.jsonl")) and time.monotonic() < until:
                time.sleep(0.01)
            victim.kill()

        killer = threading.Thread(target=kill)
        killer.start()
        entries = ablated(stores(), varied(), out, seeds=2, jobs=address)
        killer.join()
    assert numbers(entries) == numbers(whole[1])


def test_a_damaged_result_is_made_again(stores, whole, tmp_path):
    out, before = shutil.copytree(whole[0], tmp_path / "out"), numbers(whole[1])
    results = sorted(out.rglob("eval.json"))
    kept = [json.loads(file.read_text())["results"] for file in results]
    results[0].write_text('{"results": 5}')
    results[1].write_text("half a line")
    assert numbers(ablated(stores(), varied(), out, seeds=2)) == before
    assert [json.loads(file.read_text())["results"] for file in results] == kept


def test_finished_cells_are_kept_and_values_and_seeds_may_be_added(stores, whole, tmp_path, caplog):
    out, entries = shutil.copytree(whole[0], tmp_path / "out"), whole[1]
    written = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    caplog.set_level("INFO", "xret")
    more = ablated(stores(), varied({"loss.triplet.margin": [0.2, 0.1, 0.3]}), out, seeds=2)
    assert "cells finished already: 4 of 6" in caplog.messages
    assert numbers(more[:4]) == numbers((*entries[2:], *entries[:2]))
    assert [entry.values for entry in more[4:]] == [{"loss.triplet.margin": 0.3}] * 2
    assert {path: path.stat().st_mtime_ns for path in written} == written


def test_the_same_ablation_in_other_words_and_from_another_folder(stores, whole, tmp_path, monkeypatch):
    """0.001 is 1e-3, a part is its name, and a store and a recipe file are the same wherever one stands."""
    out = tmp_path / "out"
    (tmp_path / "own.yaml").write_text("base: vsepp\nname: own\n")
    monkeypatch.chdir(tmp_path)
    first = {"recipe": "own.yaml", "settings": {"optimizer.lr": "1e-3", "aggregator.image": "average"}}
    entries = ablated(os.path.relpath(stores()), varied({"loss.triplet.margin": ["0.1", "2e-1"]}, **first), "out")
    monkeypatch.chdir("/")
    monkeypatch.setattr(module, "train", None)
    second = {"recipe": f"{tmp_path}/own.yaml", "settings": {"aggregator.image.name": "average", "optimizer.lr": 0.001}}
    assert ablated(stores(), varied(**second), os.path.relpath(out)) == entries


def test_another_split_is_evaluated_without_training(stores, whole, tmp_path):
    out, entries = shutil.copytree(whole[0], tmp_path / "out"), whole[1]
    for entry in ablated(stores(), varied(split="val"), out):
        assert entry.rsum == pytest.approx(Run(entry.run).info.best_rsum)
        assert len(Run(entry.run).metrics()) == 2
    assert numbers(ablated(stores(), varied(), out, seeds=2)) == numbers(entries)


def test_killed_in_the_middle_of_a_cell_and_run_again_equals_uninterrupted(stores, tmp_path):
    plan, out = varied(settings={"schedule.epochs": 3}), tmp_path / "killed"
    second = out / plan_of(settings={"schedule.epochs": 3}).variants[0].name / "seed=1"
    killed_in_second_epoch(module, second, ablated, stores(), plan, out, seeds=2)
    assert (second.parent / "seed=0" / "eval.json").exists()
    assert not (second / "eval.json").exists()
    assert len(Run(second).metrics()) == 1
    resumed = ablated(stores(), plan, out, seeds=2)
    undisturbed = ablated(stores(), plan, tmp_path / "whole", seeds=2)
    assert numbers(resumed) == numbers(undisturbed)
    assert as_text(summarise(resumed)) == as_text(summarise(undisturbed))
    assert len(Run(second).metrics()) == 3


def test_a_cell_that_fails_stops_no_other_and_is_tried_again(stores, tmp_path, monkeypatch, caplog):
    out, plan = tmp_path / "out", varied(FAILING)
    entries = ablated(stores(), plan, out, seeds=2)
    assert [entry.error is None for entry in entries] == [False, False, True, True]
    assert "nowhere.txt" in entries[0].error
    assert entries[0].rsum is None
    assert sum("failed: " in message for message in caplog.messages) == 2

    def broken(*_, **__):
        raise TypeError("not for users\nsecond line")

    monkeypatch.setattr(module, "train", broken)
    again = ablated(stores(), plan, out, seeds=2)
    assert [entry.error for entry in again] == ["TypeError: not for users"] * 2 + [None] * 2
    assert again[2:] == entries[2:]


def test_cells_of_other_feature_sets_are_refused_where_sets_are_varied(tmp_path):
    both = {"train": 12, "val": 4, "test": 4, "image": ("grid", "roi")}
    first, second = (make_store(tmp_path / f"{weights}.zarr", weights=weights, **both) for weights in "ab")
    plan, out = varied({"data.image": ["grid", "roi"]}), tmp_path / "out"
    entries = ablated(first, plan, out)
    assert ablated(first, plan, out) == entries
    with pytest.raises(RunError, match=r"data\.image=grid/seed=0 has read grid@.* and would now read grid@"):
        ablated(second, plan, out)


def test_cells_of_other_pictures_are_refused_or_evaluated_again(tmp_path):
    sizes = {"train": 12, "val": 4, "test": 4}
    first, second = (make_store(tmp_path / f"{files}.zarr", files=files, **sizes) for files in (1, 2))
    plan, out = varied({"loss.triplet.margin": [0.1]}), tmp_path / "out"
    entries = ablated(first, plan, out)
    with pytest.raises(RunError, match=r"seed=0 has learnt other pictures than .*2\.zarr has features of"):
        ablated(second, varied(), out)
    (file,) = out.rglob("eval.json")
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | {"results": [{**content["results"][0], "rsum": -1.0}]}))
    assert ablated(first, plan, out)[0].rsum == -1
    data = content["data"]
    for other in ({**data, "pictures": {**data["pictures"], "test": "others"}}, {**data, "protocols": ["1k-folds"]}):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"data": other}))
        assert ablated(first, plan, out) == entries


def test_a_baseline_stands_in_the_table_as_a_training_of_its_own(stores, whole, tmp_path):
    out = shutil.copytree(whole[0], tmp_path / "out")
    first, *others = entries = ablated(stores(), varied(baselines=["linear", "linear"]), out)
    assert [entry.label for entry in entries] == ["linear", *(f"loss.triplet.margin={margin}" for margin in (0.1, 0.2))]
    assert numbers(others) == [replace(entry, run="") for entry in whole[1] if entry.seed == 0]
    train(stores(), load_recipe("linear", SMALL), tmp_path / "alone", device="cpu", seed=0)
    assert (Path(first.run) / "model.safetensors").read_bytes() == (tmp_path / "alone/model.safetensors").read_bytes()
    assert (first.values, first.rsum) == ({}, evaluate(tmp_path / "alone", device="cpu").results[0].rsum)


def test_frozen_encoders_in_one_space_have_a_row(tmp_path):
    store = make_store(tmp_path / "s.zarr", train=12, val=4, test=4, text="tokens", space="both")
    table, plan = tmp_path / "table.csv", varied({"loss.triplet.margin": [0.1]})
    found = ablate(store, tmp_path / "out", **plan, device="cpu", files=table)
    (untrained,) = found.untrained
    assert table.exists()
    assert untrained.rsum == evaluate(store, device="cpu").results[0].rsum
    assert [line.label for line in found.lines] == [untrained.label, "loss.triplet.margin=0.1"]


def test_hubness_is_corrected_in_a_table_of_its_own_and_costs_no_training(tmp_path, monkeypatch):
    store = make_store(tmp_path / "s.zarr", train=12, val=4, test=4, text="tokens", space="both")
    plan, out = varied(), tmp_path / "out"
    plain = ablated(store, plan, out)
    found = ablate(store, out, **plan, device="cpu", hubness=True)
    assert [entry for entry in found.entries if not entry.hubness] == list(plain)
    assert {len(Run(entry.run).metrics()) for entry in plain} == {2}
    corrected = [entry for entry in (*found.untrained, *found.entries) if entry.hubness]
    assert len(corrected) == 3
    for entry in corrected:
        assert entry.result == evaluate(entry.run, device="cpu", hubness=True).hubness.results[0]
    titles = [line for line in str(found).splitlines() if line.startswith("split")]
    assert ["corrected" in title for title in titles] == [False, True]
    monkeypatch.setattr(module, "run_cell", None)
    assert ablate(store, out, **plan, device="cpu", hubness=True) == found
    assert ablated(store, plan, out) == plain
    monkeypatch.undo()
    monkeypatch.setitem(ROWS, "f30k", Row("F30K", "small", "full", 4))
    own, recipe = tmp_path / "own.yaml", {"base": "vsepp", "name": "own", "expected": {"f30k": 9}, **nested(SMALL)}
    own.write_text(yaml.safe_dump(recipe))
    papers = ablate(store, tmp_path / "paper", **varied({"data.share": [1.0]}, recipe=str(own)), hubness=True).entries
    assert [(entry.hubness, entry.paper) for entry in papers] == [(False, {"rsum": 9}), (True, {})]
    with pytest.raises(RunError, match="evaluate another split"):
        ablated(store, varied(split="train"), tmp_path / "other", hubness=True)
    assert not (tmp_path / "other").exists()


def test_a_folder_belongs_to_one_ablation(stores, whole, tmp_path):
    out, entries = whole
    for plan, said in (
        (varied({"optimizer.lr": [0.1]}), r"vary is \['loss.triplet.margin'\] there and \['optimizer.lr'\] now"),
        (varied(settings={"optimizer.clip": 1}), r"set.optimizer.clip is absent there and 1 now"),
        (varied(recipe="vse-infty"), r"recipes is \['vsepp'\] there and \['vse-infty'\] now"),
        ({"grid": "vse-infty-table4", "settings": NARROW}, "grid is None there and vse-infty-table4 now"),
    ):
        with pytest.raises(RunError, match=f"belongs to another ablation: .*{said}.*; take another `out`"):
            ablated(stores("frames") if "grid" in plan else stores(), plan, out)
    other = make_store(tmp_path / "other.zarr", train=10, val=4, test=4)
    with pytest.raises(RunError, match="belongs to another ablation: manifest_sha256 is"):
        ablated(other, varied(), out)
    broken = make_store(tmp_path / "broken.zarr", train=12, val=4, test=4, broken=(3,))
    with pytest.raises(RunError, match=r"belongs to another ablation: skipped\.train is 0 there and 1 now"):
        ablated(broken, varied(), out)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    with pytest.raises(RunError, match="is not empty and holds no ablation"):
        ablated(stores(), varied(), tmp_path / "full")
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="cannot be made: File exists"):
        ablated(stores(), varied(), tmp_path / "file")
    assert numbers(ablated(stores(), varied(), out, seeds=2)) == numbers(entries)


def test_a_recipe_file_that_changed_is_refused_though_its_name_is_the_same(stores, tmp_path):
    file = tmp_path / "own.yaml"
    file.write_text("base: vsepp\nname: own\n")
    ablated(stores(), varied(recipe=str(file)), tmp_path / "out")
    file.write_text("base: vsepp\nname: own\noptimizer: {clip: 1.0}\n")
    with pytest.raises(RunError, match=r"optimizer\.clip is 2\.0 there and 1\.0 now"):
        ablated(stores(), varied(recipe=str(file)), tmp_path / "out")


def test_two_at_work_in_a_folder(stores, tmp_path, monkeypatch):
    def nested(*_):
        with pytest.raises(RunError, match="another ablation is at work in"):
            ablated(stores(), varied(), tmp_path / "out")
        return "not trained"

    monkeypatch.setattr(module, "run_cell", nested)
    assert len(ablated(stores(), varied(), tmp_path / "out")) == 2


def test_what_is_varied_of_features_that_are_not_there_is_said(stores, tmp_path, caplog):
    vary = {"adapter.grid.dropout,adapter.roi.dropout": [0.1]}
    ablated(stores(), varied(vary), tmp_path / "out")
    assert [text for text in caplog.messages if "changes nothing" in text] == [
        "adapter.roi.dropout changes nothing: no feature set in use is of its kind"
    ]


@pytest.mark.parametrize(("weights", "warned"), [([0], True), ([0, 1], False)])
def test_a_varied_key_of_a_term_that_no_loss_has_is_named(stores, tmp_path, caplog, weights, warned):
    vary = {"loss.infonce.scale": [10], "loss.infonce.weight": weights}
    ablated(stores(), varied(vary), tmp_path / "out")
    found = [text for text in caplog.messages if "changes nothing" in text]
    assert (
        found == ["loss.infonce.scale changes nothing: the loss has no such term; loss.infonce.weight adds it"] * warned
    )


def test_what_does_not_fit_the_store_is_refused_for_all_cells_at_once(stores, tmp_path):
    out = tmp_path / "out"
    vary = {"aggregator.text": ["global", "average", "max"], **MARGIN}
    with pytest.raises(RecipeError) as caught:
        ablated(stores(), varied(vary, settings={"adapter.words.local": "embedding"}), out)
    first, second = str(caught.value).split("; ")
    assert first.startswith("aggregator.text=average, loss.triplet.margin=0.1 and aggregator.text=average, loss.")
    assert all(sentence.count("keeps the width of the local rows") == 1 for sentence in (first, second))
    for options, error, said in (
        ({"split": "dev"}, CacheError, "has no split 'dev'; it has train, val, test"),
        ({"settings": {"data.image": "resnet"}}, CacheError, "no feature set"),
        ({"views": True}, RunError, "has one view of each image"),
    ):
        with pytest.raises(error, match=said):
            ablated(stores(), varied(**options), out)
    with pytest.raises(CacheError):
        ablated(str(tmp_path / "none"), varied(), out)
    with pytest.raises(RecipeError, match="seeds and jobs must be at least 1"):
        ablated(stores(), varied(), out, seeds=0)
    with pytest.raises(RecipeError, match="frames"):
        ablated(stores("frames"), {"grid": "setdiv-b3", "settings": NARROW}, out)
    assert not out.exists()


def test_a_file_system_without_locks_is_a_note(stores, tmp_path, lockless):
    assert [entry.error for entry in ablated(stores(), varied(), tmp_path / "out")] == [None, None]
    assert len(lockless()) == 1
