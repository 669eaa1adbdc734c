"""A run at work: new texts and pictures are embedded as those of its store were, compared, and searched for."""

import hashlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from ...pipeline.data.images import PictureFile
from ...pipeline.device import pick_device, within_memory
from ...pipeline.encoders.words import WordsEncoder
from ...pipeline.errors import EncoderError, QueryError
from ...pipeline.reading.reencoding import Picture, encode_captions_by_all, encode_images_by_all
from ...pipeline.store import FeatureCache
from ..evaluation.scoring import embed_all
from ..model import Model, facts_of_each
from ..modules.embedding import Embedding, each
from ..modules.similarity import in_blocks
from ..runs.encoders import Encoders, find_encoders, reads_states
from ..runs.features import open_store
from ..runs.info import BranchName
from ..runs.run import Run
from .folder import PictureFolder
from .gallery import Gallery, Searched
from .hits import Hit, Modality, uncertainty
from .index import Compare, Index, read_record
from .queries import (
    UnknownWordsWarning,
    require_known_word,
    require_query,
    require_samples,
    require_texts,
    unknown_sentence,
)


@dataclass(frozen=True)
class Query:
    """A text or a picture, ready to be searched for.

    Attributes:
        embedding: of this one sample.
        answers: what is searched for it.
        unknown: its words that are not in the run's vocabulary, each once.
    """

    embedding: Embedding
    answers: Modality
    unknown: Sequence[str] = ()

    @property
    def uncertainty(self) -> float | None:
        """That of its Gaussian, as of a `Hit`."""
        spread = uncertainty(self.embedding)
        return None if spread is None else float(spread)


class Retriever:
    """A run, ready to embed and to search. Making it is cheap: encoders and gallery are loaded at their first use.

    Args:
        run: the run's folder.
        store: where the feature cache is now; None: where the run was trained.
        split: whose images and captions are searched.
        device: ``auto``, ``cpu`` or ``cuda``.
        data_root: finds the image files of the gallery, see `Gallery.picture`.
        visual_weights: of the image encoder, where they came from a file; of several feature sets one for each,
            separated by commas.
        text_weights: of the text encoder: a folder or hub id, if they have moved; a run on words has none.
        images: a folder of pictures to search instead of the split, see `PictureFolder`.
        index: a folder that `xret index` made of the same run, store and split; candidates then come from it.
        trust: let a file of weights run code while it is read.

    Attributes:
        run: the opened run.
        split, device: as given.
        weights: that were named, by ``image`` and ``text``.

    Raises:
        RunError: there is no run, or it is damaged.
        EncoderError: it reads words, and `text_weights` are named.
        QueryError: `images` and `index` are both given.
        DeviceError: the device is missing.
    """

    def __init__(
        self,
        run: str | Path,
        *,
        store: str | None = None,
        split: str = "test",
        device: str = "auto",
        data_root: str | Path | None = None,
        visual_weights: str | None = None,
        text_weights: str | None = None,
        images: str | Path | None = None,
        index: str | Path | None = None,
        trust: bool = False,
    ) -> None:
        self.run, self.split, self.device = Run(run), split, pick_device(device)
        if text_weights is not None and not reads_states(self.run):
            raise EncoderError(
                f"{run} reads texts by its own vocabulary and takes no text weights; leave out '{text_weights}' (option"
                " --text-weights, in Python text_weights)"
            )
        if index is not None and images is not None:
            raise QueryError("an index is of a split of a store, and a folder of pictures has none; leave one out")
        self.weights: dict[BranchName, str | None] = {"image": visual_weights, "text": text_weights}
        self._store, self._data_root = store, None if data_root is None else Path(data_root)
        self._images, self._index = None if images is None else Path(images), None if index is None else Path(index)
        self._trust, self._opened = trust, dict[Modality, Index]()

    @cached_property
    def model(self) -> Model:
        """The head, with the weights of its best epoch."""
        with within_memory(self.device):
            return self.run.model(self.device)

    @cached_property
    def cache(self) -> FeatureCache:
        """The store."""
        return open_store(self.run, self._store)

    @cached_property
    def gallery(self) -> Gallery:
        """The images and captions of the split; errors as for `Gallery`."""
        return Gallery(self.run, self.model, self.cache, self.split, self.device, self._data_root)

    @cached_property
    def searched(self) -> Searched:
        """What is searched: the folder of pictures where one was given, else the gallery."""
        if self._images is None:
            return self.gallery
        encoders = (self.run, self.model, self.weights_digest, lambda: self.image_encoders)
        return PictureFolder(*encoders, self._images, self.device)

    @cached_property
    def weights_digest(self) -> str:
        """The SHA-256 of the run's weights, in hexadecimal; RunError where it has none yet."""
        with self.run.weights.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    @cached_property
    def text_encoders(self) -> Encoders:
        """The encoder of captions for each feature set, and the dtype of its features."""
        return find_encoders(self.run, "text", self.weights["text"], str(self.device), self._trust)

    @cached_property
    def image_encoders(self) -> Encoders:
        """The encoder of images for each feature set, and the dtype of its features."""
        return find_encoders(self.run, "image", self.weights["image"], str(self.device), self._trust)

    def encode_text(self, texts: Sequence[str]) -> Embedding:
        """Embed B texts; a text of the store gets the embedding that it has there, up to rounding.

        Words outside a run's vocabulary are its `<unk>`; an `UnknownWordsWarning` names them.

        Returns:
            float32, by the kind of the run's embeddings: [B, D], [B, K, D], or a Gaussian or Sequence of B.

        Raises:
            QueryError: there is no text, it is not a list of texts, or one has lone surrogates.
            EncoderError: the encoder's weights are not named, or are others.
        """
        embedding = self.encode_captions(texts)
        _warn_of(self.unknown_words(texts), 3)
        return embedding

    def encode_captions(self, texts: Sequence[str]) -> Embedding:
        """Embed B captions of a data set: as `encode_text`, but without a warning of unknown words."""
        require_texts(texts)
        features = encode_captions_by_all(self.text_encoders, str(self.device), texts)
        with within_memory(self.device):
            return embed_all(self.model.embed_captions, features)

    def encode_images(self, images: Sequence[Picture]) -> Embedding:
        """Embed B pictures, files or decoded ones; of a run on videos, B folders of frames.

        Returns:
            As for `encode_text`.

        Raises:
            SampleError: a picture cannot be read; else as for `encode_text`.
        """
        wanted = "a list of files or PIL images such as ['photo.jpg']"
        require_samples(images, str | Path | PictureFile | Image.Image, "picture", wanted)
        features = encode_images_by_all(self.image_encoders, str(self.device), images)
        with within_memory(self.device):
            return embed_all(self.model.embed_images, features)

    def similarity(self, images: Embedding, captions: Embedding) -> Tensor:
        """Compare I images with C captions by the run's own similarity, float32 [I, C]; larger is closer."""
        return self.comparison("captions")(images, captions)

    def comparison(self, answers: Modality) -> Compare:
        """Return the run's similarity as a function of Q queries and N answers of a modality, to [Q, N]."""

        @torch.no_grad()
        def compare(queries: Embedding, items: Embedding) -> Tensor:
            queries, items = (each(lambda t: t.to(self.device), some) for some in (queries, items))
            with within_memory(self.device):
                if answers == "captions":
                    return in_blocks(self.model.compare, queries, items)
                return in_blocks(self.model.compare, items, queries).T

        return compare

    def search(self, query: Picture | Query, k: int = 10) -> list[Hit]:
        """Return the k best answers, or all if there are fewer: images to a text, captions to a picture.

        A folder of pictures has no captions: a picture finds those that the run embeds alike. Equal scores keep the
        gallery's order. An `UnknownWordsWarning` names words outside the run's vocabulary.

        Args:
            query: a text (str), or a picture: a Path, or a decoded one; or what `encode_query` made of it, without a
                warning.
            k: from 1.

        Raises:
            QueryError: the text is empty, a picture's name, or without a word that the run knows; or k is below 1.
            RunError: a similarity is not finite, or the index is damaged or of something else.
            Others: as for `encode_text`, `encode_images` and `Gallery`.
        """
        query = self._query(query, k)
        compare, answers = self.comparison(query.answers), query.answers
        if self._index is None:
            return self.searched.best(answers, compare(query.embedding, self.searched.of(answers))[0], k)
        index = self._open_index(answers)
        rows, scores = index.search(query.embedding, k, compare)
        return self.gallery.hits(answers, rows, scores, index.items[rows])

    def search_elements(self, query: Picture | Query, k: int = 10) -> list[list[Hit]]:
        """Return what each element of the query's set looks for: the answers that have the element nearest to it.

        The score is the largest cosine between that element and those of an answer, whatever the run's similarity.
        Arguments and errors are those of `search`; a QueryError also where the run's embeddings are not sets.
        """
        query = self._query(query, k)
        if not isinstance(query.embedding, Tensor) or query.embedding.ndim != 3:
            raise QueryError(
                f"the embeddings of {self.run.path} are not sets, so they have no elements to search with one by one;"
                " take a run of a recipe such as setdiv"
            )
        return self.searched.best_of_elements(query.answers, query.embedding[0], k)

    def encode_query(self, query: Picture) -> Query:
        """Embed a query of `search`, without its warning."""
        require_query(query)
        if not isinstance(query, str):
            return Query(self._encoded("images", query), "captions" if self._images is None else "images")
        unknown = self.unknown_words([query])
        if not reads_states(self.run):
            require_known_word(query, unknown)
        return Query(self._encoded("captions", query), "images", unknown)

    def unknown_words(self, texts: Sequence[str]) -> list[str]:
        """Return the words of texts that are not in the run's vocabulary, each once; [] if it reads parts of words."""
        if self.run.vocabulary is None:
            return []
        words = [encoder for encoder, _ in self.text_encoders if isinstance(encoder, WordsEncoder)]
        return words[0].unknown_words(texts) if words else []

    def index_facts(self) -> dict[str, str]:
        """Return what an index of the gallery depends on."""
        return {"store": self.cache.manifest_sha256, "split": self.split, "weights": self.weights_digest}

    def _encoded(self, modality: Modality, query: Picture) -> Embedding:
        """Embed a text or a picture; imported embeddings, which have no encoder, are looked up in the gallery."""
        texts = modality == "captions"
        try:
            return self.encode_captions([str(query)]) if texts else self.encode_images([query])
        except EncoderError as error:
            facts = facts_of_each(self.run.text_facts if texts else self.run.image_facts)
            if self._images is not None or any(one.kind != "global" for one in facts):
                raise
            path = f"/{Path(query).as_posix()}" if isinstance(query, str | Path) else ""
            names = self.gallery.names(modality)[1]
            rows = [row for row, name in enumerate(names) if (query == name if texts else path.endswith(f"/{name}"))]
            if not rows:
                there = f"a {'caption' if texts else 'picture'} of split '{self.split}', or name another --split"
                raise EncoderError(f"{error}, search with {there}") from error
            return each(itemgetter(rows[:1]), self.gallery.of(modality))

    def _query(self, query: Picture | Query, k: Any) -> Query:
        if isinstance(k, bool) or not isinstance(k, Integral) or k < 1:
            raise QueryError(f"{k} results cannot be shown; choose a whole number k of at least 1")
        if isinstance(query, Query):
            return query
        encoded = self.encode_query(query)
        _warn_of(encoded.unknown, 4)
        return encoded

    def _open_index(self, answers: Modality) -> Index:
        assert self._index is not None
        if answers not in self._opened:
            record = read_record(self._index, self.index_facts())
            self._opened[answers] = Index(self._index / answers, record[answers], self.model.compare)
        return self._opened[answers]


def _warn_of(unknown: Sequence[str], calls: int) -> None:
    """Warn of words that are not in the vocabulary, where so many `calls` began."""
    if unknown:
        warnings.warn(unknown_sentence(unknown), UnknownWordsWarning, stacklevel=calls)
