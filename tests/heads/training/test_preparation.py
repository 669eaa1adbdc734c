"""What a training needs of a store, and what it takes from it before the first step."""

import pytest
import torch
from small_store import make_store
from small_trainings import recipe_of

from xret.heads.evaluation.evaluation import evaluate
from xret.heads.runs.run import Run
from xret.heads.training.train import train
from xret.pipeline.errors import CacheError, RecipeError, RunError, VectorsError
from xret.pipeline.reading.batches import stored_batches
from xret.pipeline.store import FeatureCache

pytestmark = pytest.mark.usefixtures("one_thread")


def test_splits_that_are_needed(tmp_path):
    without = make_store(tmp_path / "a.zarr", val=0)
    with pytest.raises(
        CacheError, match=r"no split 'val', which training needs to choose its best epoch .*merge_splits"
    ):
        train(without, recipe_of(), tmp_path / "run", device="cpu")
    without = make_store(tmp_path / "c.zarr", train=0)
    with pytest.raises(CacheError, match=r"no split 'train', which training needs to learn from \(it has val, test\)"):
        train(without, recipe_of(), tmp_path / "run", device="cpu")
    single = make_store(tmp_path / "b.zarr", train=1)
    with pytest.raises(RunError, match=r"split 'train' of .* has a single usable image"):
        train(single, recipe_of(), tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()


def test_a_recipe_that_does_not_fit_leaves_nothing_behind(store, tmp_path):
    with pytest.raises(RecipeError, match=r"aggregator\.image: .*heads"):
        train(
            store, recipe_of("setdiv", 1, "aggregator.image.heads=3", "aggregator.image.head_dim=null"), tmp_path / "r"
        )
    with pytest.raises(CacheError, match="no feature set fits 'resnet18'"):
        train(store, recipe_of("setdiv", 1, "data.image=resnet18"), tmp_path / "r")
    assert list(tmp_path.iterdir()) == []


def test_word_vectors_are_the_first_weights_and_stay_in_the_run(store, tmp_path, capsys):
    vocabulary = FeatureCache.open(store).caption_set().vocabulary
    known = vocabulary[1:4]
    path = tmp_path / "vectors.txt"
    path.write_text("".join(f"{word} {' '.join(['0.25'] * 8)}\n" for word in known))
    settings = [f"adapter.words.vectors={path}", "adapter.words.train_vectors=false"]
    train(store, recipe_of("vsepp", 1, *settings), tmp_path / "run", device="cpu")
    assert f"words without a vector in {path}: {len(vocabulary) - 3} of {len(vocabulary)}\n" in capsys.readouterr().err
    path.unlink()
    embedding = Run(tmp_path / "run").model(torch.device("cpu")).text.adapter.embedding.weight
    assert torch.equal(embedding[1:4], torch.full((3, 8), 0.25))
    assert evaluate([tmp_path / "run"], split="val").results[0].rsum > 0
    with pytest.raises(VectorsError, match=r"vectors\.txt"):
        train(store, recipe_of("vsepp", 1, *settings), tmp_path / "other", device="cpu")
    assert not (tmp_path / "other").exists()


def test_the_statistics_of_the_training_split_stay_in_the_run(tmp_path):
    url = make_store(tmp_path / "s.zarr", image="grid", text="tokens")
    settings = [f"adapter.{kind}.standardize=true" for kind in ("grid", "tokens")]
    train(url, recipe_of("vsepp", 1, *settings), tmp_path / "run", device="cpu")
    model = Run(tmp_path / "run").model(torch.device("cpu"))
    cache = FeatureCache.open(url)
    fields = {"image_fields": {"global"}, "caption_fields": {"local"}}
    split = stored_batches(cache.image_set(), cache.caption_set(), "train", **fields)
    images = torch.cat([part.global_.double() for part in split.image_features(7)])
    torch.testing.assert_close(model.image.adapter.global_input.mean.double(), images.mean(0), atol=1e-6, rtol=1e-5)
    states = torch.cat(
        [part.local[row, :n].double() for part in split.caption_features(7) for row, n in enumerate(part.length)]
    )
    found = model.text.adapter.rows_input
    torch.testing.assert_close(found.deviation.double(), states.std(0, correction=0), atol=1e-6, rtol=1e-4)
