"""The gallery: a split's usable samples in the order of the store, and files that never leave their folder."""

import numpy as np
import pytest
import torch
from small_store import make_store

from xret.heads.recipes.recipe import load_recipe
from xret.heads.retrieval.gallery import Gallery
from xret.heads.runs.run import Run
from xret.heads.training.train import train
from xret.pipeline.errors import CacheError
from xret.pipeline.store import FeatureCache

CPU = torch.device("cpu")
SETTINGS = ["model.dim=16", "data.batch_size=16", "adapter.words.word_dim=8", "schedule.epochs=1"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("gallery")
    train(make_store(folder / "small.zarr"), load_recipe("vsepp", SETTINGS), folder / "run", device="cpu")
    yield Run(folder / "run")
    torch.set_num_threads(threads)


def open_gallery(run, url, split="test", data_root=None):
    return Gallery(run, run.model(CPU), FeatureCache.open(str(url)), split, CPU, data_root)


def test_failed_images_and_their_captions_are_left_out(run, tmp_path):
    gallery = open_gallery(run, make_store(tmp_path / "s.zarr", broken=(61, 70)))
    kept = [number for number in range(60, 72) if number not in (61, 70)]
    assert gallery.image_ids == [str(number) for number in kept]
    assert gallery.file_names == [f"{number}.jpg" for number in kept]
    captions = [(number, k) for number in kept for k in range(2 + number % 2)]
    assert gallery.caption_ids == [str(10 * number + k) for number, k in captions]
    assert gallery.caption_image.tolist() == [kept.index(number) for number, _ in captions]
    assert len(gallery.texts) == len(captions)
    assert gallery.images.shape == (10, 16)
    assert gallery.captions.shape == (len(captions), 16)


def test_files_are_found_below_the_folder_of_the_images(run, tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "images/0.jpg").touch()
    gallery = open_gallery(run, run.info.store, data_root=tmp_path)
    assert gallery.picture(3) == tmp_path / "images/63.jpg"
    with pytest.raises(CacheError, match="give their folder as --data-root"):
        open_gallery(run, run.info.store).picture(0)


def test_no_file_outside_the_folder_is_named(run, tmp_path):
    with pytest.raises(CacheError, match="outside of the image folder"):
        open_gallery(run, make_store(tmp_path / "s.zarr", mark="../"), data_root=tmp_path)


def test_ids_belong_to_the_rows_of_the_store(run):
    gallery = open_gallery(run, run.info.store, "val")
    cache = FeatureCache.open(run.info.store)
    first, last = cache.splits["val"]
    assert gallery.image_ids == cache.ids(first, last)
    rows = np.arange(cache.captions)[cache.caption_set().rows_of("val")]
    assert gallery.texts == cache.caption_texts(int(rows[0]), int(rows[-1]) + 1)


def test_captions_whose_numbers_begin_anew_have_ids_of_their_own(run, tmp_path, monkeypatch):
    url = make_store(tmp_path / "s.zarr")
    numbered = open_gallery(run, url)
    monkeypatch.setattr(FeatureCache, "sentids", lambda cache, first, end: np.arange(first, end) % 2)
    gallery = open_gallery(run, url)
    assert len(set(gallery.caption_ids)) == len(gallery.texts) == len(numbered.texts)
    first = gallery.caption_ids[0]
    assert gallery.caption_ids == [str(int(first) + row) for row in range(len(gallery.texts))]
