"""Training on images in several views: one is drawn every epoch, and nothing else changes."""

import pytest
import torch
from small_runs import make_pictures
from small_runs import make_store as extracted
from small_store import make_store
from small_trainings import assert_equal, numbers, recipe_of, stopped_after

from xret.heads.ablation.ablation import ablate
from xret.heads.evaluation.evaluation import evaluate
from xret.heads.retrieval.retriever import Retriever
from xret.heads.runs.run import Run
from xret.heads.training.finetuning.finetuning import finetune
from xret.heads.training.objective import Objective
from xret.heads.training.train import train
from xret.pipeline.errors import RunError
from xret.pipeline.reading.features import drawn_views
from xret.pipeline.store import FeatureCache

SMALL = {"model.dim": 8, "adapter.words.word_dim": 8, "schedule.epochs": 1}
VIEWS = 3


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("views") / "views.zarr", train=24, views=VIEWS)


def run_of(store, out, *settings, **options):
    train(store, recipe_of("vsepp", 3, *settings), out, device="cpu", **options)
    return numbers(out)


def test_a_step_reads_the_view_that_is_drawn(store, tmp_path, monkeypatch):
    seen, original = [], Objective.__call__

    def spying(objective, batch, now):
        seen.append((int(now), batch.images.global_.clone()))
        return original(objective, batch, now)

    monkeypatch.setattr(Objective, "__call__", spying)
    run_of(store, tmp_path / "run", seed=5)
    images, rows = FeatureCache.open(store).image_set(), torch.arange(24).numpy()
    for epoch in range(3):
        expected = torch.from_numpy(images.global_(rows, drawn_views((5, epoch), VIEWS, 24)))
        got = {row.numpy().tobytes() for at, batch in seen if at == epoch for row in batch}
        assert got == {row.numpy().tobytes() for row in expected}


@pytest.mark.parametrize("place", ["auto", "memory", "stream"])
def test_a_training_that_was_stopped_goes_on_exactly(store, tmp_path, place):
    settings = "runtime.checkpoint_steps=2", f"runtime.cache={place}"
    whole = run_of(store, tmp_path / "whole", *settings)
    if place == "memory":
        assert_equal(whole, run_of(store, tmp_path / "auto"))  # wherever the features lie
    with stopped_after(5):
        run_of(store, tmp_path / "run", *settings)
    assert_equal(run_of(store, tmp_path / "run", *settings, resume=True), whole)


def test_the_first_view_alone_is_a_training_on_one_view(store, tmp_path):
    single = make_store(tmp_path / "single.zarr", train=24)
    first = run_of(store, tmp_path / "first", "data.views=first")  # validation reads it in any case
    assert_equal(first, run_of(single, tmp_path / "single"))
    with pytest.raises(RunError, match=r"data\.views"):
        run_of(store, tmp_path / "first", resume=True)


def test_an_ablation_varies_and_averages_them(store, tmp_path):
    how = {"recipe": "vsepp", "settings": SMALL, "views": True, "device": "cpu"}
    entries = ablate(store, tmp_path / "out", vary={"data.views": ["draw", "first"]}, **how).entries
    assert [entry.views for entry in entries] == [VIEWS] * 2
    assert [entry.rsum for entry in entries] == [
        evaluate(entry.run, views=True, device="cpu").results[0].rsum for entry in entries
    ]
    assert len({Run(entry.run).metrics()[0]["loss"] for entry in entries}) == 2
    both = make_store(tmp_path / "both.zarr", train=24, image=("grid", "roi"), views=(VIEWS, 1))
    entries = ablate(both, tmp_path / "each", vary={"data.image": ["grid", "roi"]}, **how).entries
    assert [entry.views for entry in entries] == [VIEWS, 1]


def test_search_and_fine_tuning_take_the_picture_as_it_is(tmp_path):
    manifest = make_pictures(tmp_path / "p")
    url = extracted(manifest, tmp_path / "s.zarr", views="dihedral:3")
    train(url, recipe_of("vsepp", 3, "data.unit=image"), tmp_path / "run", device="cpu")
    retriever = Retriever(tmp_path / "run", device="cpu", split="test", data_root=manifest.parent)
    new = retriever.encode_images([str(manifest.parent / "images" / "17.png")])
    assert torch.allclose(new[0], retriever.gallery.images[1], atol=1e-2)
    settings = {"schedule.epochs": 4, "finetune.image_lr": 0.01}
    finetune(tmp_path / "run", tmp_path / "tuned", reattach=["image"], data_root=manifest.parent, settings=settings)
    assert len(Run(tmp_path / "tuned").metrics()) == 4
