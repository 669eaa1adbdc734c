"""Regularised canonical correlation analysis by SciPy's generalised eigenvalues."""

import numpy as np
from scipy.linalg import eigh


def canonical_maps(images, captions, ridge, power):
    """Fit pairs `images [N, C]` and `captions [N, D]`; return what maps other images and captions."""
    centres = images.mean(0), captions.mean(0)
    x, y = images - centres[0], captions - centres[1]
    cross = x.T @ y / len(x)
    spreads = [one.T @ one / len(x) for one in (x, y)]
    of_x, of_y = (one + ridge * np.trace(one) / len(one) * np.eye(len(one)) for one in spreads)
    values, vectors = eigh(cross @ np.linalg.solve(of_y, cross.T), of_x)
    kept = np.argsort(values)[::-1][: min(len(of_x), len(of_y))]
    correlations, a = np.sqrt(values[kept].clip(0)), vectors[:, kept]
    b = np.linalg.solve(of_y, cross.T @ a) / correlations
    weights = correlations**power
    return lambda other: (other - centres[0]) @ (a * weights), lambda other: (other - centres[1]) @ (b * weights)
