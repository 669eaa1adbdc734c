"""What the page shows and the endpoint answers: plain functions over a `Retriever`, run in worker threads."""

import time
from functools import lru_cache
from typing import Any

from PIL import Image
from torch import Tensor

from ....pipeline.data.images import jpeg, thumbnail
from ....pipeline.errors import CacheError, ManifestError, RunError, XretError
from ..hits import Hit, Modality, deviation
from ..retriever import Retriever
from .pictures import open_upload

EXAMPLES, EXAMPLE_LENGTH = 4, 80  # captions that the page offers as queries, and their characters at most
SIZES = {"small": 400, "large": 1200}  # of a picture on the page, pixels at most
KEPT = 256  # pictures for the page that stay in memory


class Service:
    """A retriever at work for many clients. Making it loads gallery and encoders, so that no query waits for them.

    Attributes:
        elements: of the set that a query becomes; 0 where it is none.
        missing: why texts (``text``) or pictures (``image``) cannot be searched with; empty where both can.
        pictureless: why the gallery's pictures cannot be shown, or None.

    Raises:
        XretError: neither text nor picture can be searched with, there is no gallery, or the index has more.
    """

    def __init__(self, retriever: Retriever) -> None:
        self.retriever, gallery = retriever, retriever.gallery
        for answers in ("images", "captions"):
            self._require_own_index(answers)
        self._captions: list[list[str]] = [[] for _ in gallery.image_ids]
        for text, row in zip(gallery.texts, gallery.caption_image, strict=True):
            self._captions[int(row)].append(text)
        self._image_row = {name: row for row, name in enumerate(gallery.image_ids)}
        self._caption_row = dict(zip(gallery.caption_ids, gallery.caption_image.tolist(), strict=True))
        self.elements = 0
        queries: dict[str, str | Image.Image] = {
            "text": gallery.texts[0].strip() or "a",
            "image": Image.new("RGB", (64, 64)),
        }
        failures = {kind: error for kind, query in queries.items() if (error := self._try(query))}
        if len(failures) == len(queries):
            raise failures["text"]
        self.missing = {kind: str(error) for kind, error in failures.items()}
        self._examples = [] if "text" in self.missing else self._find_examples()
        self.pictureless: str | None = None
        try:
            gallery.image_path(0)
        except (CacheError, ManifestError) as error:
            self.pictureless = str(error)
        self.picture = lru_cache(KEPT)(self._picture)

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
        spread = deviation(embedding)
        if spread is not None:
            result["uncertainty"] = float(spread[0])
        if isinstance(sample, str) and (unknown := self.retriever.unknown_words([sample])):
            result["unknown"] = unknown
        result["seconds"] = round(time.perf_counter() - start, 4)
        return result

    def _picture(self, row: int, size: str) -> bytes:
        """Return the image in a row of the gallery as a JPEG, ``small`` or ``large``.

        Raises:
            IndexError: there is no such row.
            XretError: there is no file, or it is damaged.
        """
        if not 0 <= row < len(self.retriever.gallery.image_ids):
            raise IndexError(row)
        return jpeg(thumbnail(self.retriever.gallery.image_path(row), SIZES[size]))

    def _require_own_index(self, answers: Modality) -> None:
        gallery = self.retriever.gallery
        count = len(gallery.image_ids if answers == "images" else gallery.texts)
        searched = self.retriever.searched(answers)
        if searched != count or self.retriever.searches_others(answers):
            raise RunError(
                f"the index has {searched:,} {answers}, which are not the {count:,} of split {gallery.split}: the page"
                " shows those of one split of one store; make an index of them alone with `xret index`"
            )

    def _try(self, query: str | Image.Image) -> XretError | None:
        """Search once, with a caption or a picture; return what it fails with."""
        try:
            if isinstance(query, str):  # it need not have a word that the run knows
                embedding = self.retriever.encode_captions([query])
                self.retriever.nearest(embedding, "images", 1)
            else:
                embedding, answers = self.retriever.encode_query(query)
                self.retriever.nearest(embedding, answers, 1)
        except XretError as error:
            return error
        self.elements = embedding.shape[1] if isinstance(embedding, Tensor) and embedding.ndim == 3 else 0
        return None

    def _find_examples(self) -> list[str]:
        """Return some captions, from all over the gallery, that are short and whose every word the run knows."""
        short = [text for text in self.retriever.gallery.texts if text.strip() and len(text) <= EXAMPLE_LENGTH]
        known = [text for text in short if not self.retriever.unknown_words([text])]
        return known[:: max(1, -(-len(known) // EXAMPLES))]

    def _to_dict(self, hit: Hit) -> dict[str, Any]:
        if hit.caption is not None:
            return {**hit.to_dict(), "row": self._caption_row[hit.id]}
        row = self._image_row[hit.id]
        return {**hit.to_dict(), "row": row, "captions": self._captions[row]}
