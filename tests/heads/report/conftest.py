"""A store with pictures, runs on it, and what a report reads of one."""

import numpy as np
import pytest
from PIL import Image
from small_store import make_store
from small_trainings import recipe_of

from xret.heads.evaluation.scoring import Ranker, embed_split
from xret.heads.report.examples import PageRun
from xret.heads.report.pictures import Pictures
from xret.heads.training.train import train


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A store with captions that HTML must escape, and its pictures."""
    folder = tmp_path_factory.mktemp("report")
    make_store(folder / "small.zarr", words="<b>&amp;</b>")
    (folder / "images").mkdir()
    rng = np.random.default_rng(0)
    for number_ in range(72):
        pixels = rng.integers(0, 256, (30, 40, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "images" / f"{number_}.jpg")
    return folder


@pytest.fixture(scope="session")
def run(folder):
    def trained(name):
        path = folder / name
        if not path.exists():
            train(str(folder / "small.zarr"), recipe_of(name, 2), path, device="cpu")
        return path

    return trained


@pytest.fixture(scope="session")
def shown(run):
    def opened(run_or_name, data_root=None, store=None):
        path = run(run_or_name) if isinstance(run_or_name, str) else run_or_name
        seen = embed_split(Ranker(path, store=store, device="cpu"), "test")
        return PageRun(path.name, seen, Pictures(seen.ranker.cache, data_root))

    return opened


@pytest.fixture(scope="session")
def setdiv(shown):
    return shown("setdiv")
