"""Ablations and tunings on a store that grows meanwhile: one table is of one generation."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from changing_data import OPTIONS, Picture, pictures, use, write

from xret.heads.ablation import cells
from xret.heads.ablation.ablation import ablate
from xret.heads.ablation.plan import plan_variation
from xret.heads.runs.run import Run
from xret.heads.tuning import trials
from xret.heads.tuning.tuning import tune
from xret.pipeline.cache.storage.generations import free_old
from xret.pipeline.errors import RunError
from xret.pipeline.extraction.extraction import extract

pytestmark = pytest.mark.usefixtures("one_thread")

SETTINGS = ["schedule.epochs=1", "loss.same_text=excluded", "data.batch_size=8"]
GROWN = [*pictures(), Picture("a.png", 70, "test", ("something new",))]


@pytest.fixture
def store(monkeypatch, tmp_path):
    use(monkeypatch)
    url = str(tmp_path / "s.zarr")
    extract(write(tmp_path / "data", pictures()), url, OPTIONS)
    return url


def grow(store):
    extract(write(Path(store).parent / "data", GROWN), store, replace(OPTIONS, update=True))


@pytest.fixture
def grown_after_a_training(store, monkeypatch):
    """Let the store grow after the first training of a series."""
    ended = []

    def growing(module):
        original = module.train

        def train(*words, **options):
            done = original(*words, **options)
            if not ended:
                grow(store)
            ended.append(done)
            return done

        monkeypatch.setattr(module, "train", train)

    return growing


def ablated(store, out, dims="4,8"):
    plan = plan_variation("vsepp", [f"model.dim={dims}"], SETTINGS)
    return ablate(store, plan, out, device="cpu", verbose=None)


def results(out):
    """Return how many images each cell was evaluated on, and the generations of all runs."""
    found = [json.loads(file.read_text())["results"][0]["images"] for file in sorted(out.rglob("eval.json"))]
    return found, {Run(file.parent).info.generation for file in out.rglob("run.json")}


def test_the_cells_of_an_ablation_are_of_one_generation(store, tmp_path, grown_after_a_training, capsys):
    out = tmp_path / "out"
    grown_after_a_training(cells)
    ablated(store, out)
    assert results(out) == ([4, 4], {1})
    ablated(store, out, "4,8,16")
    assert results(out) == ([4, 4, 4], {1})
    assert f"{out} goes on with generation 1 of {store}, on which it was begun.\n" in capsys.readouterr().err
    ablated(store, tmp_path / "new", "4")
    assert results(tmp_path / "new") == ([5], {2})
    with pytest.raises(RunError, match=r"new belongs to another ablation: generation is 2 there and absent now"):
        ablated(f"{store}/generations/1", tmp_path / "new", "4")
    free_old(store)
    with pytest.raises(RunError, match=r"generation 1 of .*s\.zarr, on which .*out was begun, was freed; there is "):
        ablated(store, out)


def test_the_trials_of_a_tuning_are_of_one_generation(store, tmp_path, grown_after_a_training, monkeypatch):
    pytest.importorskip("optuna")
    out, generations = tmp_path / "out", []
    grown_after_a_training(trials)
    original = trials._outcome

    def look(job, *words):
        generations.append(Run(job.run).info.generation)
        return original(job, *words)

    monkeypatch.setattr(trials, "_outcome", look)
    for count in (2, 3):
        words = {"trials": count, "space": ["model.dim=4,8"], "settings": SETTINGS, "device": "cpu"}
        (found,) = tune(store, ["vsepp"], out, **words).recipes
        assert [one.images for one in found.evaluation.results] == [4]
    assert generations == [1, 1, 1]
    free_old(store)
    with pytest.raises(RunError, match="was begun, was freed; there is generation 2: take another --out"):
        tune(store, ["vsepp"], out, **words)
