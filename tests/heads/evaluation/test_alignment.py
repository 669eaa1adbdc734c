"""How well frozen feature sets fit each other, against scikit-learn, full Gram matrices and loops."""

import json

import command_line
import numpy as np
import pytest
import torch
from canonical_reference import canonical_maps
from embedding_sources import Pairs
from plain_evaluation import globals_of, plain_rsum
from small_store import make_store

import xret
from xret.heads.evaluation.alignment import linear_cka, mutual_neighbours
from xret.heads.evaluation.closed_form import RIDGES
from xret.pipeline.errors import CacheError


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    url = tmp_path_factory.mktemp("alignment") / "s.zarr"
    return make_store(
        url, train=300, val=40, image=("grid", "roi"), text=("tokens", "longer", "words"), broken=[3, 301]
    )


def random(rows, columns, seed):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(rows, columns)))


def gram_cka(x, y):
    """Return linear CKA by Gram matrices with a zero diagonal (Song et al., 2012, equation 5)."""
    n, ones = len(x), np.ones(len(x))

    def hsic(k, m):
        k, m = (gram - np.diag(np.diag(gram)) for gram in (k, m))
        sums = ones @ k @ ones * (ones @ m @ ones) / ((n - 1) * (n - 2)) - 2 / (n - 2) * (ones @ k @ m @ ones)
        return (np.trace(k @ m) + sums) / (n * (n - 3))

    grams = [one.numpy() @ one.numpy().T for one in (x, y)]
    return hsic(*grams) / np.sqrt(hsic(grams[0], grams[0]) * hsic(grams[1], grams[1]))


def neighbours_by_loop(x, y, k):
    """Return the share of mutual neighbours, one row after another."""
    shared = 0
    for row in range(len(x)):
        near = []
        for one in (x.numpy(), y.numpy()):
            unit = one / np.linalg.norm(one, axis=1, keepdims=True)
            cosines = [-np.inf if other == row else unit[row] @ unit[other] for other in range(len(one))]
            near.append(set(np.argsort(cosines)[-k:].tolist()))
        shared += len(near[0] & near[1])
    return shared / (k * len(x))


@pytest.mark.parametrize(("rows", "columns"), [(30, 5), (30, 80), (300, 12)])
def test_both_measures_are_what_their_definitions_say(rows, columns):
    x = random(rows, columns, 0) + 3
    y = x[:, :4] @ random(4, 7, 1) + random(rows, 7, 2) - 1
    assert linear_cka(x, y) == pytest.approx(gram_cka(x, y), rel=1e-9)
    assert mutual_neighbours(x, y, 10) == pytest.approx(neighbours_by_loop(x, y, 10))


def test_equal_features_are_aligned_and_shuffled_ones_at_chance():
    x = random(600, 8, 0)
    turned = 3 * x @ torch.linalg.qr(random(8, 8, 1))[0]
    assert mutual_neighbours(x, turned) == 1
    assert linear_cka(x, turned + 5) == pytest.approx(1)
    shuffled = x[torch.from_numpy(np.random.default_rng(2).permutation(600))]
    assert mutual_neighbours(x, shuffled) == pytest.approx(10 / 599, abs=0.005)
    assert linear_cka(x, shuffled) == pytest.approx(0, abs=0.02)
    assert linear_cka(x, torch.ones(600, 3)) == 0


def cca_rsum(fitted, asked, ridge, power):
    """Fit images, captions and the owners of these by SciPy; return the RSUM of others."""
    images, captions, owner = fitted
    sides = [one(side) for one, side in zip(canonical_maps(images[owner], captions, ridge, power), asked, strict=False)]
    units = [side / np.linalg.norm(side, axis=1, keepdims=True) for side in sides]
    return plain_rsum(units[0] @ units[1].T, asked[2])


def test_the_map_is_that_of_canonical_correlations(store):
    found = xret.align(store)
    assert (found.images, found.skipped, len(found.pairs)) == (39, 1, 4)
    assert [path.split("@")[0] for path in found.left_out] == ["captions/words"]
    assert [pair.rsum for pair in found.pairs] == sorted((pair.rsum for pair in found.pairs), reverse=True)
    for pair in found.pairs:
        x, y, owner = globals_of(store, "train", pair.images, pair.captions)
        parts = []
        for some in (np.arange(len(x)) % 10 != 0, np.arange(len(x)) % 10 == 0):
            parts.append((x[some], y[some[owner]], np.cumsum(some)[owner[some[owner]]] - 1))
        val = x, y, owner = globals_of(store, "val", pair.images, pair.captions)
        assert pair.rsum == pytest.approx(cca_rsum(parts[0], val, pair.ridge, pair.power))
        reached = cca_rsum(*parts, pair.ridge, pair.power)
        assert reached >= max(cca_rsum(*parts, ridge, 0.5) for ridge in RIDGES)
        assert pair.mean_recall == pytest.approx(pair.rsum / 6)
        both = [torch.from_numpy(one) for one in (x, np.array([y[owner == row].mean(0) for row in range(len(x))]))]
        assert pair.mutual_neighbours == pytest.approx(100 * neighbours_by_loop(*both, 10))
        assert pair.cka == pytest.approx(gram_cka(*both), abs=1e-6)


@pytest.mark.parametrize("shuffled", [False, True])
def test_embeddings_that_belong_together_are_told_from_shuffled_ones(tmp_path, shuffled):
    pairs, store = Pairs(400), tmp_path / "s.zarr"
    if shuffled:
        pairs.captions = np.random.default_rng(0).permutation(pairs.captions)
    source = pairs.folder(tmp_path / "files", splits=["val" if row % 4 == 0 else "train" for row in range(400)])
    command_line.run("import", "--store", store, "--from", "embeddings", "--source", source, "--encoder", "clip")
    (pair,) = xret.align(store).pairs
    assert (pair.mean_recall < 12) if shuffled else (pair.mean_recall > 90)
    assert (abs(pair.cka) < 0.1) if shuffled else (pair.cka > 0.3)


def test_the_command_prints_what_python_returns(store):
    told = json.loads(command_line.run("cache", "align", store, "--split", "test", "--json").stdout)
    assert told == json.loads(json.dumps(xret.align(store, "test").to_dict()))
    lines = command_line.run("cache", "align", store).stdout.splitlines()
    assert [line.split()[0] for line in lines[2:-1]] == [pair.images for pair in xret.align(store).pairs]
    assert "words" in lines[-1]


@pytest.mark.parametrize(
    ("options", "split", "word"),
    [
        ({}, "train", "fitted"),
        ({}, "dev", "train, val, test"),
        ({"val": 4}, "val", "4 usable images"),
        ({"text": "words"}, "val", "trained with a head"),
        ({"splits": ("val",)}, "val", "train is incomplete"),
    ],
)
def test_what_cannot_be_compared_is_a_sentence(tmp_path, options, split, word):
    with pytest.raises(CacheError, match=word):
        xret.align(make_store(tmp_path / "s.zarr", **{"text": "tokens", **options}), split)
