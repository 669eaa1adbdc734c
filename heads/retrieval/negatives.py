"""Hard negatives of a run, for training elsewhere: what it takes for an answer, and is none.

A line of JSON for each caption and direction: `anchor` (a caption's text, or a picture's file name), its `positive`,
the ten `negatives` that the run scores highest, and `positive_score` and `negative_scores` by the run's own similarity.
What belongs to the anchor is no negative, nor is a picture or caption with the text of one that belongs to it. Files of
equal bytes count as one picture.
"""

import json
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from ...pipeline.errors import RunError
from ...pipeline.files import making_file, require_new
from ..evaluation.pairs import NOT_FINITE
from ..evaluation.scoring import Modality
from ..modules.embedding import each
from .retriever import Retriever

NUMBER = 10  # of negatives
BLOCK = 256  # anchors that are compared at once


def export_negatives(retriever: Retriever, out: str | Path) -> dict[str, Any]:
    """Write the hard negatives of a retriever's split into a new file of JSON lines; whole, or not at all.

    Returns:
        `out`, the `split`, and how many `lines` there are.

    Raises:
        OutputError: `out` exists already.
        RunError: it does not end in .jsonl or cannot be written; the split is too small for a negative; or a score is
            not finite.
    """
    out = Path(out)
    if out.suffix != ".jsonl":
        raise RunError(f"{out}: hard negatives are JSON lines; name a file that ends in .jsonl")
    require_new(out, folder=False)
    retriever.require_uncorrected("a file of hard negatives")
    lines = 0
    with making_file(out, RunError, "choose another --out") as partial, partial.open("w", encoding="utf-8") as file:
        for line in _lines(retriever):
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
            lines += 1
        if not lines:
            raise RunError(f"{retriever.name}: split '{retriever.split}' has no negatives; take a larger one")
    return {"out": str(out), "split": retriever.split, "lines": lines}


def _lines(retriever: Retriever) -> Iterator[dict[str, Any]]:
    gallery = retriever.gallery
    owner = torch.from_numpy(gallery.caption_image).long()
    digests, first = retriever.cache.known_digests()[gallery.owners("images")], dict[bytes | int, int]()
    keys = (digest.tobytes() if digest.any() else row for row, digest in enumerate(digests))
    picture = torch.tensor([first.setdefault(key, row) for row, key in enumerate(keys)])  # of files of equal bytes
    number = {text: row for row, text in enumerate(dict.fromkeys(gallery.texts))}
    text = torch.tensor([number[caption] for caption in gallery.texts])
    sides = {"captions": (gallery.captions, gallery.texts), "images": (gallery.images, gallery.file_names)}
    directions: tuple[tuple[Modality, Modality], ...] = (("captions", "images"), ("images", "captions"))
    for anchors, answers in directions:
        (queries, names), (items, answer_names) = sides[anchors], sides[answers]
        compare = retriever.comparison(answers)
        for rows in torch.arange(len(names)).split(BLOCK):
            scores = compare(each(itemgetter(rows), queries), items).cpu()
            if not scores.isfinite().all():
                raise RunError(NOT_FINITE)
            if answers == "images":
                belongs = torch.zeros(scores.shape).index_add(1, picture[owner], (text[rows, None] == text).float())
                belongs = belongs[:, picture] > 0
            else:
                mine = (picture[rows, None] == picture[owner]).float()
                texts = torch.zeros(len(rows), len(number)).index_add(1, text, mine)
                belongs = texts[:, text] > 0
            best = scores.masked_fill(belongs, -torch.inf).topk(min(NUMBER, scores.shape[1]))
            for row, anchor in enumerate(rows.tolist()):
                kept = best.values[row].isfinite()
                wrong = best.indices[row, kept].tolist()
                right = [int(owner[anchor])] if answers == "images" else (owner == anchor).nonzero()[:, 0].tolist()
                for positive in right if wrong else ():
                    yield {
                        "anchor": names[anchor],
                        "positive": answer_names[positive],
                        "negatives": [answer_names[other] for other in wrong],
                        "positive_score": float(scores[row, positive]),
                        "negative_scores": best.values[row, kept].tolist(),
                    }
