"""A map of the embedding space: the elements of some samples by t-SNE, coloured by slot and marked by modality.

Figure A1 of *Improving Cross-Modal Retrieval with Set of Diverse Embeddings* (SetDiv) and Figure 3 of *Maximal Matching
Matters* (MaxMatch).
"""

from functools import partial

import numpy as np
import torch

from ...modules.embedding import Gaussian, Sequence
from ..figures import Plot
from ..plots import points
from ..views import View
from .examples import drawn

POINTS = 1000  # elements of a map


def element_map(view: View, seed: int) -> Plot:
    """Draw the elements of random images, each with one of its captions."""
    left, right = view.image_elements, view.caption_elements
    owner = view.scores.caption_image.numpy()
    images = drawn(np.unique(owner), max(2, POINTS // (left.shape[1] + right.shape[1])), seed)
    left, right = left[images], right[np.searchsorted(owner, images)]  # the first caption of each
    rows = torch.cat([left.flatten(0, 1), right.flatten(0, 1)]).cpu().numpy()
    placed = np.split(tsne(rows, seed), [left.shape[0] * left.shape[1]])
    series = []
    for side, modality, marker in zip(placed, ("image", "caption"), ("o", "x"), strict=True):
        own = side.reshape(len(images), -1, 2)
        for k in range(own.shape[1]):
            name = f"{modality}, slot {k + 1}" if view.is_set else modality
            colour = k if view.is_set else int(modality == "caption")
            series.append((name, own[:, k, 0].tolist(), own[:, k, 1].tolist(), colour, marker))
    caption = (
        f"{view.name}: t-SNE of {_what(view)} of {len(images)} random images (dots) and of a caption of each (crosses)"
        + (", a colour a slot." if view.is_set else ".")
        + " Near is similar; the axes have no unit."
    )
    return Plot(partial(points, series, "t-SNE 1", "t-SNE 2", ticks=False), "Scatter plot", caption)


def tsne(rows: np.ndarray, seed: int) -> np.ndarray:
    """Return a place in the plane for each of `rows` [N, D], [N, 2]; all at the origin where they are all alike."""
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE

    rows = rows.astype(np.float64)
    if len(rows) < 3 or np.ptp(rows, axis=0).max() < 1e-6:
        return np.zeros((len(rows), 2))
    width = min(50, *rows.shape)
    reduced = PCA(width, random_state=seed).fit_transform(rows)
    perplexity = min(30.0, (len(rows) - 1) / 3)
    placed: np.ndarray = TSNE(2, perplexity=perplexity, init="pca", random_state=seed).fit_transform(reduced)
    return placed


def _what(view: View) -> str:
    embedding = view.image.embedding
    if isinstance(embedding, Gaussian):
        return "the means of the Gaussians"
    if isinstance(embedding, Sequence):
        return "the means of the rows"
    return "the elements" if view.is_set else "the embeddings"
