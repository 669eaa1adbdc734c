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
    with pytest.raises(RunError, match=r"no generation of .* has the samples on which .*old was trained; there is gen"):
        open_store(Run(tmp_path / "old"), None)


def test_a_resumed_run_goes_on_with_its_own(store, tmp_path):
    assert train(store, recipe(), tmp_path / "old", device="cpu", resume=True).trained == 0
    assert Run(tmp_path / "old").info.generation == 1


def test_a_generation_that_was_freed_is_named(store, tmp_path, capsys):
    free_old(store)
    freed = rf"generation 1 of .*s\.zarr, on which {tmp_path}/old was trained, was freed; there is generation 2: "
    for where in (None, store, f"{tmp_path}/data/../s.zarr"):
        with pytest.raises(RunError, match=freed + "name one as STORE/generations/N with --store"):
            evaluate(tmp_path / "old", store=where, device="cpu")
    with pytest.raises(CacheError, match="has no generation 1, or it was freed; it has 2"):
        evaluate(tmp_path / "old", store=f"{store}/generations/1", device="cpu")
    with pytest.raises(RunError, match=freed + "train another run"):
        train(store, recipe(2), tmp_path / "old", device="cpu", resume=True)
    capsys.readouterr()
    assert evaluate(tmp_path / "old", store=f"{store}/generations/2", device="cpu").results[0].images == 5
    assert "Note" not in capsys.readouterr().err


def test_a_store_that_was_moved(store, tmp_path, capsys):
    moved = str(shutil.move(store, tmp_path / "moved.zarr"))
    assert open_store(Run(tmp_path / "old"), moved).images == 20
    assert not capsys.readouterr().err
    free_old(moved)
    assert open_store(Run(tmp_path / "old"), moved).images == 21
    said = f"was trained on other samples than those of {moved}, generation 2, which is read.\n"
    assert capsys.readouterr().err.endswith(said)
    with pytest.raises(RunError, match=f"generation 1 of {moved}, on which .*old was trained, was freed"):
        train(moved, recipe(2), tmp_path / "old", device="cpu", resume=True)


def test_another_store_that_grows(monkeypatch, tmp_path):
    use(monkeypatch)
    first, other = (str(tmp_path / name) for name in ("a.zarr", "b.zarr"))
    extract(write(tmp_path / "a", pictures()), first, OPTIONS)
    data = [replace(one, content=one.content + 300, captions=("of the other",)) for one in pictures()]
    extract(write(tmp_path / "b", data), other, OPTIONS)
    out, words = tmp_path / "run", {"device": "cpu", "also": [other]}
    train(first, recipe(), out, **words)
    extract(write(tmp_path / "b", data[1:]), other, replace(OPTIONS, update=True))
    assert train(first, recipe(), out, resume=True, **words).trained == 0
    assert Run(out).info.also_stores == [f"{other}/generations/1"]
    Run(out).record(also_stores=[other])  # as an earlier version did
    assert train(first, recipe(), out, resume=True, **words).trained == 0
    free_old(other)
    with pytest.raises(
        RunError, match=r"generation 1 of .*b\.zarr, on which .*run was trained, was freed; there is gen"
    ):
        train(first, recipe(), out, resume=True, **words)


def test_two_generations_are_not_learnt_together(store, tmp_path):
    said = (
        r"generations 2 and 1 of .*s\.zarr have samples in common, and are not learnt from together; leave one --also"
    )
    with pytest.raises(CacheError, match=said):
        train(store, recipe(), tmp_path / "both", device="cpu", also=[f"{store}/generations/1"])
    assert not (tmp_path / "both").exists()
