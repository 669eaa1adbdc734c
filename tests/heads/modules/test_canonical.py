"""Canonical correlations against SciPy's generalised eigenvalues, and orthogonal Procrustes."""

import numpy as np
import pytest
import torch
from canonical_reference import canonical_maps
from scipy.linalg import orthogonal_procrustes

from xret.heads.modules.canonical import Moments


def correlated(pairs, widths, seed=0):
    rng = np.random.default_rng(seed)
    shared = rng.normal(size=(pairs, 3))
    return [
        shared @ rng.normal(size=(3, w)) + rng.normal(size=(pairs, w)) @ rng.normal(size=(w, w)) + w for w in widths
    ]


def moments_of(images, captions, owner=None, step=50):
    moments, owner = Moments(), np.arange(len(images)) if owner is None else owner
    for first in range(0, len(images), step):
        mine = (owner >= first) & (owner < first + step)
        parts = images[first : first + step], captions[mine]
        moments.add(*([torch.from_numpy(one)] for one in parts), torch.from_numpy(owner[mine] - first))
    return moments


def scores(maps, images, captions):
    return (maps[0](torch.from_numpy(images)) @ maps[1](torch.from_numpy(captions)).T).numpy()


@pytest.mark.parametrize(("ridge", "power"), [(0.0, 0.0), (0.1, 1.0), (3.0, 2.0), (0.5, 0.5)])
@pytest.mark.parametrize("widths", [(7, 4), (4, 7), (5, 5)])
def test_the_maps_are_those_of_generalised_eigenvalues(widths, ridge, power):
    x, y = correlated(400, widths)
    found = scores(moments_of(x, y).maps(ridge, power), x, y)
    one, other = canonical_maps(x, y, ridge, power)
    np.testing.assert_allclose(found, one(x) @ other(y).T, rtol=1e-9, atol=1e-9)


def test_a_caption_is_a_pair_with_its_image():
    x, y = correlated(300, (6, 5))
    owner = np.sort(np.random.default_rng(1).integers(0, 300, 300))
    found = scores(moments_of(x, y, owner).maps(0.2, 1.0), x, y)
    np.testing.assert_allclose(found, scores(moments_of(x[owner], y).maps(0.2, 1.0), x, y), rtol=1e-9, atol=1e-9)


def test_an_infinite_ridge_and_no_power_are_procrustes():
    x, y = correlated(500, (6, 6))
    rotation, _ = orthogonal_procrustes(x - x.mean(0), y - y.mean(0))
    expected = (x - x.mean(0)) @ rotation @ (y - y.mean(0)).T
    np.testing.assert_allclose(scores(moments_of(x, y).maps(float("inf"), 0.0), x, y), expected, rtol=1e-9, atol=1e-9)


def test_constant_components_do_no_harm():
    x, y = correlated(100, (5, 4))
    x[:, 2], y[:, 0] = 3, 0
    assert all(torch.isfinite(one.matrix).all() for one in moments_of(x, y).maps(0.1, 1.0))
