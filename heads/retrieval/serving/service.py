"""What the page shows and the endpoint answers: plain functions over a `Retriever`, run in worker threads."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from PIL import Image

from ....pipeline.data.images import jpeg, open_image, thumbnail
from ....pipeline.errors import CacheError, ManifestError, QueryError, RunError, SampleError, StoreError, XretError
from ...modules.similarity import SIMILARITIES
from ..hits import Hit, Modality
from ..retriever import Query, Retriever

EXAMPLES, EXAMPLE_LENGTH = 4, 80  # captions that the page offers as queries, and their characters at most
SIZES = {"small": 400, "large": 1200}  # of a picture on the page, pixels at most
# The readers of Pillow that a web page needs: one that is not asked cannot be attacked.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
MOST_PIXELS = 50_000_000  # of a picture that is sent
KEPT = 256  # pictures for the page that stay in memory


@dataclass(frozen=True)
class About:
    """What the page says about run and gallery; no path is told, only the run's name.

    Attributes:
        run, recipe, dataset, split: their names.
        score: what a score is, of the run's similarity.
        images, captions: how many are searched.
        elements: of the set that a query becomes; 0 where it is none.
        text, image: whether such queries can be answered.
        pictures: whether the gallery's pictures can be shown.
        upright: whether pictures are turned as their EXIF orientations say.
        examples: captions to try.
    """

    run: str
    recipe: str
    dataset: str
    split: str
    score: str
    images: int
    captions: int
    elements: int
    text: bool
    image: bool
    pictures: bool
    upright: bool
    examples: list[str]


@dataclass(frozen=True)
class Answer:
    """What is found for a query.

    Attributes:
        results: the hits.
        seconds: that it took.
        elements: what each element of the query's set looks for, if that was asked.
        uncertainty: of the query; None for embeddings without one.
        unknown: words of the query that are not in the run's vocabulary; None where there are none.
    """

    results: list[Hit]
    seconds: float
    elements: list[list[Hit]] | None = None
    uncertainty: float | None = None
    unknown: Sequence[str] | None = None


class Service:
    """A retriever at work for many clients. Making it loads gallery and encoders, so that no query waits for them.

    Attributes:
        about: what the page begins with.
        missing: why texts (``text``) or pictures (``image``) cannot be searched with; empty where both can.
        pictureless: why the gallery's pictures cannot be shown, or None.

    Raises:
        XretError: neither text nor picture can be searched with, the gallery is missing, or the index has more.
    """

    def __init__(self, retriever: Retriever) -> None:
        self.retriever, run, gallery = retriever, retriever.run, retriever.gallery
        for answers in ("images", "captions"):
            self._require_own_index(answers)
        self._captions: list[list[str]] = [[] for _ in gallery.image_ids]
        for text, row in zip(gallery.texts, gallery.caption_image, strict=True):
            self._captions[int(row)].append(text)
        self._image_row = {name: row for row, name in enumerate(gallery.image_ids)}
        self._caption_row = dict(zip(gallery.caption_ids, gallery.caption_image.tolist(), strict=True))
        tried = {"text": self._try(gallery.texts[0].strip() or "a"), "image": self._try(Image.new("RGB", (64, 64)))}
        failures = {kind: found for kind, found in tried.items() if isinstance(found, XretError)}
        if len(failures) == len(tried):
            raise failures["text"]
        self.missing = {kind: str(error) for kind, error in failures.items()}
        self.pictureless: str | None = None
        try:
            gallery.picture(0)
        except (CacheError, ManifestError, StoreError) as error:
            self.pictureless = str(error)
        self.about = About(
            run=run.path.resolve().name,
            recipe=run.recipe.name,
            dataset=gallery.dataset,
            split=gallery.split,
            score=SIMILARITIES[run.recipe.similarity["name"]].score,
            images=len(gallery.image_ids),
            captions=len(gallery.texts),
            elements=max(found.elements for found in tried.values() if isinstance(found, Query)),
            text="text" not in self.missing,
            image="image" not in self.missing,
            pictures=self.pictureless is None,
            upright=gallery.upright,
            examples=[] if "text" in self.missing else self._find_examples(),
        )
        self.picture = lru_cache(KEPT)(self._picture)

    def answer(self, query: str | bytes | bytearray, k: int, elements: bool) -> Answer:
        """Search with a text, or with the bytes of an image file, and where `elements` with each element of its set.

        Raises:
            QueryError: the query is empty, no picture that can be searched with or without a known word, or has no
                elements.
            RunError: the index has more than the gallery by now.
        """
        start = time.perf_counter()
        encoded = self.retriever.encode_query(query) if isinstance(query, str) else self._encode_upload(query)
        self._require_own_index(encoded.answers)  # it may have been added to
        return Answer(
            results=self.retriever.search(encoded, k),
            elements=self.retriever.search_elements(encoded, k) if elements else None,
            uncertainty=encoded.uncertainty,
            unknown=encoded.unknown or None,
            seconds=round(time.perf_counter() - start, 4),
        )

    def to_dict(self, answer: Answer) -> dict[str, Any]:
        """Return what is known, ready for JSON; hits have the image's ``row`` and, of images, its ``captions``."""
        lists = None if answer.elements is None else [self._hits_to_dicts(hits) for hits in answer.elements]
        written = {**vars(answer), "results": self._hits_to_dicts(answer.results), "elements": lists}
        return {key: value for key, value in written.items() if value is not None}

    def _encode_upload(self, data: bytes | bytearray) -> Query:
        try:
            return self.retriever.encode_query(open_image(data, formats=FORMATS, most_pixels=MOST_PIXELS))
        except SampleError as error:
            raise QueryError(f"what was sent cannot be searched with: {error.reason}; send a picture") from error

    def _hits_to_dicts(self, hits: list[Hit]) -> list[dict[str, Any]]:
        written = []
        for hit in hits:
            if hit.caption is not None:
                written.append({**hit.to_dict(), "row": self._caption_row[hit.id]})
            else:
                row = self._image_row[hit.id]
                written.append({**hit.to_dict(), "row": row, "captions": self._captions[row]})
        return written

    def _picture(self, row: int, size: str) -> bytes:
        """Return the image in a row of the gallery as a JPEG; IndexError where there is no such row."""
        if not 0 <= row < len(self.retriever.gallery.image_ids):
            raise IndexError(row)
        gallery = self.retriever.gallery
        return jpeg(thumbnail(gallery.picture(row), SIZES[size], gallery.upright))

    def _require_own_index(self, answers: Modality) -> None:
        gallery = self.retriever.gallery
        count, searched = len(gallery.names(answers)[0]), self.retriever.searched(answers)
        if searched != count or self.retriever.searches_others(answers):
            raise RunError(
                f"the index has {searched:,} {answers}, which are not the {count:,} of split {gallery.split}: the page"
                " shows those of one split of one store; make an index of them alone with `xret index`"
            )

    def _try(self, query: str | Image.Image) -> Query | XretError:
        """Search once, with a caption or a picture; return the query, or what it fails with."""
        try:
            if isinstance(query, str):  # it need not have a word that the run knows
                encoded = Query(self.retriever.encode_captions([query]), "images")
            else:
                encoded = self.retriever.encode_query(query)
            self.retriever.search(encoded, 1)
        except XretError as error:
            return error
        return encoded

    def _find_examples(self) -> list[str]:
        """Return some captions, from all over the gallery, that are short and whose every word the run knows."""
        short = [text for text in self.retriever.gallery.texts if text.strip() and len(text) <= EXAMPLE_LENGTH]
        known = [text for text in short if not self.retriever.unknown_words([text])]
        return known[:: max(1, -(-len(known) // EXAMPLES))]
