"""What a head takes from elsewhere before its first step: statistics, word vectors, weights or scores of another run.

Word vectors are the text files of GloVe, fastText and word2vec, read for a vocabulary.
"""

import gzip
import logging
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor, nn

from ...pipeline.device import on_host
from ...pipeline.errors import RecipeError, RunError, VectorsError
from ...pipeline.progress import Progress
from ...pipeline.reading.batches import Batch, Batches
from ...pipeline.reading.features import Features
from ...pipeline.reading.joined_sets import parts_of
from ...pipeline.wording import counted, reason
from ..evaluation.closed_form import find_base
from ..evaluation.scoring import Ranker, embed
from ..model import Model, term_of
from ..modules.embedding import Embedding, each
from ..recipes.blocks import Recipe
from ..recipes.recipe import changed
from ..recipes.schema import difference
from ..runs.run import Run
from .objective import Objective

_WHOLE = "--init-from takes all weights of a run or none: train with its recipe.yaml on features like its own"
_BEGUN_WITH = "adapter.words.vectors", "model.residual"  # what weights hold from their first step on
_BATCH = 256  # samples that are read together for statistics
_ENOUGH = 1 << 20  # samples of a split that statistics are taken of; of more, as many batches evenly between them
_LINES = 10_000  # of word vectors between two reports of progress
_TERM = "distillation"
_log = logging.getLogger("xret")


def begin(objective: Objective, base: Run | None, split: Batches, val: Batches, *, alone: bool) -> None:
    """Give a new head what it takes from its data or from another run."""
    if base is None:
        look_at_data(objective.model, split)
        fit_residual(objective.model, objective.recipe, split, val, logging.INFO if alone else logging.DEBUG)
    else:
        take_weights(objective.model, base, split, objective.recipe)
        take_losses(objective.losses, objective.recipe, base)


def look_at_data(model: Model, split: Batches) -> None:
    """Give a new model what it takes from its training split: statistics of the features, and vectors of the words.

    VectorsError where their file cannot be read, RecipeError where they are of another width than the embeddings.
    """
    for branch, parts in ((model.image, split.image_features), (model.text, split.caption_features)):
        for number, adapter in (*enumerate(branch.adapters), *enumerate(branch.twins)):
            adapter.measure(partial(_of_set, parts, number), branch.aggregator.uses_local)
    words = [one for one in (*model.text.adapters, *model.text.twins) if one.vectors is not None]
    if words and words[0].vectors is not None:
        read = read_word_vectors(words[0].vectors, split.caption_set.vocabulary or ())
        try:
            for one in words:
                one.load_vectors(torch.from_numpy(read.vectors), torch.from_numpy(read.found))
        except ValueError as error:
            raise RecipeError(f"adapter.words: {error}") from error
        _log.warning(f"words without a vector in {words[0].vectors}: {len(read.missing)} of {len(read.found)}")


def fit_residual(model: Model, recipe: Recipe, split: Batches, val: Batches, level: int) -> None:
    """Give a new model the closed form that its head is added to, where the recipe has one, and log it at `level`."""
    if recipe.model.residual in ("cca", "procrustes"):
        found = find_base(model, split, val, rotate=recipe.model.residual == "procrustes")
        _log.log(level, f"closed form: ridge {found.ridge:g}, power {found.power:g}, val RSUM {found.rsum:.1f}")


def _of_set(parts: Callable[[int, int], Iterator[Features]], number: int) -> Iterator[Features]:
    return (features.parts[number] for features in parts(_BATCH, _ENOUGH))


def take_weights(model: Model, base: Run, split: Batches, recipe: Recipe) -> None:
    """Give a new model all weights of another run's best epoch; RunError if they do not fit, or words are others.

    RunError, too, where the recipe names word vectors or a residual that these weights did not begin with.
    """
    named = {key: recipe.flat()[key] for key in _BEGUN_WITH if recipe.flat().get(key)}
    if said := difference({key: base.recipe.flat().get(key) for key in named}, named):
        raise RunError(f"the weights of {base.path} began otherwise: {said}; {_WHOLE}")
    if base.vocabulary != split.caption_set.vocabulary:
        raise RunError(f"{base.path} knows other words than the captions of {split.caption_set.cache.url}; {_WHOLE}")
    there, here = base.model(torch.device("cpu")).state_dict(), model.state_dict()
    shapes = [{name: list(value.shape) for name, value in one.items()} for one in (there, here)]
    if said := difference(shapes[0], shapes[1]):
        raise RunError(f"the weights of {base.path} do not fit: {said}; {_WHOLE}")
    model.load_state_dict(there)
    own = (*parts_of(split.image_set), *parts_of(split.caption_set))
    if [one.fingerprint for one in own] != [*base.info.fingerprints("image"), *base.info.fingerprints("text")]:
        names = ", ".join((*base.info.names("image"), *base.info.names("text")))
        _log.warning(f"--init-from: {base.path} has learnt from other features ({names}).")


def take_losses(losses: nn.ModuleDict, recipe: Recipe, base: Run) -> None:
    """Give the terms of a new training what another run's have learned, where both have them with the same values.

    A temperature, for one. Nothing is taken of a run that was handed on without its checkpoint.
    """
    if (checkpoint := base.load_checkpoint()) is None:
        return
    there, here = ({term: {**block, "weight": 1} for term, block in one.terms.items()} for one in (base.recipe, recipe))
    same = {term for term, block in here.items() if there.get(term) == block}
    learned = {key: value for key, value in checkpoint["state"]["losses"].items() if term_of(key) in same}
    losses.load_state_dict(losses.state_dict() | learned)


class Teacher:
    """A run's embeddings of a training split, in their order there; images in their first view.

    RunError where the run embeds fewer samples than there are.
    """

    def __init__(self, run: str | Path, split: Batches, device: torch.device, trust: bool) -> None:
        ranker = Ranker(run, store=split.image_set.cache.url, device=str(device), trust=trust)
        batches = ranker.batches("train")
        self.compare = ranker.model.similarity
        images, captions = embed(ranker.model, batches)
        self.images = _in_order(images, batches.image_rows, split.image_rows, f"{run} has no embedding of", "image")
        self.captions = _in_order(
            captions, batches.caption_rows, split.caption_rows, f"{run} has no embedding of", "caption"
        )
        self._owner = torch.from_numpy(split.caption_image)

    @torch.no_grad()
    def scores(self, batch: Batch) -> Tensor:
        """Return the similarities of a batch's images and captions, ``[I, C]``."""
        captions = batch.caption_index
        images = captions.new_zeros(len(batch.images.length))
        images[on_host(batch.caption_image)] = self._owner[captions]
        return self.compare(_some(self.images, images), _some(self.captions, captions))


def teacher_digest(teacher: str | Path | None, taught: Run | None, trust: bool) -> str | None:
    """Return a digest of a teacher's weights, if there is one; RunError where another run stands where it was."""
    digest = None if teacher is None else Run(teacher, trust).weights_digest[:12]
    if taught is not None and taught.info.teacher not in (None, digest):
        raise RunError(
            f"{teacher} has other weights than when it taught {taught.path}; put them back, or train another"
        )
    return digest


def teach(objective: Objective, run: str | Path | None, split: Batches, device: torch.device, trust: bool) -> None:
    """Let a run, if there is one, teach what is learnt from a training split."""
    if run is not None:
        objective.teacher = Teacher(run, split, device, trust).scores


def taught(recipe: Recipe, distil: str | Path | None) -> Recipe:
    """Return the recipe with a term for what is taught; RecipeError where it lacks its teacher, or cannot learn."""
    if distil is not None and not recipe.schedule.epochs:
        raise RecipeError("a teacher teaches by steps, and schedule.epochs is 0: set it, or leave --distil out")
    if distil is not None and recipe.augment.mix:
        raise RecipeError("a teacher scores samples and no blends of them: set augment.mix=0, or leave --distil out")
    if distil is not None and _TERM not in recipe.terms:
        return changed(recipe, {f"loss.{_TERM}.weight": 1.0})
    if distil is None and _TERM in recipe.terms:
        raise RecipeError(f"loss.{_TERM} needs a teacher: name a run by --distil, or set loss.{_TERM}.weight=0")
    return recipe


def _in_order(embedding: Embedding, there: np.ndarray, wanted: np.ndarray, fault: str, what: str) -> Embedding:
    places = np.searchsorted(there, wanted).clip(max=len(there) - 1)
    if missing := int((there[places] != wanted).sum()):
        raise RunError(f"{fault} {counted(missing, what)} of train, whose features it could not read; take another run")
    return _some(embedding, torch.from_numpy(places))


def _some(embedding: Embedding, rows: Tensor) -> Embedding:
    return each(lambda values: values[rows.to(values.device)], embedding)


@dataclass(frozen=True)
class WordVectors:
    """The vectors of a vocabulary."""

    vectors: np.ndarray  # float32 [V,dim], one row per word of the vocabulary; zeros where the file has none
    found: np.ndarray  # bool [V], whether the file has one
    missing: tuple[str, ...]  # the words without one, in the order of the vocabulary


def read_word_vectors(path: str | Path, vocabulary: Sequence[str]) -> WordVectors:
    """Read the vectors of a vocabulary from a text file, line by line; no others are kept.

    A line is a word and its numbers with a space between each; GloVe's words may have spaces inside. A first line of
    two whole numbers, as fastText and word2vec write it, is how many vectors there are and how wide. A file whose name
    ends in ``.gz`` is decompressed. A word gets the vector of the first line with this very word, else of the first
    whose word in lower case is it. VectorsError: the file cannot be read, a line is not a word with its numbers, lines
    are missing at the end, or the file has no word of the vocabulary.
    """
    path = Path(path)
    try:
        with path.open("rb") as file, Progress(f"read {path.name}", path.stat().st_size, "bytes") as progress:
            return _read(_lines(file, path.suffix == ".gz", progress), path, vocabulary)
    except (OSError, EOFError, zlib.error) as error:
        raise VectorsError(
            f"the word vectors {path} cannot be read ({reason(error)}); check the path or the file"
        ) from error


def _lines(file: BinaryIO, compressed: bool, progress: Progress) -> Iterator[bytes]:
    """Yield the lines. Only a line feed ends one: some words are line ends of other kinds."""
    at = 0
    for number, line in enumerate(gzip.GzipFile(fileobj=file) if compressed else file):
        if number % _LINES == 0:
            progress.update(file.tell() - at)
            at = file.tell()
        yield line.rstrip(b" \r\n")
    progress.update(file.tell() - at)


def _begun(lines: Iterator[bytes], path: Path) -> tuple[int | None, int, Iterator[bytes]]:
    """Return how many vectors a header promises, if there is one, how wide they are, and the lines that have them."""
    first = next(lines, b"")
    header = re.fullmatch(rb"(\d{1,12}) (\d{1,6})", first)
    promised, dim = (int(header[1]), int(header[2])) if header else (None, first.count(b" "))
    begin = next(lines, b"") if header else first
    if dim == 0 or (promised and begin.count(b" ") < dim):  # before memory is made for as many numbers
        raise VectorsError(f"{path} does not begin with a word and its numbers; use a text file of word vectors")
    return promised, dim, chain([begin] if begin else [], lines)


def _read(lines: Iterator[bytes], path: Path, vocabulary: Sequence[str]) -> WordVectors:
    promised, dim, lines = _begun(lines, path)
    rows = {word: row for row, word in enumerate(vocabulary)}
    vectors = np.zeros((len(rows), dim), dtype=np.float32)
    rank = np.zeros(len(rows), dtype=np.int8)  # of the line a word has: 2 with this very word, 1 in lower case, 0 none
    count = 0
    for count, line in enumerate(lines, 1):
        where = f"{path}: line {count + (promised is not None)}"
        name, *numbers = line.rsplit(b" ", dim)
        if len(numbers) < dim:
            raise VectorsError(f"{where} is not a word with {dim} numbers; use a text file of word vectors")
        word = name.decode(errors="replace")  # what is not UTF-8 is no word of a vocabulary
        better, row = (2, rows[word]) if word in rows else (1, rows.get(word.lower()))
        if row is not None and better > rank[row]:
            vectors[row], rank[row] = _vector(numbers, where), better
    if count < (promised or 0):
        raise VectorsError(f"{path}: its first line promises {promised} vectors and it has {count}; get the file again")
    if not rank.any():
        raise VectorsError(f"{path} has no word of the vocabulary; use vectors of the captions' language")
    return WordVectors(vectors, rank > 0, tuple(word for word, row in rows.items() if not rank[row]))


def _vector(numbers: list[bytes], where: str) -> np.ndarray:
    try:
        vector = np.array([float(number) for number in numbers])
    except ValueError as error:
        raise VectorsError(f"{where} has something other than numbers after its word; get the file again") from error
    if not np.abs(vector).max() <= np.finfo(np.float32).max:  # also false for NaN
        raise VectorsError(f"{where} has a number that is not finite; get the file again")
    return vector
