"""A map of the embedding space: the elements of some samples by t-SNE, coloured by slot and marked by modality.

Figure A1 of *Improving Cross-Modal Retrieval with Set of Diverse Embeddings* (SetDiv) and Figure 3 of *Maximal Matching
Matters* (MaxMatch).
"""

import numpy as np
import torch

from ...modules.embedding import Gaussian, Sequence
from ..figures import Map, Mark
from ..views import View
from .examples import described, drawn

POINTS = 200  # elements of a map: few enough to be told apart


def element_map(view: View, seed: int) -> Map:
    """Place the elements of random images, each with one of its captions."""
    left, right = view.image_elements, view.caption_elements
    owner = view.scores.caption_image.numpy()
    images = drawn(np.unique(owner), max(2, POINTS // (left.shape[1] + right.shape[1])), seed)
    captions = np.searchsorted(owner, images)  # the first of each
    left, right = left[images], right[captions]
    rows = torch.cat([left.flatten(0, 1), right.flatten(0, 1)]).cpu().numpy()
    placed = _percent(tsne(rows, seed))
    samples: list[list[Mark]] = [[] for _ in images]
    slots = left.shape[1], right.shape[1]
    for modality, count, side in zip(
        ("image", "caption"), slots, np.split(placed, [left[..., 0].numel()]), strict=True
    ):
        for n, own in enumerate(side.reshape(len(images), count, 2).tolist()):
            text = view.scores.texts[captions[n]]
            title = described(view.scores.ids[images[n]], text) if modality == "image" else f"Caption: {text}"
            samples[n] += [
                Mark(modality, _colour(view, modality, k), x, y, f"{title} (slot {k + 1})" if view.is_set else title)
                for k, (x, y) in enumerate(own)
            ]
    caption = f"t-SNE of {_what(view)} of {len(images)} random images and of a caption of each."
    kinds = ("image", "caption")
    legend = [(one, Mark(one, None if view.is_set else _colour(view, one, 0), 0, 0, "")) for one in kinds]
    if view.is_set:
        legend += [(f"slot {k + 1}", Mark("slot", k, 0, 0, "")) for k in range(max(slots))]
    return Map(caption, legend, samples)


def _colour(view: View, modality: str, slot: int) -> int:
    """Return the number of a mark's colour: that of its slot, or of its modality where there is one only."""
    return slot if view.is_set else int(modality == "caption")


def _percent(places: np.ndarray) -> np.ndarray:
    """Return places, [N, 2], as percent of a map with a margin."""
    low, high = places.min(0), places.max(0)
    return np.asarray((3 + 94 * (places - low) / np.maximum(high - low, 1e-9)).round(2))


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
    init = "pca" if width > 1 else "random"
    placed: np.ndarray = TSNE(2, perplexity=perplexity, init=init, random_state=seed).fit_transform(reduced)
    return placed


def _what(view: View) -> str:
    embedding = view.image.embedding
    if isinstance(embedding, Gaussian):
        return "the means of the Gaussians"
    if isinstance(embedding, Sequence):
        return "the means of the rows"
    return "the elements" if view.is_set else "the embeddings"
