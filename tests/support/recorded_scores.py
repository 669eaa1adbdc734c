"""Score matrices that the recorded metrics describe by a recipe, since they are too large to be kept; and rankings."""

import itertools

import numpy as np
import torch


def recipe_uniform(seed, k):
    """Return the recipe's number in (0, 1) for every index of `k`, uint64."""
    with np.errstate(over="ignore"):  # the hash wraps on purpose
        z = np.uint64(seed) + (k + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z ^= z >> np.uint64(30)
        z *= np.uint64(0xBF58476D1CE4E5B9)
        z ^= z >> np.uint64(27)
        z *= np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    return ((z >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def recipe_scores(recipe, images=5000, per_image=5, rows=100):
    """Build the matrix that the recorded file describes by a recipe, float64, some rows at a time."""
    captions = images * per_image
    scores = torch.empty(images, captions, dtype=torch.float64)
    for first in range(0, images, rows):
        i = np.arange(first, min(first + rows, images), dtype=np.uint64)[:, None]
        k = i * np.uint64(captions) + np.arange(captions, dtype=np.uint64)[None]
        block = 1.0 / recipe_uniform(recipe["seed"], k)
        own = np.arange(len(i)).repeat(per_image), np.arange(per_image * first, per_image * (first + len(i)))
        v = recipe_uniform(recipe["seed"] + 500, k[own])
        block[own] *= ((v * v) * v) * recipe["W"]
        scores[first : first + len(i)] = torch.from_numpy(block)
    return scores


def rankings(scores):
    """Yield every order of the items that sorting by score may give."""
    groups = [[i for i, value in enumerate(scores) if value == level] for level in sorted(set(scores), reverse=True)]
    for parts in itertools.product(*(list(itertools.permutations(group)) for group in groups)):
        yield [item for part in parts for item in part]
