"""One head learnt from several stores."""

import shutil

import pytest
import torch
from small_store import make_store
from small_trainings import assert_equal, numbers, state_of, stopped_after

import xret
from xret.heads.evaluation.evaluation import evaluate
from xret.heads.recipes.recipe import load_recipe
from xret.heads.runs.run import Run
from xret.heads.training.objective import Objective
from xret.heads.training.train import train
from xret.pipeline.errors import RunError, XretError
from xret.pipeline.store import FeatureCache

SETTINGS = ["model.dim=16", "adapter.words.word_dim=8", "data.unit=image", "data.batch_size=4", "schedule.epochs=3"]
SETTINGS += ["loss.triplet.reduction=mean", "loss.same_text=excluded"]


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """Two stores of one encoder, of 10 and 8 images of train; the second one's captions have other words as well."""
    folder = tmp_path_factory.mktemp("stores")
    second = make_store(folder / "b.zarr", train=8, val=4, words="look here")
    return make_store(folder / "a.zarr", train=10), second


def recipe_of(*settings):
    return load_recipe("vsepp", [*SETTINGS, *settings])


@pytest.fixture(scope="module")
def whole(stores, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "whole"
    train(stores, recipe_of(), out, device="cpu")
    return out


def test_every_sample_of_both_is_learnt_and_the_first_validates(stores, whole, tmp_path, monkeypatch):
    seen, original = [], Objective.__call__

    def count(self, batch, now):
        seen.append((len(batch.images.length), len(batch.captions.length), self.text_number))
        return original(self, batch, now)

    monkeypatch.setattr(Objective, "__call__", count)
    train(stores, recipe_of("schedule.epochs=1"), tmp_path / "run", device="cpu")
    caches = [FeatureCache.open(url) for url in stores]
    assert sum(images for images, _, _ in seen) == 18
    assert sum(captions for _, captions, _ in seen) == 25 + 20
    # Captions are told apart by their texts in both stores.
    texts = [text for cache, n in zip(caches, (25, 20), strict=True) for text in cache.caption_texts(0, n)]
    number = seen[0][2](torch.arange(45)).tolist()
    assert [texts.index(text) for text in texts] == [number.index(n) for n in number]
    info = Run(whole).info
    assert info.also == [f"small {caches[1].manifest_sha256[:8]}"]
    assert info.also_stores == [stores[1]]
    assert Run(whole).vocabulary == caches[0].caption_set().vocabulary
    (result,) = evaluate([whole], split="val", device="cpu").results
    assert (result.images, result.rsum) == (12, pytest.approx(info.best_rsum))


def test_pictures_that_a_store_teaches_and_the_first_holds_out_are_counted(tiny_dataset, tmp_path, caplog):
    """`b` trains on the files that `a` validates and tests on."""
    sizes = {"a": {"train": 20, "val": 6, "test": 5}, "b": {"train": 28}}
    urls = [str(tmp_path / f"{name}.zarr") for name in sizes]
    for url, (name, size) in zip(urls, sizes.items(), strict=True):
        xret.extract(tiny_dataset(name, **size), url, visual="resnet18", visual_weights="random:0", text="words")
    train(urls, recipe_of("schedule.epochs=1"), tmp_path / "run", device="cpu")
    assert [text for text in caplog.messages if "too high" in text] == [
        f"{urls[1]} teaches {count} of split '{split}' of {urls[0]}, so that recalls on that split come out too high"
        for split, count in (("val", "6 pictures"), ("test", "2 pictures"))
    ]


def test_stopped_within_an_epoch_and_resumed_it_is_as_if_never_stopped(stores, whole, tmp_path):
    out = tmp_path / "run"
    with stopped_after(7):
        train(stores, recipe_of("runtime.checkpoint_steps=1"), out, device="cpu")
    assert state_of(out)["steps"] == 2  # of five in an epoch
    with pytest.raises(RunError, match=r"begun otherwise: also is \['small \w{8}'\] there and None now"):
        train(stores[0], recipe_of(), out, device="cpu", resume=True)
    moved = [str(shutil.copytree(url, tmp_path / f"{name}.zarr")) for url, name in zip(stores, "ab", strict=True)]
    train(moved, recipe_of(), out, device="cpu", resume=True)
    assert_equal(numbers(out), numbers(whole))
    info = Run(out).info
    assert [info.store, *info.also_stores] == [moved[0], moved[1]]


def test_what_does_not_fit_is_a_sentence_before_anything_is_written(stores, tmp_path):
    other = make_store(tmp_path / "c.zarr", train=9, weights="b")
    tokens = make_store(tmp_path / "d.zarr", train=9, text="tokens")
    copy = str(shutil.copytree(stores[1], tmp_path / "g.zarr"))
    no_train = make_store(tmp_path / "e.zarr", train=0)
    for first, also, sentence in (
        (stores[0], [stores[0]], r"a\.zarr has the same samples as .*a\.zarr; leave one out"),
        (stores[0], [stores[1], copy], r"g\.zarr has the same samples as .*b\.zarr; leave one out"),
        (stores[0], [str(tmp_path / "none")], "there is no feature store"),
        (stores[0], [no_train], r"e\.zarr has no split 'train'; it has val, test"),
        (stores[0], [other], r"no image features equal to 'grid@\w+' \(it has grid@\w+\); extract it there with"),
        (tokens, [stores[0]], r"no text features equal to 'states@\w+' \(it has words@\w+\)"),
    ):
        with pytest.raises(XretError, match=sentence):
            train([first, *also], recipe_of(), tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()
