"""How much a mean recall owes to the way it is measured: one run, its test split, other galleries, captions and ties.

    python tests/benchmarks/measuring.py run

Prints a table of the six recalls' means. Fewer pictures and fewer captions are drawn ten times, and ± is over these.
"""

import statistics
from collections.abc import Iterator

import click
import torch
from sizes import small

from xret.heads.evaluation.metrics import Ties, ranks, recall_table
from xret.heads.evaluation.scoring import Ranker, embed_split

DRAWS = 10


@click.command()
@click.argument("run")
@small()
def main(run: str) -> None:
    """Measure RUN in several ways."""
    scored = embed_split(Ranker(run, device="cpu"), "test")
    similarity, owner = scored.similarity, scored.caption_image
    images, captions = similarity.shape
    rows: dict[str, list[float]] = {
        f"all {images:,} pictures, {captions / images:.1f} captions each": [mean_recall(similarity, owner)],
        "the same, ties for the query": [mean_recall(similarity, owner, "optimistic")],
        "the same, in float16": [mean_recall(similarity.half().float(), owner)],
        "one caption a picture": [mean_recall(similarity[:, one], owner[one]) for one in single(owner)],
    }
    for size in (some for some in (500, 100) if some < images):
        found = []
        for draw in range(DRAWS):
            kept = torch.randperm(images, generator=torch.Generator().manual_seed(draw))[:size]
            place = torch.full((images,), -1).scatter(0, kept, torch.arange(size))
            columns = place[owner] >= 0
            found.append(mean_recall(similarity[kept][:, columns], place[owner[columns]]))
        rows[f"{size} pictures"] = found
    click.echo("| measured with | mR |\n|---|---|")
    for name, values in rows.items():
        spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
        click.echo(f"| {name} | {statistics.fmean(values):.1f}{spread} |")


def mean_recall(similarity: torch.Tensor, owner: torch.Tensor, ties: Ties = "pessimistic") -> float:
    """Return the mean of the six recalls, percent."""
    return recall_table(*ranks(similarity, owner), ties).rsum / 6


def single(owner: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the rows of one caption of each picture, drawn."""
    for draw in range(DRAWS):
        order = torch.randperm(len(owner), generator=torch.Generator().manual_seed(draw))
        first = {int(owner[row]): int(row) for row in order}
        yield torch.tensor(sorted(first.values()))


if __name__ == "__main__":
    main()
