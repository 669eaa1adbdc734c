"""What a head learns of a run: the teacher's scores are those of its own embeddings, and the head comes near them."""

import pytest
import torch
from command_line import refused
from small_store import make_store
from small_trainings import assert_equal, numbers, recipe_of, stopped_after

from xret.heads.evaluation.scoring import Ranker, embed_split
from xret.heads.runs.features import batches_of
from xret.heads.runs.run import Run
from xret.heads.training.teacher import Teacher
from xret.heads.training.train import train
from xret.losses import Distillation
from xret.pipeline.errors import RecipeError, RunError

CPU = torch.device("cpu")


@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("unit", ["image", "caption"])
def test_scores_are_those_of_the_teachers_embeddings(uninterrupted, unit, share):
    ranker = Ranker(uninterrupted, device="cpu")
    whole = embed_split(ranker, "train")
    split = batches_of(ranker.sets, ranker.model, "train", CPU, share=share)
    teacher = Teacher(uninterrupted, split, CPU, trust=False)
    image_of = {row: number for number, row in enumerate(whole.batches.image_rows.tolist())}
    caption_of = {row: number for number, row in enumerate(whole.batches.caption_rows.tolist())}
    for batch in split.epoch(unit=unit, batch_size=7, seed=0, epoch=1):
        captions = [caption_of[split.caption_rows[at]] for at in batch.caption_index.tolist()]
        owners = torch.tensor(
            [image_of[split.image_rows[split.caption_image[at]]] for at in batch.caption_index.tolist()]
        )
        images = torch.empty(len(batch.images.length), dtype=torch.long)
        images[batch.caption_image] = owners
        torch.testing.assert_close(teacher.scores(batch), whole.similarity[images][:, captions], atol=1e-5, rtol=0)


def test_a_head_comes_near_its_teacher_and_goes_on_as_if_never_stopped(store, uninterrupted, tmp_path):
    recipe = recipe_of("vsepp", 4, "loss.triplet.weight=0", "loss.distillation.weight=1", "optimizer.lr=0.02")
    train(store, recipe, tmp_path / "whole", distil=uninterrupted, device="cpu")
    first, *_, last = (line["loss"] for line in Run(tmp_path / "whole").metrics())
    assert last < 0.7 * first
    with stopped_after(8):
        train(store, recipe, tmp_path / "stopped", distil=uninterrupted, device="cpu")
    train(store, recipe, tmp_path / "stopped", resume=True, device="cpu")
    assert_equal(numbers(tmp_path / "whole"), numbers(tmp_path / "stopped"))
    given = Run(tmp_path / "whole")
    assert given.info.distil == str(uninterrupted)
    of_both = [embed_split(Ranker(run, device="cpu"), "train") for run in (uninterrupted, tmp_path / "whole")]
    nothing = torch.zeros_like(of_both[0].similarity) > 0
    divergence = Distillation()(of_both[1].similarity, nothing, None, None, taught=of_both[0].similarity)
    train(store, recipe_of("vsepp", 4, "optimizer.lr=0.02"), tmp_path / "alone", device="cpu")
    alone = embed_split(Ranker(tmp_path / "alone", device="cpu"), "train").similarity
    assert divergence < Distillation()(alone, nothing, None, None, taught=of_both[0].similarity)


def test_a_teacher_adds_its_term_and_is_asked_for(store, uninterrupted, tmp_path):
    train(store, recipe_of("vsepp", 1), tmp_path / "run", distil=uninterrupted, device="cpu")
    assert set(Run(tmp_path / "run").recipe.terms) == {"triplet", "distillation"}
    with pytest.raises(RecipeError, match="needs a teacher: name a run by --distil"):
        train(store, recipe_of("vsepp", 1, "loss.distillation.weight=1"), tmp_path / "none", device="cpu")
    with pytest.raises(RunError, match="was begun with --distil"):
        train(store, recipe_of("vsepp", 2), tmp_path / "run", distil=tmp_path / "run", resume=True, device="cpu")
    other = make_store(tmp_path / "other.zarr", weights="b")
    how = ["--recipe", "vsepp", "--device", "cpu", "--out", tmp_path / "o"]
    assert "has no image features equal to" in refused("train-head", other, *how, "--distil", uninterrupted)
    more = make_store(tmp_path / "more.zarr", mark="more ")
    assert "a teacher is of one store" in refused("train-head", store, more, *how, "--distil", uninterrupted)
    blends = "augment.mix=1", "data.unit=image", "data.captions=1", "loss.same_text=negative"
    settings = [word for setting in blends for word in ("--set", setting)]
    assert "no blends" in refused("train-head", store, *how, "--distil", uninterrupted, *settings)
    assert not (tmp_path / "o").exists()


def test_a_teacher_that_lacks_a_sample_is_refused(tmp_path):
    store = make_store(tmp_path / "s.zarr", image=("grid", "roi"), broken=(3,))
    train(store, recipe_of("vsepp", 1, "data.image=roi"), tmp_path / "teacher", device="cpu")
    recipe = recipe_of("vsepp", 1, "data.image=grid")
    with pytest.raises(RunError, match="no embedding of 1 image of train"):
        train(store, recipe, tmp_path / "run", distil=tmp_path / "teacher", device="cpu")
    assert not (tmp_path / "run").exists()
