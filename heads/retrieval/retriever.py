"""A run at work: new texts and pictures are embedded as those of its store were, compared, and searched for."""

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ...pipeline.data.images import SUFFIXES, PictureFile
from ...pipeline.data.samples import tokenize
from ...pipeline.device import within_memory
from ...pipeline.encoders.words import WordsEncoder
from ...pipeline.errors import EncoderError, QueryError
from ...pipeline.reading.joined_sets import digest_of_pictures
from ...pipeline.wording import some_of
from ..evaluation.calibration import Calibration, calibrations
from ..evaluation.evaluation import choose_scale
from ..evaluation.hubness import learned_bias, require_bank
from ..evaluation.own_model import Embedder
from ..evaluation.scoring import Modality, Ranker, embed_all
from ..modules.embedding import Embedding, each, shape_of
from ..modules.similarity import in_blocks
from ..runs.encoders import Encoders, Picture, encode_captions_by_all, encode_images_by_all
from ..runs.info import BranchName
from .download import local_folder
from .folder import PictureFolder
from .gallery import Gallery, Hit, Searched
from .index import Compare, Index, open_index
from .smaller import made_smaller

log = logging.getLogger("xret")


@dataclass(frozen=True)
class Query:
    """A text or a picture, embedded, and the modality that answers it; `alike` where a picture looks for pictures."""

    embedding: Embedding
    answers: Modality
    alike: bool = False


class Retriever(Ranker):
    """A run, ready to embed and to search (``xret search``, ``xret serve``); ``xret.load`` opens one.

    Encoders and gallery are loaded at their first use.

    Args:
        run: its folder; the name ``user/name`` of one on the Hugging Face hub, where `heads.retrieval.hub.push` put it;
            or a user-defined model, anything with `embed_images`, `embed_captions` and `similarity`.
        store: where the feature store is now; None: where the run was trained. A model needs it.
        features: of a model, how the names of its sets begin, ``IMAGE,TEXT``; ``auto``: the only ones there.
        split: whose images and captions are searched; None: all of the store.
        device: ``auto``, ``cpu`` or ``cuda``.
        data_root: finds the image files of the gallery.
        visual_weights, text_weights: of the encoders, if they have moved; those of several feature sets with commas.
        images: a folder of pictures to search instead of the store. It is looked through once: pictures that are added
            later are seen by a new `load`.
        index: a folder that ``xret index`` made of the same run, store and split.
        hubness: hold back items that answer too many queries, by a bank of training queries.
        trust: let a file of weights, or user-defined parts in a run that was not trained here, run code.

    Raises:
        RunError: there is no such run, or it is damaged.
        EncoderError: `text_weights` are given for a run on words.
        QueryError: `images` or `hubness` is given with `index`, or `images` with `split` or `data_root`.
        DeviceError: the device is missing.
    """

    def __init__(
        self,
        run: str | Path | Embedder,
        *,
        store: str | Path | None = None,
        features: str = "auto",
        split: str | None = None,
        device: str = "auto",
        data_root: str | Path | None = None,
        visual_weights: str | None = None,
        text_weights: str | None = None,
        images: str | Path | None = None,
        index: str | Path | None = None,
        hubness: bool = False,
        trust: bool = False,
    ) -> None:
        ranks = local_folder(run) if isinstance(run, str | Path) else run
        super().__init__(ranks, store=store, features=features, device=device, trust=trust)
        if text_weights is not None and not self._reads_states:
            raise EncoderError(
                f"{run} reads texts by its own vocabulary and takes no text weights; leave out --text-weights"
                f" '{text_weights}'"
            )
        for name, given in (("index", index), ("split", split), ("data-root", data_root)):
            if given is not None and images is not None:
                way = "leave that or --images out"
                raise QueryError(f"a folder of pictures takes no --{name}, which is of a store; {way}")
        if index is not None and hubness:
            raise QueryError("an index says by itself whether hubness is corrected; leave --hubness to `xret index`")
        self.split, self.hubness, self._biases = split, hubness, dict[Modality, Tensor]()
        self.weights: dict[BranchName, str | None] = {"image": visual_weights, "text": text_weights}
        self.data_root = None if data_root is None else Path(data_root)
        self._images, self._index = None if images is None else Path(images), None if index is None else Path(index)
        self._opened: dict[Modality, Index] = {}
        self._calibrations: dict[str, Calibration] | None = None  # {}: there are none

    @cached_property
    def gallery(self) -> Gallery:
        """The images and captions of the split, or of all; errors as for `Gallery`, QueryError with `images`."""
        if self._images is not None:
            raise QueryError(f"{self._images} is searched, which is no store; leave --images out")
        return Gallery(self, self.split, self.data_root)

    @cached_property
    def searched(self) -> Searched:
        """What is searched: the folder of pictures where one was given, else the gallery."""
        if self._images is None:
            return self.gallery
        return PictureFolder(self, self._images, lambda: self.image_encoders)

    @cached_property
    def text_encoders(self) -> Encoders:
        """The encoder of captions for each feature set, and the dtype of its features."""
        return self.encoders("text", self.weights["text"])

    @cached_property
    def image_encoders(self) -> Encoders:
        """The encoder of images for each feature set, and the dtype of its features."""
        return self.encoders("image", self.weights["image"])

    @cached_property
    def scale(self) -> float | None:
        """The scale by which hubness is corrected, chosen on val; None: it is not, or none is better than without."""
        if not self.hubness:
            return None
        require_bank(self.cache)
        with within_memory(self.device):
            best, (deviation,), tried = choose_scale([self])
        if best is None:
            log.warning("hubness is not corrected: no scale is better on val than none (RSUM %.2f)", tried["none"])
            return None
        return best / deviation

    def bias(self, modality: Modality) -> Tensor:
        """Return what is added to the score of each item of a modality, float64 [N]."""
        if modality not in self._biases:
            items, owners = self.searched.of(modality), self.searched.owners(modality)
            self._biases[modality] = self.bias_of(modality, items, owners)
        return self._biases[modality]

    def bias_of(
        self, modality: Modality, items: Embedding, owners: np.ndarray | None = None, turn: Tensor | None = None
    ) -> Tensor:
        """Return what is added to the scores of some items of a modality, float64 [N]; zeros without a `scale`.

        `owners` are theirs, see `Searched.owners`. With `turn` it is that of the scores that embeddings have which are
        rotated by it, see `smaller`.
        """
        if self.scale is None:
            return torch.zeros(shape_of(items)[0], dtype=torch.float64)
        items = each(lambda t: t.to(self.device), items)
        change = None if turn is None else partial(made_smaller, turn=turn)
        with within_memory(self.device):
            views = [change(items) if change else items]
            return learned_bias(self, modality, views, [self.scale], change, owners)[0]

    def encode_text(self, texts: Sequence[str], *, warn: bool = True) -> Embedding:
        """Embed B texts: float32 [B, D], [B, K, D], or a Gaussian or Sequence of B.

        Vectors, and each element of a set, have unit length where the run compares by cosine: a dot product ranks as
        it does. A text of the store gets the embedding that it has there, up to rounding. Words outside a run's
        vocabulary are its `<unk>`, and logged as a warning, if `warn`. EncoderError where the encoder's weights are not
        found, or are others.
        """
        _require_texts(texts)
        features = encode_captions_by_all(self.text_encoders, str(self.device), texts)
        if warn and (unknown := self.unknown_words(texts)):
            log.warning("not in the vocabulary: %s", ", ".join(some_of(unknown, 10)))
        with within_memory(self.device):
            return self.model.compare.normalised(embed_all(self.model.embed_captions, features))

    def encode_images(self, images: Sequence[Picture]) -> Embedding:
        """Embed B pictures, files or decoded ones, as `encode_text` does; of a run on videos, B folders of frames.

        SampleError where a picture cannot be read, QueryError where there is none.
        """
        if not len(images):
            raise QueryError("there is no picture to embed; give at least one")
        features = encode_images_by_all(self.image_encoders, str(self.device), images)
        with within_memory(self.device):
            return self.model.compare.normalised(embed_all(self.model.embed_images, features))

    def similarity(self, images: Embedding, captions: Embedding) -> Tensor:
        """Compare I images with C captions by the run's own similarity, float32 [I, C]; larger is closer."""
        return self.comparison("captions")(images, captions)

    def require_uncorrected(self, what: str) -> None:
        """Raise QueryError where hubness is corrected, and what is written of the run has no place for that."""
        if self.hubness:
            raise QueryError(f"{what} has no place for a correction of hubness; leave --hubness out")

    def comparison(self, answers: Modality) -> Compare:
        """Return the run's similarity as a function of Q queries and N answers of a modality, to [Q, N]."""

        @torch.no_grad()
        def compare(queries: Embedding, items: Embedding) -> Tensor:
            queries, items = (each(lambda t: t.to(self.device), some) for some in (queries, items))
            with within_memory(self.device):
                if answers == "captions":
                    return in_blocks(self.model.similarity, queries, items)
                return in_blocks(self.model.similarity, items, queries).T

        return compare

    def search(
        self,
        query: Picture | Query,
        k: int = 10,
        *,
        like: Picture | Sequence[Picture] = (),
        unlike: Picture | Sequence[Picture] = (),
        at_least: float | None = None,
    ) -> list[Hit]:
        """Return the k best answers, or all if there are fewer: images to a text, captions to a picture.

        A query is a text (str), a picture (a Path, or a decoded one), or what `encode_query` made of it. A folder of
        pictures has no captions: a picture finds those that the run embeds alike. Equal scores keep the gallery's
        order. Hits have a probability where the run compares a text with a picture, see the module `calibration`.

        Args:
            query: what is looked for.
            k: how many answers.
            like, unlike: a text or picture, or several, that the images shall be like, too, or shall not. The score is
                then a sum of standard scores: each query's mean over the gallery is 0, its deviation 1.
            at_least: only answers with this probability or a higher one, which may be none.

        Raises:
            QueryError: the text is empty, a picture's name, or without a word that the run knows; k is below 1; or
                `at_least` is no probability, or there are none.
            RunError: a similarity is not finite, or the index is damaged or of something else.
        """
        query = self._query(query, k)
        if at_least is not None and not 0 <= at_least <= 1:
            raise QueryError(f"at_least is {at_least}; give a probability from 0 to 1")
        both: list[Any] = [some if isinstance(some, list | tuple) else [some] for some in (like, unlike)]
        answers, index, alone = query.answers, self.index_of(query.answers), not any(both)
        if not alone and (index is not None or answers == "captions"):
            raise QueryError("like and unlike take part in a search for images without an index; leave them out")
        calibration = self._calibration(query) if alone and index is None else None
        if calibration is None and at_least is not None:
            raise QueryError(
                "there are no probabilities here, so that at_least cannot be used: they are of a text and a picture,"
                " without an index, hubness, like and unlike, and fitted on the val split of the run's store"
            )
        if index is not None:
            rows, nearest = index.search(query.embedding, k, self.comparison(answers))
            return self.gallery.hits(answers, rows, nearest, index.items[rows])
        scores = self._scores(query) if alone else self._sums(query, *both)
        hits = self.searched.best(answers, scores, k, calibration)
        return [hit for hit in hits if at_least is None or (hit.probability or 0) >= at_least]

    def _scores(self, query: Query) -> Tensor:
        items, asked = self.searched.of(query.answers), query.embedding
        if self.model.compare.dot_product and isinstance(items, Tensor) and isinstance(asked, Tensor):
            scores = items @ asked[0].to(items)  # both are normalised, which the similarity would do again
        else:
            scores = self.comparison(query.answers)(asked, items)[0]
        return scores if query.alike or not self.hubness else scores + self.bias(query.answers).to(scores)

    def _standard_scores(self, query: Query) -> Tensor:
        scores = self._scores(query).double()
        return (scores - scores.mean()) / scores.std(correction=0).clamp_min(1e-12)

    def _sums(self, query: Query, like: Sequence[Picture], unlike: Sequence[Picture]) -> Tensor:
        """Return the sums of standard scores of images, see `search`."""
        total = self._standard_scores(query)
        for sign, several in ((1, like), (-1, unlike)):
            for other in several:
                total += sign * self._standard_scores(self._image_query(other))
        return total

    def _image_query(self, query: Picture) -> Query:
        if isinstance(query, str):
            return self.encode_query(query)
        return Query(self._encoded("images", query), "images", alike=True)

    def _calibration(self, query: Query) -> Calibration | None:
        if query.alike or self.hubness:
            return None
        if self._calibrations is None:
            self._calibrations = calibrations(self) or {}
        return self._calibrations.get("text_to_image" if query.answers == "images" else "image_to_text")

    def index_of(self, answers: Modality) -> Index | None:
        """Return the index that looks up a modality; None where none was given. RunError as `search`."""
        if self._index is not None and answers not in self._opened:
            self._opened[answers] = open_index(self._index, answers, self.index_facts(), self.model.compare)
        return self._opened.get(answers)

    def search_elements(self, query: Picture | Query, k: int = 10) -> list[list[Hit]]:
        """Return for each element of the query's set the answers that have the element nearest to it.

        The score is the largest cosine between that element and those of an answer, whatever the run's similarity;
        hubness is not corrected.
        Arguments and errors are those of `search`; a QueryError also where the run's embeddings are not sets.
        """
        query = self._query(query, k)
        items = self.searched.of(query.answers)
        if not (isinstance(query.embedding, Tensor) and isinstance(items, Tensor) and items.ndim == 3):
            raise QueryError(
                f"the embeddings of {self.name} are not sets, so they have no elements to search with one by one;"
                " take a run of a recipe such as setdiv"
            )
        elements = functional.normalize(query.embedding[0], dim=-1)
        slots = functional.normalize(items, dim=-1).unbind(1)
        scores = torch.stack([elements @ slot.T for slot in slots]).amax(0)
        return [self.searched.best(query.answers, of_element, k) for of_element in scores]

    def encode_query(self, query: Picture) -> Query:
        """Embed a query of `search`; errors as there."""
        if not isinstance(query, str):
            alike = self._images is not None
            return Query(self._encoded("images", query), "images" if alike else "captions", alike)
        name = query.strip()
        if not name:
            raise QueryError("the query is empty; describe in a few words what to look for")
        if names_picture(name):
            way = f"give words, or the picture itself, in Python as pathlib.Path({name!r})"
            raise QueryError(f"'{name}' is a file name and not a text; {way}")
        if not self._reads_states:
            words, unknown = set(tokenize(query)), self.unknown_words([query])
            if not words:
                raise QueryError(f"'{query}' has no words; describe in a few words what to look for")
            if len(unknown) == len(words):
                raise QueryError(
                    f"no word of the query is in the vocabulary of this run ({', '.join(some_of(unknown, 10))}); use"
                    " words of the captions that it was trained on, which run.json in its folder lists"
                )
        return Query(self._encoded("captions", query), "images")

    def unknown_words(self, texts: Sequence[str]) -> list[str]:
        """Return the words of texts that are not in the run's vocabulary, each once; [] if it reads parts of words."""
        return WordsEncoder(tuple(self.vocabulary)).unknown_words(texts) if self.vocabulary else []

    def index_facts(self) -> dict[str, str | None]:
        """Return what an index of the gallery depends on; rows would mean others if a failed sample was repaired."""
        samples, lines = hashlib.sha256(), chain(self.gallery.image_ids, ("",), self.gallery.caption_ids)
        for number, line in enumerate(lines):
            samples.update(f"\n{line}"[not number :].encode("utf-8", "surrogatepass"))
        facts = {"store": self.cache.manifest_sha256, "weights": self.digest, "usable samples": samples.hexdigest()}
        pictures = digest_of_pictures(self.sets[0], self.gallery.owners("images"))
        return facts | {"split": self.split, "pictures": pictures}

    @property
    def _reads_states(self) -> bool:
        """Whether captions are read by a text encoder, and not by a vocabulary alone."""
        return any(origin.kind != "words" for origin in self.origins("text"))

    def _encoded(self, modality: Modality, query: Picture) -> Embedding:
        """Embed a text or a picture; imported embeddings, which have no encoder, are looked up in the gallery."""
        texts = modality == "captions"
        try:
            return self.encode_text([str(query)]) if texts else self.encode_images([query])
        except EncoderError as error:
            origins = self.origins("text" if texts else "image")
            if self._images is not None or any(origin.kind != "global" for origin in origins):
                raise
            named = query.name if isinstance(query, PictureFile) else query
            path = f"/{Path(named).as_posix()}" if isinstance(named, str | Path) else ""
            names = self.gallery.names(modality)[1]
            rows = [row for row, name in enumerate(names) if (query == name if texts else path.endswith(f"/{name}"))]
            if not rows:
                there = self.cache.url if self.split is None else f"split '{self.split}', or choose another split"
                raise EncoderError(f"{error}, search with a {'caption' if texts else 'picture'} of {there}") from error
            # If several names end the path, as 1.jpg and a/1.jpg, the longest one is meant.
            row = max(rows, key=lambda row: len(names[row]))
            return each(itemgetter([row]), self.gallery.of(modality))

    def _query(self, query: Picture | Query, k: int) -> Query:
        if k < 1:
            raise QueryError(f"{k} results cannot be shown; choose a whole number k of at least 1")
        return query if isinstance(query, Query) else self.encode_query(query)


load = Retriever  # as `xret.load`


def _require_texts(texts: Sequence[str]) -> None:
    if isinstance(texts, str) or not len(texts):
        raise QueryError("texts must be a list of one str or more, for example encode_text(['a red cube'])")
    try:
        "".join(texts).encode()
    except UnicodeEncodeError as error:  # Python lets such bytes of a command line through as surrogates
        raise QueryError("the text has bytes that are not UTF-8; type it again") from error


def names_picture(text: str) -> bool:
    """Whether a text is the name of a picture's file."""
    name = text.strip()
    return name.lower().endswith(SUFFIXES) and ("/" in name or len(name.split()) == 1)
