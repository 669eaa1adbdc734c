"""What the page shows and the endpoint answers: plain functions over a `Retriever`, run in worker threads."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from PIL import Image
from torch import Tensor

from ....pipeline.data.images import jpeg, thumbnail
from ....pipeline.errors import CacheError, ManifestError, RunError, XretError
from ...modules.embedding import Embedding
from ..hits import Hit, Modality, uncertainty
from ..retriever import Retriever
from .pictures import SIDES, open_upload

EXAMPLES, EXAMPLE_LENGTH = 4, 80  # captions that the page offers as queries, and their characters at most


class Service:
    """A retriever at work for many clients.

    Attributes:
        elements: of the set that a query becomes; 0 where it is none.
        missing: why texts (``text``) or pictures (``image``) cannot be searched with; empty where both can.
        pictureless: why the gallery's pictures cannot be shown, or None.
    """

    def __init__(self, retriever: Retriever) -> None:
        self.retriever = retriever
        self.elements = 0
        self._examples: list[str] = []
        self.missing: dict[str, str] = {}
        self.pictureless: str | None = None

    def warm(self) -> None:
        """Load gallery and encoders, so that the first query is as fast as the others.

        Raises:
            XretError: neither text nor picture can be searched with, there is no gallery, or the index has more.
        """
        gallery = self.retriever.gallery
        counts: dict[Modality, int] = {"images": len(gallery.image_ids), "captions": len(gallery.texts)}
        for answers, count in counts.items():
            if (searched := self.retriever.searched(answers)) != count or self.retriever.searches_others(answers):
                raise RunError(
                    f"the index has {searched:,} {answers}, which are not the {count:,} of split {gallery.split}: the"
                    " page shows those of one split of one store; make an index of them alone with `xret index`"
                )
        self._rows = {
            "images": {name: row for row, name in enumerate(gallery.image_ids)},
            "captions": {name: int(gallery.caption_image[row]) for row, name in enumerate(gallery.caption_ids)},
        }
        self._captions: list[list[str]] = [[] for _ in gallery.image_ids]
        for text, row in zip(gallery.texts, gallery.caption_image, strict=True):
            self._captions[int(row)].append(text)
        refusals: list[XretError] = []
        queries: dict[str, Callable[[], tuple[Embedding, Modality]]] = {
            "text": lambda: (self.retriever.encode_captions([gallery.texts[0].strip() or "a"]), "images"),
            "image": lambda: self.retriever.encode_query(Image.new("RGB", (64, 64))),
        }
        for side, encode in queries.items():
            try:
                embedding, answers = encode()
                self.retriever.nearest(embedding, answers, 1)
                self.elements = embedding.shape[1] if isinstance(embedding, Tensor) and embedding.ndim == 3 else 0
            except XretError as error:
                self.missing[side] = str(error)
                refusals.append(error)
        if len(refusals) == 2:
            raise refusals[0]
        if "text" not in self.missing:
            self._examples = _examples(gallery.texts, self.retriever)
        try:
            gallery.image_path(0)
        except (CacheError, ManifestError) as error:
            self.pictureless = str(error)

    def about(self) -> dict[str, Any]:
        """Return what the page says about run and gallery; no path is told, only the run's name."""
        gallery = self.retriever.gallery
        return {
            "run": self.retriever.run.path.resolve().name,
            "recipe": self.retriever.run.recipe.name,
            "dataset": gallery.dataset,
            "split": gallery.split,
            "images": len(gallery.image_ids),
            "captions": len(gallery.texts),
            "elements": self.elements,
            "text": "text" not in self.missing,
            "image": "image" not in self.missing,
            "pictures": self.pictureless is None,
            "examples": self._examples,
        }

    def answer(self, query: str | bytes | bytearray, k: int, elements: bool) -> dict[str, Any]:
        """Search with a text, or with the bytes of an image file.

        Returns:
            ``results``, hits as of `xret search --json` with the image's ``row`` and, of images, their ``captions``;
            ``elements`` if asked for, such a list for each element of the query's set; of Gaussians the query's
            ``uncertainty``; of a text with words that are not in the run's vocabulary these words, ``unknown``;
            ``seconds``.

        Raises:
            QueryError: the query is empty, no picture or without a known word, or there are no elements.
        """
        start = time.perf_counter()
        sample = query if isinstance(query, str) else open_upload(query)
        embedding, answers = self.retriever.encode_query(sample, k)
        hits = self.retriever.nearest(embedding, answers, k)
        result: dict[str, Any] = {"results": [self._to_dict(hit) for hit in hits]}
        if elements:
            each = self.retriever.nearest_to_elements(embedding, answers, k)
            result["elements"] = [[self._to_dict(hit) for hit in hits] for hits in each]
        spread = uncertainty(embedding)
        if spread is not None:
            result["uncertainty"] = float(spread[0])
        if isinstance(sample, str) and (unknown := self.retriever.unknown_words([sample])):
            result["unknown"] = unknown
        result["seconds"] = round(time.perf_counter() - start, 4)
        return result

    def picture(self, row: int, size: str) -> bytes:
        """Return the image in a row of the gallery as a JPEG, ``small`` or ``large``.

        Raises:
            IndexError: there is no such row.
            XretError: there is no file, or it is damaged.
        """
        if not 0 <= row < len(self.retriever.gallery.image_ids):
            raise IndexError(row)
        return jpeg(thumbnail(self.retriever.gallery.image_path(row), SIDES[size]))

    def _to_dict(self, hit: Hit) -> dict[str, Any]:
        if hit.caption is not None:
            return {**hit.to_dict(), "row": self._rows["captions"][hit.id]}
        row = self._rows["images"][hit.id]
        return {**hit.to_dict(), "row": row, "captions": self._captions[row]}


def _examples(texts: Sequence[str], retriever: Retriever) -> list[str]:
    """Return some captions, from all over the gallery, that are short and whose every word the run knows."""
    short = [text for text in texts if text.strip() and len(text) <= EXAMPLE_LENGTH]
    known = [text for text in short if not retriever.unknown_words([text])]
    return known[:: max(1, -(-len(known) // EXAMPLES))]
