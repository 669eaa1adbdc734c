"""Evaluation the plain way: every sample embedded alone, every rank counted in a loop."""

import shutil

import numpy as np
import torch
from edited_runs import edited

from xret.heads.runs.run import Run
from xret.pipeline.data.samples import tokenize
from xret.pipeline.reading.batches import Features
from xret.pipeline.store import FeatureCache


@torch.no_grad()
def plain_similarity(run, store, split="test"):
    """Compare every image and caption of a split, each embedded by itself, its words looked up in the run's list."""
    run, cache = Run(run), FeatureCache.open(store)
    model, images = run.model(torch.device("cpu")), cache.image_set()
    first, last = cache.splits[split]
    rows = [row for row in range(first, last) if images.status[row] == 0]
    captions = [c for c in range(len(cache.caption_image)) if cache.caption_image[c] in rows]
    words = {word: number for number, word in enumerate(run.vocabulary)}
    similarity = torch.empty(len(rows), len(captions))
    for j, caption in enumerate(captions):
        (text,) = cache.caption_texts(caption, caption + 1)
        ids = [words.get(word, 0) for word in tokenize(text)]
        embedded = model.embed_captions(Features(torch.tensor([len(ids)]), token=torch.tensor([ids])))
        for i, row in enumerate(rows):
            local = torch.from_numpy(images.local(np.array([row])))
            global_ = torch.from_numpy(images.global_(np.array([row])))
            features = Features(torch.tensor([local.shape[1]]), local, global_)
            similarity[i, j] = model.similarity(model.embed_images(features).embedding, embedded.embedding)
    return similarity, [rows.index(cache.caption_image[caption]) for caption in captions]


def plain_rsum(similarity, owner):
    """Count in loops how many wrong items stand before the best own one, ties pessimistic up to rounding."""
    scores = similarity.tolist()
    images, captions = range(len(scores)), range(len(owner))
    best = [max(scores[i][c] for c in captions if owner[c] == i) for i in images]
    ahead = (
        [sum(scores[i][c] >= best[i] - 1e-6 for c in captions if owner[c] != i) for i in images],
        [sum(scores[i][c] >= scores[owner[c]][c] - 1e-6 for i in images if i != owner[c]) for c in captions],
    )
    return sum(100 * sum(rank < k for rank in ranks) / len(ranks) for k in (1, 5, 10) for ranks in ahead)


def run_on(run, store, path):
    """Copy a run as if it had been trained on another store with the same features."""
    return edited(shutil.copytree(run, path), store=store)


def globals_of(store, split, image="auto", caption="auto", view=0):
    """Return the global features, float64, of the images of a split that no set lacks and of their captions, and the
    image of each caption."""
    cache = FeatureCache.open(store)
    usable = np.all([cache.image_set(name).status == 0 for name in cache.set_names("images")], axis=0)
    rows = np.array([row for row in range(*cache.splits[split]) if usable[row]])
    spoken = np.flatnonzero(np.isin(cache.caption_image, rows))
    images, captions = cache.image_set(image).global_(rows, view), cache.caption_set(caption).global_(spoken)
    return images.astype(float), captions.astype(float), np.searchsorted(rows, cache.caption_image[spoken])
