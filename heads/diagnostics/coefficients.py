"""What GPO has learned: the weight of each rank (*Learning the Best Pooling Strategy*, VSE-infinity, Figure 5)."""

import torch
from torch import Tensor, nn

from ..evaluation.number_table import NumberTable
from ..evaluation.scoring import Embedded
from ..modules.aggregators.gpo import GPO

LENGTHS = 4  # the most frequent ones are shown
RANKS = 10  # columns that a table has


def gpo_coefficients(branch: nn.Module, length: Tensor) -> dict[str, dict[int, tuple[int, list[float]]]]:
    """Return the coefficients of every GPO of a branch for the lengths that occur.

    If every dimension has coefficients of its own, they are the mean over dimensions. A GPO whose coefficients depend
    on the sample is left out.

    Args:
        branch: of a model; an embedding may have several GPOs, such as one for the mean and one for the variance.
        length: valid rows of each sample of a split, ``[B]``.

    Returns:
        By the GPO's name in the branch and by length: samples of this length, and the coefficients from the largest
        value's to the smallest's.
    """
    lengths, samples = length.clamp(min=1).unique(return_counts=True)
    found = {}
    for name, part in branch.named_modules():
        if isinstance(part, GPO) and not part.feature_input:
            weights = part.coefficients(lengths)
            rows = (weights.mean(2) if weights.ndim == 3 else weights).tolist()
            known = zip(lengths.tolist(), samples.tolist(), rows, strict=True)
            found[name] = {n: (count, row[:n]) for n, count, row in known}
    return found


@torch.no_grad()
def coefficient_tables(seen: Embedded) -> dict[str, NumberTable]:
    """Return a table of the most frequent lengths for each GPO; with many ranks, of ten from the first to the last."""
    tables = {}
    for what, branch, side in (("image", seen.model.image, seen.image), ("text", seen.model.text, seen.text)):
        for part, lengths in gpo_coefficients(branch, side.length).items():
            usual = sorted(sorted(lengths, key=lambda n: -lengths[n][0])[:LENGTHS])
            columns = min(RANKS, max(usual))
            rows = []
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
