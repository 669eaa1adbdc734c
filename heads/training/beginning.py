"""What a new head takes from its training split, or from another run, before its first step."""

import logging
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import nn

from ...pipeline.errors import RecipeError, RunError
from ...pipeline.reading.batches import Batches
from ...pipeline.reading.features import Features
from ...pipeline.reading.joined_sets import parts_of
from ..evaluation.closed_form import find_base
from ..model import Model, term_of
from ..recipes.blocks import Recipe
from ..recipes.schema import difference
from ..runs.run import Run
from .objective import Objective
from .word_vectors import read_word_vectors

_WHOLE = "--init-from takes all weights of a run or none: train with its recipe.yaml on features like its own"
_BATCH = 256  # samples that are read together for statistics
_ENOUGH = 1 << 20  # samples of a split that statistics are taken of; of more, as many batches evenly between them
_log = logging.getLogger("xret")


def begin(objective: Objective, base: Run | None, split: Batches, val: Batches, *, alone: bool) -> None:
    """Give a new head what it takes from its data or from another run."""
    if base is None:
        look_at_data(objective.model, split)
        fit_residual(objective.model, objective.recipe, split, val, logging.INFO if alone else logging.DEBUG)
    else:
        take_weights(objective.model, base, split)
        take_losses(objective.losses, objective.recipe, base)


def look_at_data(model: Model, split: Batches) -> None:
    """Give a new model what it takes from its training split: statistics of the features, and vectors of the words.

    Raises:
        VectorsError: the GloVe or fastText file cannot be read.
        RecipeError: its vectors are of another width than `adapter.words.word_dim`.
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


def take_weights(model: Model, base: Run, split: Batches) -> None:
    """Give a new model all weights of another run's best epoch; RunError if they do not fit, or words are others."""
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
