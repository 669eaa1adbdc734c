"""The linear floor: one linear layer a side over pooled features, which every head should beat.

Images are their cached global feature (the average of the map), captions the mean of their token states (`--text
bert`) or of their words' one-hot vectors (`--text words`). 20 epochs of AdamW over all images with one random caption
each, with InfoNCE or with the hardest-negative triplet (all negatives in the first three epochs). The store needs an
image set and a caption set:

    xret extract rsicd --data-root DIR --store rsicd.zarr --visual mobilenet_v2 \
        --visual-weights mobilenet_v2.safetensors --text bert --text-weights MiniLM
    xret extract rsicd --data-root DIR --store rsicd.zarr --visual none --text words
    python tests/benchmarks/floor_rsicd.py rsicd.zarr --text bert
    python tests/benchmarks/floor_rsicd.py rsicd.zarr --text words
"""

import json
import time

import click
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from xret.heads.evaluation.metrics import Ties, ranks, recall_table
from xret.heads.modules.losses.triplet import Triplet
from xret.pipeline.cache.feature_cache import FeatureCache
from xret.pipeline.reading.batches import stored_batches
from xret.pipeline.reading.features import Features

EPOCHS, BATCH, DIM, LR, SCALE = 20, 256, 512, 1e-3, 20.0


def pooled(cache: FeatureCache, split: str, text: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return image features [I, C], caption features [M, C'] and the image of each caption [M]."""
    images, captions = cache.image_set(), cache.caption_set(text)
    fields = {"image_fields": {"global"}, "caption_fields": {"token" if text == "words" else "local"}}
    batches = stored_batches(images, captions, split, **fields)
    image = torch.cat([features.global_.float() for features in batches.image_features(512)])
    words = len(captions.vocabulary or ())
    caption = torch.cat([mean_of(features, words) for features in batches.caption_features(512)])
    return image, caption, torch.as_tensor(batches.caption_image)


def mean_of(captions: Features, words: int) -> Tensor:
    """Return the mean of token states [B, C], or how often each of so many words occurs, over the length [B, words]."""
    length = captions.length[:, None]
    if captions.token is None:
        assert captions.local is not None
        return captions.local.float().sum(1) / length
    real = torch.arange(captions.token.shape[1]) < length
    return torch.zeros(len(length), words).scatter_add_(1, captions.token * real, real.float()) / length


def train(images: Tensor, captions: Tensor, caption_image: Tensor, loss: str, seed: int) -> nn.ModuleList:
    """Train the two layers; `loss` is ``infonce`` or ``triplet``."""
    torch.manual_seed(seed)
    layers = nn.ModuleList([nn.Linear(images.shape[1], DIM), nn.Linear(captions.shape[1], DIM)])
    optimizer = torch.optim.AdamW(layers.parameters(), lr=LR)
    _, count = caption_image.unique(return_counts=True)
    first = count.cumsum(0) - count
    for epoch in range(EPOCHS):
        picked = first + (torch.rand(len(first)) * count).long()  # one caption of every image
        for pairs in picked[torch.randperm(len(first))].split(BATCH):
            rows, columns = caption_image[pairs].unique(return_inverse=True)
            x = normalize(layers[0](images[rows]), dim=1)
            y = normalize(layers[1](captions[pairs]), dim=1)
            similarity = x @ y.T
            positives = torch.arange(len(rows))[:, None] == columns[None]
            if loss == "triplet":
                negatives = "all" if epoch < 3 else "hardest"
                value = Triplet(margin=0.2, negatives=negatives)(similarity, positives)
            else:
                targets = positives.float()
                value = cross_entropy(SCALE * similarity.T, columns)
                value = value + cross_entropy(SCALE * similarity, targets / targets.sum(1, keepdim=True))
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
    return layers


@click.command()
@click.argument("store")
@click.option("--text", type=click.Choice(["bert", "words"]), default="bert", show_default=True)
@click.option("--seeds", default=3, show_default=True, help="How many runs of each loss.")
def main(store: str, text: str, seeds: int) -> None:
    """Print the floor on the test split of STORE, for both losses and both counts of ties."""
    cache = FeatureCache.open(store)
    images, captions, owner = pooled(cache, "train", text)
    test_images, test_captions, test_owner = pooled(cache, "test", text)
    centre, scale = images.mean(0), images.std(0) + 1e-6
    ways: tuple[Ties, ...] = ("pessimistic", "mean")
    for loss in ("infonce", "triplet"):
        tables: dict[str, list[dict]] = {way: [] for way in ways}
        began = time.perf_counter()
        for seed in range(seeds):
            layers = train((images - centre) / scale, captions, owner, loss, seed)
            with torch.no_grad():
                x = normalize(layers[0]((test_images - centre) / scale), dim=1)
                y = normalize(layers[1](test_captions), dim=1)
            counted = ranks(x @ y.T, test_owner)
            for way in ways:
                tables[way].append(recall_table(*counted, ties=way))
        seconds = (time.perf_counter() - began) / seeds
        for way in ways:
            found = tables[way]
            row = {
                f"{direction} R@{k}": round(float(np.mean([table[direction][f"R@{k}"] for table in found])), 2)
                for direction in ("image_to_text", "text_to_image")
                for k in (1, 5, 10)
            }
            recalls = [table["rsum"] / 6 for table in found]
            mean, spread = round(float(np.mean(recalls)), 2), round(float(np.std(recalls)), 2)
            facts = {"text": text, "loss": loss, "ties": way, "seeds": seeds, "mR": mean, "spread": spread}
            click.echo(json.dumps({**facts, **row, "seconds": round(seconds, 1)}))


if __name__ == "__main__":
    main()
