"""Training on images in several views: one is drawn every epoch, and nothing else changes."""

import csv
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from small_runs import make_pictures
from small_runs import make_store as extracted
from small_store import make_store

from xret.heads.ablation.ablation import ablate
from xret.heads.ablation.plan import make_plan
from xret.heads.ablation.table import as_csv
from xret.heads.evaluation.evaluation import evaluate
from xret.heads.recipes.recipe import load_recipe
from xret.heads.recipes.settings import settings_of
from xret.heads.retrieval.retriever import Retriever
from xret.heads.runs.run import Run
from xret.heads.training.finetuning.finetuning import finetune
from xret.heads.training.objective import Objective
from xret.heads.training.train import train
from xret.pipeline.errors import RunError
from xret.pipeline.reading.features import drawn_views
from xret.pipeline.store import FeatureCache

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = ["model.dim=16", "data.batch_size=8", "adapter.words.word_dim=8", "optimizer.lr=0.01", "schedule.epochs=3"]
VIEWS = 3


def recipe_of(*settings):
    return load_recipe("vsepp", [*SMALL, *settings])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("views")


@pytest.fixture(scope="module")
def store(folder):
    return make_store(folder / "views.zarr", train=24, views=VIEWS)


@pytest.fixture(scope="module")
def run(store, folder):
    train(store, recipe_of(), folder / "run", device="cpu")
    return folder / "run"


def weights(run):
    return load_file(run / "model.safetensors")


def losses(run):
    return [line["loss"] for line in Run(run).metrics()]


def test_a_step_reads_the_view_that_is_drawn(store, tmp_path, monkeypatch):
    seen, original = [], Objective.__call__

    def spying(objective, batch, now):
        seen.append((int(now), batch.images.global_.clone()))
        return original(objective, batch, now)

    monkeypatch.setattr(Objective, "__call__", spying)
    train(store, recipe_of(), tmp_path / "run", device="cpu", seed=5)
    images = FeatureCache.open(store).image_set()
    rows = torch.arange(24).numpy()
    for epoch in range(3):
        expected = torch.from_numpy(images.global_(rows, drawn_views((5, epoch), VIEWS, 24)))
        got = {row.numpy().tobytes() for at, batch in seen if at == epoch for row in batch}
        assert got == {row.numpy().tobytes() for row in expected}


@pytest.mark.parametrize("place", ["memory"])
def test_weights_are_the_same_wherever_the_features_lie(store, run, tmp_path, place):
    train(store, recipe_of(f"runtime.cache={place}"), tmp_path / "run", device="cpu")
    for name, value in weights(tmp_path / "run").items():
        assert torch.equal(weights(run)[name], value)


@pytest.mark.parametrize("place", ["auto", "stream"])
def test_a_training_that_was_stopped_goes_on_exactly(store, tmp_path, monkeypatch, place):
    recipe = recipe_of("runtime.checkpoint_steps=2", f"runtime.cache={place}")
    train(store, recipe, tmp_path / "whole", device="cpu")
    calls, original = [], Objective.__call__

    def stopping(objective, batch, now):
        calls.append(now)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return original(objective, batch, now)

    monkeypatch.setattr(Objective, "__call__", stopping)
    with pytest.raises(KeyboardInterrupt):
        train(store, recipe, tmp_path / "run", device="cpu")
    train(store, recipe, tmp_path / "run", device="cpu", resume=True)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    for name, value in weights(tmp_path / "run").items():
        assert torch.equal(weights(tmp_path / "whole")[name], value)


def test_the_first_view_alone_is_a_training_on_one_view(store, run, folder, tmp_path):
    single = make_store(folder / "single.zarr", train=24)
    train(single, recipe_of(), tmp_path / "single", device="cpu")
    train(store, recipe_of("data.views=first"), tmp_path / "first", device="cpu")
    assert losses(tmp_path / "first") == losses(tmp_path / "single") != losses(run)
    rsums = [[line["rsum"] for line in Run(tmp_path / name).metrics()] for name in ("first", "single")]
    assert rsums[0] == rsums[1]  # validation reads the first view
    for name, value in weights(tmp_path / "first").items():
        assert torch.equal(weights(tmp_path / "single")[name], value)
    with pytest.raises(RunError, match=r"data\.views"):
        train(store, recipe_of(), tmp_path / "first", device="cpu", resume=True)


def test_an_ablation_varies_and_averages_them(store, folder, tmp_path):
    plan = make_plan("vsepp", {"data.views": ["draw", "first"]}, settings=settings_of(SMALL), views=True)
    ablation = ablate(store, plan, tmp_path / "out", device="cpu")
    entries = ablation.entries
    assert [entry.views for entry in entries] == [VIEWS] * 2
    assert ", ties pessimistic, mean over 3 views of each image" in str(ablation).splitlines()[0]
    assert [row["views"] for row in csv.DictReader(as_csv(ablation.lines).splitlines())] == ["3", "3"]
    for entry in entries:
        (expected,) = evaluate(entry.run, views=True, device="cpu").results
        assert entry.rsum == expected.rsum
    assert losses_of(entries, "draw") != losses_of(entries, "first")
    # The same folder by the first view: only the evaluation is made anew.
    again = ablate(store, replace(plan, views=False), tmp_path / "out", device="cpu")
    assert "views" not in str(again).splitlines()[0]
    for entry in again.entries:
        assert entry.views == 1
        assert entry.rsum == evaluate(entry.run, device="cpu").results[0].rsum
    single = make_store(folder / "one.zarr", train=24)
    with pytest.raises(RunError, match="has one view of each image"):
        ablate(single, make_plan("vsepp", {"model.dim": [8, 16]}, views=True), tmp_path / "no", device="cpu")
    assert not (tmp_path / "no").exists()


def test_an_ablation_takes_each_set_with_the_views_it_has(tmp_path):
    store = make_store(tmp_path / "both.zarr", train=24, image=("grid", "roi"), views=(VIEWS, 1))
    settings = settings_of([*SMALL, "data.views=first"])
    plan = make_plan("vsepp", {"data.image": ["grid", "roi"]}, settings=settings, views=True)
    ablation = ablate(store, plan, tmp_path / "out", device="cpu")
    for entry, views in zip(ablation.entries, (VIEWS, 1), strict=True):
        assert entry.views == views
        assert entry.rsum == evaluate(entry.run, views=views > 1, device="cpu").results[0].rsum
    title, head, *rows = str(ablation).splitlines()
    assert "views" not in title
    assert [line.split()[-1] for line in (head, *rows)] == ["views", "3", "1"]
    assert [row["views"] for row in csv.DictReader(as_csv(ablation.lines).splitlines())] == ["3", "1"]


def losses_of(entries, views):
    (own,) = (entry.run for entry in entries if entry.values["data.views"] == views)
    return losses(own)


def test_search_and_fine_tuning_take_the_picture_as_it_is(tmp_path):
    manifest = make_pictures(tmp_path / "p")
    url = extracted(manifest, tmp_path / "s.zarr", views="dihedral:3")
    train(url, load_recipe("vsepp", [*SMALL, "data.unit=image"]), tmp_path / "run", device="cpu")
    retriever = Retriever(tmp_path / "run", device="cpu", data_root=manifest.parent)
    new = retriever.encode_images([str(manifest.parent / "images" / "17.png")])
    assert torch.allclose(new[0], retriever.gallery.images[1], atol=1e-2)
    settings = ["schedule.epochs=4", "finetune.image_lr=0.01"]
    finetune(tmp_path / "run", tmp_path / "tuned", reattach=["image"], data_root=manifest.parent, settings=settings)
    assert len(Run(tmp_path / "tuned").metrics()) == 4
