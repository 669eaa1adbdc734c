"""How uncertain a run with Gaussian embeddings is of each image and caption.

Source: *Uncertainty-based Cross-Modal Retrieval with Probabilistic Representations*, section 3.3 and Figures 4-7.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .embedded import Embedded

SHOWN = 10  # samples at either end


def uncertainty(embedded: Embedded) -> dict[str, Any] | None:
    """Return the distribution of the uncertainty and the samples at both ends, by modality.

    The uncertainty is the log-determinant of the covariance: the sum of the logarithms of its variances (section 3.3).

    Args:
        embedded: a split.

    Returns:
        ``{"image": {"mean", "deciles": [11 floats, from the least to the largest], "highest": [at most 10 images],
        "lowest": likewise}, "text": the same of captions}``, or None where the embeddings have no Gaussians. An image
        is ``{"id", "file_name", "captions": [its texts], "uncertainty"}``, a caption ``{"sentid", "caption",
        "file_name": of its image, "uncertainty"}``. The most extreme come first; of captions that say the same only one
        is shown.
    """
    images, captions = embedded.image.uncertainty, embedded.text.uncertainty
    if images is None or captions is None:
        return None
    owners = embedded.caption_image.tolist()
    own: list[list[str]] = [[] for _ in embedded.ids]
    first: dict[str, int] = {}  # caption with a text
    for row, (owner, text) in enumerate(zip(owners, embedded.texts, strict=True)):
        own[owner].append(text)
        first.setdefault(text, row)

    def image(row: int) -> dict[str, Any]:
        return {"id": embedded.ids[row], "file_name": embedded.file_names[row], "captions": own[row]}

    def caption(row: int) -> dict[str, Any]:
        file_name = embedded.file_names[owners[row]]
        return {"sentid": embedded.sentids[row], "caption": embedded.texts[row], "file_name": file_name}

    return {
        "image": _side(images, list(range(len(images))), image),
        "text": _side(captions, list(first.values()), caption),
    }


def _side(values: Tensor, rows: list[int], describe: Callable[[int], dict[str, Any]]) -> dict[str, Any]:
    """Describe one modality; only the samples in `rows` are shown."""
    values = values.cpu()
    ascending = sorted(rows, key=lambda row: values[row].item())

    def shown(some: list[int]) -> list[dict[str, Any]]:
        return [describe(row) | {"uncertainty": values[row].item()} for row in some]

    return {
        "mean": values.mean().item(),
        "deciles": values.quantile(torch.linspace(0, 1, 11, dtype=values.dtype)).tolist(),
        "highest": shown(ascending[::-1][:SHOWN]),
        "lowest": shown(ascending[:SHOWN]),
    }
