"""Where sets help: recall on the images whose captions disagree most, and on those whose captions agree.

    python tests/benchmarks/disagreement.py f8k.zarr --captions all-mpnet-base-v2 --head K1=RUN,… --head K4=RUN,…

Captions disagree by one less the mean cosine of the vectors that a caption set has of an image's captions, pair by
pair. The images of the split are cut into thirds by that; a third's images and their captions ask, all images and
captions answer. Printed is the mean of the six recalls in percent over a head's runs, ± its sample standard deviation.
"""

import statistics

import click
import torch
from sizes import small
from torch import Tensor, nn

THIRDS = ("agree", "in between", "disagree")


@click.command()
@click.argument("store")
@click.option("--captions", required=True, help="The caption set whose vectors tell how far captions disagree.")
@click.option("--head", "heads", metavar="NAME=RUN,…", multiple=True, required=True, help="Its runs. Repeatable.")
@click.option("--split", default="test", show_default=True)
@small()
def main(store: str, captions: str, heads: tuple[str, ...], split: str) -> None:
    """Print a row for each head."""
    click.echo(f"| head | {' | '.join(THIRDS)} |\n{'|---' * (1 + len(THIRDS))}|")
    for name, runs in (head.split("=", 1) for head in heads):
        found = zip(*(recalls_of_thirds(run, store, captions, split) for run in runs.split(",")), strict=True)
        cells = [f"{statistics.mean(one):.2f}{_spread(one)}" for one in found]
        click.echo(f"| {name} | {' | '.join(cells)} |")


def recalls_of_thirds(run: str, store: str, captions: str, split: str) -> list[float]:
    """Return the mean recall of a run on each third of the images."""
    from xret.heads.evaluation.metrics import hits
    from xret.heads.evaluation.scoring import Ranker, embed_split

    scored = embed_split(Ranker(run, store=store, device="cpu"), split)
    vectors = torch.from_numpy(scored.ranker.cache.caption_set(captions).global_(scored.batches.caption_rows))
    far, owner = disagreement(vectors, scored.caption_image), scored.caption_image
    third = torch.empty(len(far), dtype=torch.long)
    third[far.argsort()] = torch.arange(len(far)) * len(THIRDS) // len(far)
    ways = [torch.stack([hits(way, k, "mean") for k in (1, 5, 10)], 1).double() for way in scored.ranks()]
    of_way = (third, third[owner])
    means = [[way[of == number].mean() for way, of in zip(ways, of_way, strict=True)] for number in range(len(THIRDS))]
    return [100 * float(torch.stack(both).mean()) for both in means]


def disagreement(vectors: Tensor, owner: Tensor) -> Tensor:
    """Return one less the mean cosine of different captions of an image, [I], of a single one 0.

    `vectors` is [C, D]; `owner` has each caption's image, [C].
    """
    unit = nn.functional.normalize(vectors.double(), dim=1)
    count = torch.bincount(owner)
    total = torch.zeros(len(count), unit.shape[1], dtype=unit.dtype).index_add_(0, owner, unit)
    return torch.where(count > 1, 1 - (total.square().sum(1) - count) / (count * (count - 1)), 0)


def _spread(values: tuple[float, ...]) -> str:
    return f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""


if __name__ == "__main__":
    main()
