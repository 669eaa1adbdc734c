"""What limits retrieval on RSICD, whatever the head: how far texts alone would go.

Two oracles take the place of the image encoder, on validation and test split: one knows which texts describe an image,
so that only images with equal captions are mixed up; the other knows an image by its other captions, each embedded as
the mean of its cached states, and ranks by the mean cosine. Beside them: how often captions repeat. Ties count by their
mean.

    python tests/benchmarks/rsicd_limits.py rsicd.zarr
"""

import click
import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize


@click.command()
@click.argument("store")
@click.option("--text", default="bert", show_default=True, help="The caption set, of a text encoder.")
def main(store: str, text: str) -> None:
    """Print a row a split."""
    from xret.heads.evaluation.metrics import ranks, recall_table
    from xret.pipeline.store import FeatureCache

    cache = FeatureCache.open(store)
    captions = cache.caption_set(text)
    train = set(_texts(cache, "train"))
    click.echo(
        "| split | captions that training has | images that share a caption | mR, texts known | other captions |"
    )
    click.echo("|---|---|---|---|---|")
    for split in ("val", "test"):
        first, last = cache.splits[split]
        start, stop = cache.captions_of(first, last)
        texts, owner = _texts(cache, split), torch.as_tensor(cache.caption_image[start:stop] - first)
        number = {one: at for at, one in enumerate(dict.fromkeys(texts))}
        ids = torch.tensor([number[one] for one in texts])
        has = torch.zeros(last - first, len(number))
        has[owner, ids] = 1
        shared = (has[:, has.sum(0) > 1].sum(1) > 0).float().mean()
        found = [
            recall_table(*ranks(similarity, owner), ties="mean").rsum / 6
            for similarity in (has[:, ids], _by_other_captions(_embedded(captions, start, stop), owner))
        ]
        known = np.mean([one in train for one in texts])
        click.echo(f"| {split} | {100 * known:.0f}% | {100 * shared:.0f}% | {found[0]:.1f} | {found[1]:.1f} |")


def _texts(cache, split: str) -> list[str]:
    start, stop = cache.captions_of(*cache.splits[split])
    return [text.strip().lower().rstrip(" .") for text in cache.caption_texts(start, stop)]


def _embedded(captions, start: int, stop: int) -> Tensor:
    rows = np.arange(start, stop)
    states = torch.from_numpy(captions.local(rows).astype(np.float32))
    means = torch.stack([part.mean(0) for part in states.split(captions.length[rows].tolist())])
    return normalize(means - means.mean(0), dim=1)


def _by_other_captions(embedded: Tensor, owner: Tensor) -> Tensor:
    """Return the mean cosine of each caption with the captions of each image, itself left out, [I, C]."""
    own = torch.zeros(int(owner.max()) + 1, len(owner))
    own[owner, torch.arange(len(owner))] = 1
    return (own @ (embedded @ embedded.T) - own) / (own.sum(1, keepdim=True) - own)


if __name__ == "__main__":
    main()
