"""Ablations: what they train and keep, that a kill changes nothing, and what they refuse before they begin."""

import json
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from small_ablations import FAILING, MARGIN, NARROW, SMALL, Stores, ablated, numbers, plan_of, started
from small_store import make_store

from xret.heads.ablation import cells as ablation_cells
from xret.heads.ablation.plan import make_plan, plan_grid, plan_variation
from xret.heads.ablation.table import as_csv, as_text, summarise
from xret.heads.evaluation.evaluation import evaluate
from xret.heads.recipes.recipe import load_recipe
from xret.heads.runs.run import Run
from xret.heads.training.training import train
from xret.pipeline.cache.feature_cache import FeatureCache
from xret.pipeline.errors import CacheError, DeviceError, RecipeError, RunError

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    return Stores(tmp_path_factory)


# --- What is trained


@pytest.fixture(scope="module")
def whole(stores, tmp_path_factory):
    """An ablation that nobody disturbed: its folder and what it returned."""
    out = tmp_path_factory.mktemp("whole") / "out"
    return out, ablated(stores(), plan_of(), out, seeds=2, device="cpu")


def test_a_cell_is_a_run_and_its_table(whole):
    out, entries = whole
    assert [(entry.cell["loss.triplet.margin"], entry.seed) for entry in entries] == [
        (0.1, 0), (0.1, 1), (0.2, 0), (0.2, 1),
    ]  # fmt: skip
    for entry in entries:
        run = Path(entry.run)
        assert run == out / f"loss.triplet.margin={entry.cell['loss.triplet.margin']}" / f"seed={entry.seed}"
        assert Run(run).info.seed == entry.seed
        assert Run(run).recipe.loss["triplet"]["margin"] == entry.cell["loss.triplet.margin"]
        (result,) = json.loads((run / "eval.json").read_text())["results"]
        assert (
            entry.rsum
            == result["rsum"]
            == pytest.approx(
                sum(result[side][f"R@{k}"] for side in ("image_to_text", "text_to_image") for k in (1, 5, 10))
            )
        )
        assert (entry.status, entry.error, entry.paper) == ("done", None, None)
        assert (entry.split, entry.protocol, result["images"]) == ("test", "full", 4)


@pytest.mark.parametrize("damaged", ["[]", "null", '{"results": 5}', "{}", "half a line"])
def test_a_damaged_result_is_made_again(stores, whole, tmp_path, damaged):
    out, before = shutil.copytree(whole[0], tmp_path / "out"), numbers(whole[1])
    results = sorted(out.rglob("eval.json"))
    kept = [json.loads(file.read_text())["results"] for file in results]
    results[0].write_text(damaged)
    assert numbers(ablated(stores(), plan_of(), out, seeds=2, device="cpu")) == before
    assert [json.loads(file.read_text())["results"] for file in results] == kept


def test_a_cell_whose_loss_is_not_finite_has_no_other_run_to_begin(stores, tmp_path):
    (entry, _) = ablated(stores(), plan_of("loss.triplet.weight=3e38,1"), tmp_path / "out", device="cpu")
    assert "not finite" in entry.error
    assert "begin another run" not in entry.error


def test_a_set_that_came_meanwhile_stops_no_ablation(stores, whole, tmp_path):
    out, store = shutil.copytree(whole[0], tmp_path / "out"), shutil.copytree(stores(), tmp_path / "s.zarr")
    (own,) = FeatureCache.open(str(store)).set_names("images")
    shutil.copytree(store / "images" / own, store / "images" / "other@00000000")
    more = ablated(str(store), plan_of(), out, seeds=3, device="cpu")
    assert {Run(entry.run).info.image_set for entry in more} == {own}
    assert len(more) == 6
    with pytest.raises(CacheError, match="several feature sets"):
        ablated(str(store), plan_of(), tmp_path / "new", device="cpu")


def test_finished_cells_are_kept_and_values_and_seeds_may_be_added(stores, whole, capsys):
    out, entries = whole
    written = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    more = ablated(stores(), plan_of("loss.triplet.margin=0.2,0.1,0.3"), out, seeds=2, device="cpu")
    assert "cells finished already: 4 of 6\n" in capsys.readouterr().err
    assert more[:4] == (*entries[2:], *entries[:2])
    assert [entry.cell for entry in more[4:]] == [{"loss.triplet.margin": 0.3}] * 2
    assert {path: path.stat().st_mtime_ns for path in written} == written


def test_a_baseline_stands_in_the_table_as_a_training_of_its_own(stores, whole, tmp_path):
    out = shutil.copytree(whole[0], tmp_path / "out")
    plan = make_plan("vsepp", [MARGIN], settings=SMALL, baselines=["linear", "linear"])
    first, *others = entries = ablated(stores(), plan, out, device="cpu")
    assert [entry.label for entry in entries] == ["linear", *(f"loss.triplet.margin={margin}" for margin in (0.1, 0.2))]
    assert numbers(others) == [replace(entry, run="") for entry in whole[1] if entry.seed == 0]  # of before
    train(stores(), load_recipe("linear", SMALL), tmp_path / "alone", device="cpu", seed=0)
    assert (Path(first.run) / "model.safetensors").read_bytes() == (tmp_path / "alone/model.safetensors").read_bytes()
    (alone,) = evaluate([tmp_path / "alone"], device="cpu").results
    assert (first.cell, first.rsum) == ({}, alone.rsum)
    assert as_csv(summarise(entries)).splitlines()[1].startswith("linear,,1,")


def test_a_baseline_is_trained_on_each_choice_of_features_that_vary(tmp_path):
    own = tmp_path / "own.yaml"
    own.write_text("base: linear\ndata: {text: bert}\n")
    varied = "vsepp", ["data.text=words,bert", MARGIN]
    (fixed, *_) = make_plan(*varied, settings=SMALL, baselines=[str(own)]).variants
    assert (fixed.label, fixed.values, fixed.recipe.data.text) == (str(own), {}, "bert")
    plan = make_plan(*varied, settings=SMALL, baselines=["linear"])
    baselines = [one for one in plan.variants if one.baseline]
    assert [one.label for one in baselines] == ["linear, data.text=words", "linear, data.text=bert"]
    assert [one.recipe for one in baselines] == [
        load_recipe("linear", [*SMALL, f"data.text={text}"]) for text in ("words", "bert")
    ]
    assert len({one.name for one in plan.variants}) == len(plan.variants) == 6
    assert [one.values for one in baselines] == [{"data.text": "words"}, {"data.text": "bert"}]


def test_an_adapter_of_other_features_is_not_varied(stores, tmp_path):
    for vary in (["adapter.roi.noise=0,1"], ["adapter.roi.noise,adapter.tokens.noise=0,1"]):
        with pytest.raises(RecipeError, match=r"^adapter\.roi\.noise is not in use with these features"):
            ablated(stores(), plan_of(*vary), tmp_path / "out", device="cpu")
    unused = plan_of("adapter.roi.noise=0,1", settings=["adapter.tokens.noise=1"])
    with pytest.raises(
        RecipeError, match=r"^adapter\.roi\.noise is not in use.*; adapter\.tokens\.noise is not in use"
    ):
        ablated(stores(), unused, tmp_path / "out", device="cpu")
    together = plan_of("adapter.roi.noise,adapter.grid.noise=0,1")
    assert {entry.status for entry in ablated(stores(), together, tmp_path / "out", device="cpu")} == {"done"}


def test_settings_that_do_not_fit_a_baseline_are_said_of_it():
    slots = ["aggregator.image.slots=2"]
    with pytest.raises(RecipeError, match=r"baseline 'linear': aggregator\.image\.slots is not a key"):
        make_plan("setdiv", [MARGIN], settings=slots, baselines=["linear"])
    negatives = make_plan("vsepp", [MARGIN], settings=["loss.triplet.negatives=all"], baselines=["linear"])
    assert negatives.variants[0].recipe == load_recipe("linear")  # what does not concern it changes nothing
    with pytest.raises(RecipeError, match=r"^there is no recipe 'liner' \(did you mean 'linear'\?\)"):
        make_plan("vsepp", [MARGIN], baselines=["liner"])


def test_a_run_that_was_learnt_from_other_stores_as_well_is_no_cell(stores, whole, tmp_path):
    out = shutil.copytree(whole[0], tmp_path / "out")
    Run(next(out.glob("*/seed=0"))).record(also=["other 01234567"])
    with pytest.raises(RunError, match=r"begun otherwise: also is \['other 01234567'\] there and None now"):
        ablated(stores(), plan_of(), out, seeds=2, device="cpu")


def test_another_split_is_evaluated_without_training(stores, whole, monkeypatch):
    out, entries = whole
    other = ablated(stores(), plan_of(), out, seeds=1, device="cpu", split="val")
    for entry in other:
        run = Run(entry.run)
        assert entry.rsum == pytest.approx(run.info.best_rsum)
        assert len(run.metrics()) == 2
    assert numbers(ablated(stores(), plan_of(), out, seeds=2, device="cpu")) == numbers(entries)


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
    resumed = ablated(stores(), plan, out, seeds=2, device="cpu")
    undisturbed = ablated(stores(), plan, tmp_path / "whole", seeds=2, device="cpu")
    assert numbers(resumed) == numbers(undisturbed)
    assert as_text(summarise(resumed)) == as_text(summarise(undisturbed))
    assert len(Run(second).metrics()) == 12


def test_a_cell_that_fails_stops_no_other_and_is_tried_again(stores, tmp_path, monkeypatch, capsys):
    out, plan = tmp_path / "out", plan_of(FAILING)
    entries = ablated(stores(), plan, out, seeds=2, device="cpu")
    assert [entry.status for entry in entries] == ["failed", "failed", "done", "done"]
    assert "nowhere.txt" in entries[0].error
    assert entries[0].rsum is None
    record = out / plan.variants[0].name / "seed=0.failed"
    assert record.read_text().strip() == entries[0].error
    assert capsys.readouterr().err.count("failed: ") == 2

    def broken(*_, **__):
        raise TypeError("not for users\nsecond line")

    monkeypatch.setattr("xret.heads.ablation.cells.train", broken)
    again = ablated(stores(), plan, out, seeds=2, device="cpu")
    assert [entry.error for entry in again] == ["TypeError: not for users"] * 2 + [None] * 2
    assert again[2:] == entries[2:]
    monkeypatch.undo()
    monkeypatch.setattr("xret.heads.ablation.cells.train", lambda *_, **__: None)
    finished = evaluate(entries[2].run, device="cpu")
    monkeypatch.setattr("xret.heads.ablation.cells.evaluate", lambda run, **_: (run.mkdir(), finished)[1])
    assert [entry.status for entry in ablated(stores(), plan, out, seeds=2, device="cpu")] == ["done"] * 4
    assert not record.exists()


def test_a_cell_whose_first_protocol_has_no_rsum_is_told_of(stores, tmp_path, monkeypatch, capsys):
    def judged(run, **options):
        found = evaluate(run, **options)
        (full,) = found.results
        ways = {way: {"mAP@R": 12.5} for way in ("image_to_text", "text_to_image")}
        return replace(found, results=(replace(full, protocol="eccv", rsum=None, mean_recall=None, **ways), full))

    monkeypatch.setattr(ablation_cells, "evaluate", judged)
    entries = ablated(stores(), plan_of(), tmp_path / "out", device="cpu")
    assert {entry.status for entry in entries} == {"done"}
    assert "mAP@R 12.50 / 12.50, RSUM " in capsys.readouterr().err


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
            ablated(url, plan, out, device="cpu")
    other = make_store(tmp_path / "other.zarr", train=10, val=4, test=4)
    with pytest.raises(RunError, match="belongs to another ablation: manifest_sha256 is"):
        ablated(other, plan_of(), out, device="cpu")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    with pytest.raises(RunError, match="is not empty and holds no ablation"):
        ablated(stores(), plan_of(), tmp_path / "full", device="cpu")
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="cannot be made: File exists"):
        ablated(stores(), plan_of(), tmp_path / "file", device="cpu")
    assert numbers(ablated(stores(), plan_of(), out, seeds=2, device="cpu")) == numbers(entries)


def test_a_cell_with_a_recipe_of_its_own_is_not_offered_another(stores, tmp_path):
    plan = plan_grid("setdiv-b1", "setdiv", NARROW)  # two cells take it, the third names its own
    with pytest.raises(RecipeError, match=r"^SetDiv: grid 'setdiv-b1' .*; add --set data\.image_kind=frames$"):
        ablated(stores("frames"), plan, tmp_path / "out", device="cpu")


def test_an_ablation_has_a_seed(stores, tmp_path):
    with pytest.raises(RecipeError, match="seeds must be at least 1, not 0"):
        ablated(stores(), plan_variation("vsepp", [MARGIN], NARROW), tmp_path / "out", seeds=0)


@pytest.mark.parametrize(
    ("plan", "owner", "way"),
    [
        (plan_grid("setdiv-b3", settings=NARROW), "grid 'setdiv-b3'", "take --recipe setdiv, or add "),
        (
            plan_grid("setdiv-table4", "setdiv/coco-butd-bigru", NARROW),
            "grid 'setdiv-table4'",
            "take --recipe setdiv, or add ",
        ),
        (plan_grid("gaussian-table7", settings=NARROW), "grid 'gaussian-table7'", "add "),
        (
            plan_variation("setdiv/f30k-butd-bigru", [MARGIN], NARROW),
            "recipe 'setdiv/f30k-butd-bigru'",
            "take --recipe setdiv, or add ",
        ),
    ],
)
def test_features_of_another_kind_are_told_once_for_all_cells(stores, tmp_path, plan, owner, way):
    wanted = plan.variants[0].recipe.data.image_kind
    url = stores("frames")
    with pytest.raises(RecipeError) as caught:
        ablated(url, plan, tmp_path / "out", device="cpu")
    assert str(caught.value) == (
        f"{owner} holds its paper's values for image features of kind '{wanted}', and those of {url} are of kind "
        f"'frames'; {way}--set data.image_kind=frames"
    )
    assert not (tmp_path / "out").exists()


def test_a_recipe_file_that_changed_is_refused_though_its_name_is_the_same(stores, tmp_path):
    file = tmp_path / "own.yaml"
    file.write_text("base: vsepp\nname: own\n")
    ablated(stores(), plan_of(recipe=str(file)), tmp_path / "out", device="cpu")
    file.write_text("base: vsepp\nname: own\noptimizer: {clip: 1.0}\n")
    with pytest.raises(RunError, match=r"optimizer\.clip is 2\.0 there and 1\.0 now"):
        ablated(stores(), plan_of(recipe=str(file)), tmp_path / "out", device="cpu")


def test_two_at_work_in_a_folder(stores, tmp_path, monkeypatch):
    def nested(*_):
        with pytest.raises(RunError, match="another ablation is at work in"):
            ablated(stores(), plan_of(), tmp_path / "out", device="cpu")
        return "not trained"

    monkeypatch.setattr("xret.heads.ablation.ablation.run_cell", nested)
    assert len(ablated(stores(), plan_of(), tmp_path / "out", device="cpu")) == 2


def test_what_does_not_fit_the_store_is_refused_for_all_cells_at_once(stores, tmp_path):
    out = tmp_path / "out"
    unfit = plan_of("aggregator.text=global,average,max", MARGIN, settings=["adapter.words.local=embedding"])
    with pytest.raises(RecipeError) as caught:
        ablated(stores(), unfit, out, device="cpu")
    first, second = str(caught.value).split("; ")
    assert first.startswith(
        "aggregator.text=average, loss.triplet.margin=0.1 and aggregator.text=average, loss.triplet.margin=0.2: aggreg"
    )
    for sentence in (first, second):
        assert sentence.count("keeps the width of the local rows") == 1
    with pytest.raises(CacheError, match="has no split 'dev'; it has train, val, test"):
        ablated(stores(), plan_of(), out, device="cpu", split="dev")
    with pytest.raises(CacheError, match="no feature set"):
        ablated(stores(), plan_of(settings=["data.image=resnet"]), out, device="cpu")
    with pytest.raises(CacheError, match="no feature cache is there"):
        ablated(str(tmp_path / "none"), plan_of(), out, device="cpu")
    with pytest.raises(DeviceError):
        ablated(stores(), plan_of(), out, device="cuda:77")
    assert not out.exists()
