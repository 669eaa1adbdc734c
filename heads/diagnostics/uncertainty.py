"""How uncertain a run with Gaussian embeddings is of each image and caption.

Source: *Uncertainty-based Cross-Modal Retrieval with Probabilistic Representations*, section 3.3 and Figures 4-7.
"""

import torch

from ..evaluation.number_table import NumberTable
from ..evaluation.scoring import Embedded

SHOWN = 10  # samples at either end


def uncertainty_tables(seen: Embedded) -> dict[str, NumberTable]:
    """Return mean and deciles of the log-determinant of the covariances, and the samples at both ends.

    Captions that say the same are listed once. Empty without Gaussians.
    """
    images, captions, scores = seen.image.uncertainty, seen.text.uncertainty, seen.scores
    if images is None or captions is None:
        return {}
    owners = scores.caption_image.tolist()
    first: dict[str, int] = {}  # caption with a text
    said: dict[int, str] = {}  # first caption of an image
    for row, (owner, text) in enumerate(zip(owners, scores.texts, strict=True)):
        first.setdefault(text, row)
        said.setdefault(owner, text)
    deciles, tables = torch.linspace(0, 1, 11, dtype=torch.float64), {}
    rows = []
    sides = {"images": images.double().cpu(), "captions": captions.double().cpu()}
    for name, values in sides.items():
        rows.append([name, values.mean().item(), *values.quantile(deciles).tolist()])
    caption = (
        "Uncertainty, the log-determinant of the covariance: mean, and the value that a share of samples is below."
    )
    header = ["of", "mean", *(f"{share:.0%}" for share in deciles.tolist())]
    tables["uncertainty"] = NumberTable(caption, header, rows)
    for name, values in sides.items():
        ascending = sorted(range(len(values)) if name == "images" else first.values(), key=values.tolist().__getitem__)
        for end, some in (("least", ascending[:SHOWN]), ("most", ascending[::-1][:SHOWN])):
            image = [row if name == "images" else owners[row] for row in some]
            rows = [
                [scores.file_names[i], said.get(i, "") if name == "images" else scores.texts[row], values[row].item()]
                for row, i in zip(some, image, strict=True)
            ]
            header = ["file", "caption", "uncertainty"]
            tables[f"{end} uncertain {name}"] = NumberTable(f"The {end} uncertain {name}.", header, rows)
    return tables
