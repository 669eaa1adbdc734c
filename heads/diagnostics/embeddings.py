"""How a run pools and compares: GPO's weights, how uncertain Gaussians are, and what comparing a pair costs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ..evaluation.number_table import NumberTable, Rows
from ..evaluation.scoring import Scored
from ..modules.adapters import Adapter
from ..modules.aggregators import Aggregator
from ..modules.embedding import Embedding, Sequence, each, shape_of

LENGTHS = 4  # the most frequent ones whose coefficients are shown
RANKS = 10  # columns that a table of coefficients has
SAMPLES = 10  # at either end of uncertainty


def cost_table(seen: Scored) -> dict[str, NumberTable]:
    """Return the multiply-accumulates that comparing a pair takes, and the shapes of the embeddings."""
    macs, image, text = cost(seen.image.embedding, seen.text.embedding, seen.model.compare)
    caption, rows = "What comparing one image with one caption costs.", Rows()
    rows.append(["multiply-accumulates", macs])
    if paper := seen.model.compare.paper_cost(image, text):
        rows.append([f"multiply-accumulates by {paper.of}'s equations", paper.macs])
        caption += f" {paper.why}"
    for what, shape in (("an image", image), ("a caption", text)):
        rows.append([f"shape of {what}", " × ".join(f"{size:,}" for size in shape)])
    return {"cost": NumberTable(caption, ["of a pair", "value"], rows)}


def cost(
    images: Embedding, captions: Embedding, compare: Callable[[Any, Any], Tensor]
) -> tuple[int, list[int], list[int]]:
    """Return what a pair costs once both are embedded (SetDiv, section 4.4), and the shape of an image and a caption.

    Counted are the multiply-accumulates of matrix products, as `compare` really makes them. SetDiv calls them FLOPs:
    16.4 K for sets of 4 elements of 1,024 dimensions. Torch's counter takes a multiplication and an addition for two.
    What is done once for an image, or once for a caption, is not counted. Sequences have their median length.
    """
    left, right = _one(images), _one(captions)

    def count(rows: int, columns: int) -> int:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            compare(each(lambda t: torch.cat([t] * rows), left), each(lambda t: torch.cat([t] * columns), right))
        flops: int = counter.get_total_flops()
        return flops // 2

    # Work is a + b I + c C + d I C; d is what a pair costs.
    macs = count(2, 2) - count(2, 1) - count(1, 2) + count(1, 1)
    return macs, shape_of(left)[1:], shape_of(right)[1:]


def _one(embedding: Embedding) -> Embedding:
    """Return one sample; of sequences one of the median length, without its padding."""
    if not isinstance(embedding, Sequence):
        return each(lambda t: t[:1], embedding)
    length = embedding.length.sort()
    middle = length.indices[(len(length.indices) - 1) // 2]
    return Sequence(embedding.rows[middle][None, : int(embedding.length[middle])], embedding.length[middle][None])


def uncertainty_tables(seen: Scored) -> dict[str, NumberTable]:
    """Return mean and deciles of the log-determinant of the covariances, and the samples at both ends.

    Source: *Uncertainty-based Cross-Modal Retrieval with Probabilistic Representations*, section 3.3 and Figures 4-7.
    Captions that say the same are listed once. Empty without Gaussians.
    """
    images, captions = seen.image.uncertainty, seen.text.uncertainty
    if images is None or captions is None:
        return {}
    owners = seen.caption_image.tolist()
    first = {text: row for row, text in reversed(list(enumerate(seen.texts)))}  # caption with a text
    caption_of = dict(zip(reversed(owners), reversed(seen.texts), strict=True))  # the first of an image
    deciles, rows = torch.linspace(0, 1, 11, dtype=torch.float64), Rows()
    sides = {"images": images.double().cpu(), "captions": captions.double().cpu()}
    for name, values in sides.items():
        rows.append([name, values.mean().item(), *values.quantile(deciles).tolist()])
    title = "Uncertainty, the log-determinant of the covariance: mean, and the value that a share of samples is below."
    header = ["of", "mean", *(f"{share:.0%}" for share in deciles.tolist())]
    tables = {"uncertainty": NumberTable(title, header, rows)}
    for name, values in sides.items():
        samples = range(len(values)) if name == "images" else sorted(first.values())
        ascending = sorted(samples, key=values.tolist().__getitem__)
        for end, some in (("least", ascending[:SAMPLES]), ("most", ascending[::-1][:SAMPLES])):
            if name == "images":
                rows = [[seen.file_names[row], caption_of.get(row, ""), values[row].item()] for row in some]
            else:
                rows = [[seen.file_names[owners[row]], seen.texts[row], values[row].item()] for row in some]
            header = ["file", "caption", "uncertainty"]
            tables[f"{end} uncertain {name}"] = NumberTable(f"The {end} uncertain {name}.", header, rows)
    return tables


@torch.no_grad()
def coefficient_tables(seen: Scored) -> dict[str, NumberTable]:
    """Return the weight of each rank for each GPO (*Learning the Best Pooling Strategy*, VSE-infinity, Figure 5).

    Those of the most frequent lengths; of many ranks ten, from the first to the last.
    """
    tables = {}
    for what, branch, side in (("image", seen.model.image, seen.image), ("text", seen.model.text, seen.text)):
        for part, lengths in gpo_coefficients(branch, side.length).items():
            usual = sorted(sorted(lengths, key=lambda n: -lengths[n][0])[:LENGTHS])
            columns = min(RANKS, max(usual))
            rows = Rows()
            for length in usual:
                ranks = torch.linspace(0, length - 1, min(columns, length)).round().long().tolist()
                shown = [lengths[length][1][rank] for rank in ranks]
                rows.append([f"{length} rows", *shown, *[None] * (columns - len(shown))])
            caption = (
                f"Weights that GPO of the {what} branch ({part}) gives to ranks, from the largest value to the "
                f"smallest, for the most frequent numbers of rows; longer ones at {RANKS} ranks, evenly spread."
            )
            header = ["rows", *(str(k) for k in range(1, columns + 1))]
            tables[f"coefficients of {what} {part}"] = NumberTable(caption, header, rows, 3)
    return tables


def gpo_coefficients(branch: nn.Module, length: Tensor) -> dict[str, dict[int, tuple[int, list[float]]]]:
    """Return by GPO of a branch, and by each of the lengths ``[B]``: its samples, and the coefficients of their ranks.

    The ends of a caption count as rows if it is read with them. Coefficients of single dimensions are averaged. A GPO
    whose coefficients depend on the sample is left out.
    """
    ends = any(isinstance(part, Adapter) and part.ends for part in branch.modules())
    lengths, samples = (length.clamp(min=1) + 2 * ends).unique(return_counts=True)
    coefficients = {}
    for name, part in branch.named_modules():
        weights = part.coefficients(lengths, int(lengths.max())) if isinstance(part, Aggregator) else None
        if weights is not None:
            rows = (weights.mean(2) if weights.ndim == 3 else weights).tolist()
            known = zip(lengths.tolist(), samples.tolist(), rows, strict=True)
            coefficients[name] = {n: (count, row[:n]) for n, count, row in known}
    return coefficients
