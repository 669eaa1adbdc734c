"""Runs and a store that grows: each run reads the generation that it was trained on."""

import shutil
from dataclasses import replace

import pytest
from changing_data import OPTIONS, Picture, pictures, use, write

from xret.heads.evaluation.evaluation import evaluate
from xret.heads.recipes.recipe import load_recipe
from xret.heads.runs.features import open_store
from xret.heads.runs.run import Run
from xret.heads.training.training import train
from xret.pipeline.cache.storage.generations import free_old
from xret.pipeline.errors import CacheError, RunError
from xret.pipeline.extraction.extraction import extract


def recipe(epochs=1):
    return load_recipe("vsepp", ["model.dim=8", f"schedule.epochs={epochs}", "loss.same_text=excluded"])


@pytest.fixture
def store(monkeypatch, tmp_path):
    """Return a store with a run `old` on its first generation, and `new` on its second, where test has grown."""
    use(monkeypatch)
    url = str(tmp_path / "s.zarr")
    extract(write(tmp_path / "data", pictures()), url, OPTIONS)
    train(url, recipe(), tmp_path / "old", device="cpu")
    data = [*pictures(), Picture("a.png", 70, "test", ("something new",))]
    extract(write(tmp_path / "data", data), url, replace(OPTIONS, update=True))
    train(url, recipe(), tmp_path / "new", device="cpu")
    return url


def test_runs_keep_to_their_generation(store, tmp_path):
    old, new = Run(tmp_path / "old"), Run(tmp_path / "new")
    assert (old.info.generation, new.info.generation) == (1, 2)
    assert [open_store(run, None).images for run in (old, new)] == [20, 21]
    assert [open_store(run, store).images for run in (old, new)] == [20, 21]
    assert open_store(old, f"{store}/generations/2").images == 21
    assert train(store, recipe(2), tmp_path / "fresh", device="cpu").run == str(tmp_path / "fresh")
    assert Run(tmp_path / "fresh").info.generation == 2


def test_a_run_of_today_means_the_generation_with_its_samples(store, tmp_path):
    old = Run(tmp_path / "old")
    old.record(generation=None)
    assert open_store(Run(tmp_path / "old"), None).generation == 1
    free_old(store)
    with pytest.raises(RunError, match=r"no longer has its samples; there is generation 2\); name where it is"):
        open_store(Run(tmp_path / "old"), None)


def test_a_resumed_run_goes_on_with_its_own(store, tmp_path):
    assert train(store, recipe(), tmp_path / "old", device="cpu", resume=True).trained == 0
    assert Run(tmp_path / "old").info.generation == 1


def test_a_generation_that_was_freed_is_named(store, tmp_path):
    free_old(store)
    with pytest.raises(RunError, match=r"no longer has generation 1; there is generation 2\); name where it is now"):
        evaluate(tmp_path / "old", device="cpu")
    with pytest.raises(CacheError, match="has no generation 1, or it was freed; it has 2"):
        evaluate(tmp_path / "old", store=f"{store}/generations/1", device="cpu")
    assert open_store(Run(tmp_path / "old"), store).generation == 2


def test_a_store_that_was_moved(store, tmp_path):
    moved = shutil.move(store, tmp_path / "moved.zarr")
    assert open_store(Run(tmp_path / "old"), str(moved)).images == 20
