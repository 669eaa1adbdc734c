"""Score matrices that the recorded metrics describe by a recipe, since they are too large to be kept."""

import numpy as np


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


def recipe_scores(seed, images, weight, first=0, last=None, per_image=5):
    """Build rows [first, last) of the matrix that the recorded file describes by a recipe."""
    captions = images * per_image
    i = np.arange(first, images if last is None else last, dtype=np.uint64)[:, None]
    j = np.arange(captions, dtype=np.uint64)[None]
    k = i * np.uint64(captions) + j
    score = 1.0 / recipe_uniform(seed, k)
    rows = np.arange(len(i)).repeat(per_image)
    columns = np.arange(first * per_image, first * per_image + len(rows))
    v = recipe_uniform(seed + 500, k[rows, columns])
    score[rows, columns] *= ((v * v) * v) * weight
    return score
