"""The head: two branches, adapter and aggregator each, and the similarity that compares what they give."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from ..pipeline.errors import RecipeError
from ..pipeline.reading.features import Features
from ..pipeline.reading.joined_sets import Captions, Images, parts_of
from .modules.adapters import ADAPTERS, KINDS, Adapter
from .modules.aggregators import AGGREGATORS, Aggregated, Aggregator
from .modules.embedding import Embedding, Sequence
from .modules.joined_adapter import JoinedAdapter
from .modules.losses import LOSSES, Loss
from .modules.residual import ClosedForm, Frozen, Residual
from .modules.similarity import SIMILARITIES, Similarity
from .recipes.blocks import Block, Recipe, arguments
from .recipes.own import part_of
from .recipes.recipe import block_of, with_kinds
from .recipes.schema import sizes
from .recipes.trial import try_adapter


@dataclass(frozen=True)
class FeatureFacts:
    """What a model must know of a feature set; with the recipe it is all that is needed to rebuild the model."""

    kind: str  # grid, roi, frames, words, tokens or global; picks the adapter
    channels: int | None  # width of the local features; None for words, and where there are none
    global_channels: int | None  # width of the global feature; None for words
    vocabulary_size: int | None = None  # number of words; None for other kinds
    space: str | None = None  # that the global features share with those of other sets, see `pipeline.encoders.base`


Facts = tuple[FeatureFacts, ...]  # of each feature set of images or captions that a head reads


def feature_facts(features: Images | Captions) -> Facts:
    """Return the facts of cached features."""
    found = []
    for part in parts_of(features):
        size = len(getattr(part, "vocabulary", None) or ()) or None
        found.append(FeatureFacts(part.kind, part.channels, part.global_channels, size, getattr(part, "space", None)))
    return tuple(found)


def in_one_space(images: Any, captions: Any) -> bool:
    """Return whether the global features of an image and a caption set can be compared by their cosine."""
    space = getattr(images, "space", None)
    return space is not None and space == getattr(captions, "space", None)


def fitted(recipe: Recipe, image: Facts, text: Facts) -> Recipe:
    """Return a recipe for features with these facts: it names their kinds, and has the adapters of these alone.

    RecipeError where it takes other kinds.
    """
    kinds: dict[str, Any] = {}
    for side, facts in (("image", image), ("text", text)):
        require_kinds(recipe, side, facts)
        several = sorted({one.kind for one in facts})
        kinds[f"{side}_kind"] = several[0] if len(several) == 1 else several
    return with_kinds(recipe, replace(recipe.data, **kinds))


class Branch(nn.Module):
    """One modality: an adapter of one feature set or several, then an aggregator.

    With a `residual` the embedding is added to a base that does not learn. A `twin` is a second adapter of the same
    features, for an aggregator that wants one.
    """

    def __init__(
        self, adapter: Adapter, aggregator: Aggregator, residual: Residual | None = None, twin: Adapter | None = None
    ) -> None:
        super().__init__()
        self.adapter, self.aggregator, self.residual, self.twin = adapter, aggregator, residual, twin

    @property
    def adapters(self) -> list[Adapter]:
        """That of each feature set."""
        return self.adapter.of_each_set()

    @property
    def twins(self) -> list[Adapter]:
        """The second one of each feature set; none where there is no twin."""
        return [] if self.twin is None else self.twin.of_each_set()

    @property
    def averages(self) -> tuple[bool, ...]:
        """Of each feature set, whether the mean of its rows is all that is read of them."""
        return tuple(not self.aggregator.uses_local and adapter.global_ == "pooled" for adapter in self.adapters)

    @property
    def fields(self) -> set[str] | tuple[set[str], ...]:
        """What must be read of the cache, of ``local``, ``global`` and ``token``; of several sets one for each."""
        found = [adapter.fields(self.aggregator.uses_local) for adapter in self.adapters]
        if self.residual is not None:
            found = [own | more for own, more in zip(found, self.residual.base.fields, strict=True)]
        return found[0] if len(found) == 1 else tuple(found)

    def forward(self, features: Features) -> Aggregated:
        """Return the embeddings of B samples, with the global feature and the word ids for losses that want them."""
        adapted = self.adapter.adapt(features, uses_local=self.aggregator.uses_local)
        more: dict[str, Any] = {"place": features.place, "grid": features.grid} if self.aggregator.uses_place else {}
        if self.twin is not None:
            more["twin"] = self.twin.adapt(features, uses_local=self.aggregator.uses_local)
        made = self.aggregator(adapted.local, adapted.length, adapted.global_, **more)
        if self.residual is not None:  # losses on the global feature then mean the base
            base, embedding = self.residual(made.embedding, features)
            made, adapted = made._replace(embedding=embedding), adapted._replace(global_=base.to(adapted.global_))
        local = None if adapted.local is None else Sequence(adapted.local, adapted.length)
        return made._replace(global_=adapted.global_, token=words_of(features), local=local)


def words_of(features: Features) -> Sequence | None:
    """Return the word ids of captions; None where there are none."""
    words = features.words
    return None if words is None or words.token is None else Sequence(words.token, words.length)


class Model(nn.Module):
    """An image branch, a text branch, and a similarity that compares I images with C captions, ``[I, C]``."""

    def __init__(self, image: Branch, text: Branch, compare: Similarity) -> None:
        super().__init__()
        self.image, self.text, self.compare = image, text, compare

    @property
    def image_fields(self) -> set[str] | tuple[set[str], ...]:
        """What must be read of the image features."""
        return self.image.fields

    @property
    def caption_fields(self) -> set[str] | tuple[set[str], ...]:
        """What must be read of the caption features."""
        return self.text.fields

    def embed_images(self, features: Features) -> Aggregated:
        """Return the embeddings of I images, with what the losses may need."""
        return self.image(features)

    def embed_captions(self, features: Features) -> Aggregated:
        """Return the embeddings of C captions, with what the losses may need."""
        return self.text(features)

    def similarity(self, images: Embedding, captions: Embedding) -> Tensor:
        """Return the similarity ``[I, C]`` of image and caption embeddings; larger is closer."""
        return self.compare(images, captions)


def build_model(recipe: Recipe, image: Facts, text: Facts) -> Model:
    """Make the model that a recipe describes, for feature sets with these facts.

    Its weights are drawn from torch's global generator. RecipeError where there is no adapter for a kind, or a part
    refuses its arguments.
    """
    if recipe.model.residual != "none":
        _require_base(recipe, image, text)
    branches = _branch(recipe, "image", image), _branch(recipe, "text", text)
    widths = [branch.adapter.local_dim for branch in branches]
    for term in recipe.terms:
        if part_of(LOSSES, term, recipe.sources).uses_local and widths[0] != widths[1]:
            raise RecipeError(
                f"loss.{term} compares the rows of both sides, which are {widths[0]} (image) and {widths[1]} (text)"
                " wide: let the adapters project both (words: adapter.words.local=gru)"
            )
    if recipe.model.residual != "none":
        both = [_base(recipe, *side) for side in zip(branches, (image, text), strict=True)]
        width = min(sum(widths) for widths, _ in both)
        for branch, (widths, cached) in zip(branches, both, strict=True):
            base = Frozen() if recipe.model.residual == "frozen" else ClosedForm(widths, cached, width)
            branch.residual = Residual(recipe.model.dim, width, base)
    compare = part_of(SIMILARITIES, recipe.similarity["name"], recipe.sources)
    return Model(*branches, _make("similarity", compare, recipe.similarity))


def build_losses(recipe: Recipe, text: Facts) -> nn.ModuleDict:
    """Make the loss terms of a recipe for captions with these facts; the terms' weights stay in the recipe.

    RecipeError where a term generates captions, and they are no words.
    """
    losses: dict[str, nn.Module] = {}
    words = next((one.vocabulary_size for one in text if one.vocabulary_size is not None), None)
    for term, block in recipe.terms.items():
        part = part_of(LOSSES, term, recipe.sources)
        if words is None and "vocabulary_size" in sizes(part):
            raise RecipeError(
                f"loss.{term} writes captions word by word and needs captions of kind 'words', not "
                f"{_kinds(text)}; extract with --text words, or set loss.{term}.weight=0"
            )
        given = sizes(part, dim=recipe.model.dim, vocabulary_size=words or 0)
        name = term.replace(".", "/")  # no dots in modules' names
        losses[name] = _make(f"loss.{term}", part, block, *given.values())
    return nn.ModuleDict(losses)


def losses_of(losses: nn.ModuleDict) -> list[Loss]:
    """Return the terms that `build_losses` made."""
    terms: Any = losses.values()
    return list(terms)


def term_of(key: str) -> str:
    """Return the loss term that a weight belongs to, by its key in the state of what `build_losses` makes."""
    return key.partition(".")[0].replace("/", ".")


def _branch(recipe: Recipe, side: str, sets: Facts) -> Branch:
    dim = recipe.model.dim
    require_kinds(recipe, side, sets)
    adapter = _adapter_of_all(recipe, side, sets)
    block = recipe.aggregator[side]
    if block.get("positions") == "grid" and [one.kind for one in sets] != ["grid"]:
        block = {**block, "positions": "none"}  # only the cells of a map lie in rows and columns
    aggregator: Aggregator = _make(
        f"aggregator.{side}", part_of(AGGREGATORS, block["name"], recipe.sources), block, adapter.local_dim, dim
    )
    _require_rows(recipe, side, sets, aggregator.uses_local)
    twin = _adapter_of_all(recipe, side, sets) if aggregator.uses_twin else None
    return Branch(adapter, aggregator, twin=twin)


def _adapter_of_all(recipe: Recipe, side: str, sets: Facts) -> Adapter:
    adapters = [_adapter(recipe, side, one) for one in sets]
    return adapters[0] if len(adapters) == 1 else JoinedAdapter(adapters, recipe.model.dim)


def _base(recipe: Recipe, branch: Branch, facts: Facts) -> tuple[list[int], list[bool]]:
    """Return of each feature set how wide the vector is that a residual adds to, and whether it is cached as such."""
    cached = [recipe.model.residual == "frozen" or adapter.global_ == "cached" for adapter in branch.adapters]
    both = zip(facts, cached, strict=True)
    return [(one.global_channels if own else one.channels) or 0 for one, own in both], cached


def _require_base(recipe: Recipe, image: Facts, text: Facts) -> None:
    """Raise RecipeError where there are no vectors to add to, or what the head makes cannot be added."""
    sets = [*image, *text]
    kind, faults = recipe.model.residual, []
    if kind == "frozen" and (len(sets) > 2 or not in_one_space(sets[0], sets[1])):
        faults.append("adds to global features of one space: extract both towers of one model with --encoder")
    if "words" in [facts.kind for facts in sets]:
        faults.append("needs a vector of each caption, which words have not: extract with --text hf:MODEL")
    for side, block in recipe.aggregator.items():
        part = part_of(AGGREGATORS, block["name"], recipe.sources)
        if part.embedding not in ("vector", "set"):
            faults.append(f"adds vectors or sets, which aggregator.{side} '{block['name']}' does not give")
        if part.draws:  # losses compare the samples with the Gaussian that they were drawn from
            drawn = f"the samples that aggregator.{side} '{block['name']}' draws"
            faults.append(f"would move {drawn} away from their Gaussian")
    for term in recipe.terms:
        if part_of(LOSSES, term, recipe.sources).uses_local:
            faults.append(f"gives embeddings of another width than model.dim, which loss.{term} needs")
    if faults:
        raise RecipeError(f"model.residual={kind} {'; it '.join(faults)}; or set model.residual=none")


def _require_rows(recipe: Recipe, side: str, sets: Facts, uses_local: bool) -> None:
    if uses_local and any(facts.kind == "global" for facts in sets):
        raise RecipeError(
            f"recipe '{recipe.name}' reads local features (aggregator.{side} '{recipe.aggregator[side]['name']}'), and"
            f" these {side} features are global ones alone; take linear, mlp, lit, sail or fusemix, or --set"
            f" aggregator.{side}.name=global"
        )


def require_kinds(recipe: Recipe, side: str, sets: Facts) -> None:
    """Raise RecipeError where a recipe takes other features, or features of other kinds together."""
    wanted = recipe.data.kinds(side)
    for facts in sets:
        if wanted and facts.kind not in wanted:
            kinds = " and ".join(f"'{kind}'" for kind in wanted)
            raise RecipeError(
                f"recipe '{recipe.name}' holds the values for {side} features of kind {kinds}, not "
                f"'{facts.kind}'; take '{recipe.name.split('/')[0]}', or --set data.{side}_kind="
                f"{facts.kind if len(sets) == 1 else 'null'}"
            )
        if facts.kind != "global" and facts.kind not in KINDS:
            raise RecipeError(f"there is no adapter for {side} features of kind '{facts.kind}': {', '.join(KINDS)}")
    words = [facts.kind for facts in sets].count("words")
    if words > 1:
        raise RecipeError(f"data.{side} names {words} sets of words, and a head has one vocabulary: leave one out")
    if side == "text":
        _require_augmentable(recipe, sets, bool(words))


def _require_augmentable(recipe: Recipe, sets: Facts, words: bool) -> None:
    if words and recipe.augment.mix:
        raise RecipeError(
            "augment.mix blends cached features, and captions of kind 'words' have none; set data.text to those of a "
            "text encoder, or augment.mix=0"
        )
    if recipe.augment.mask_words and not words:
        raise RecipeError(
            f"augment.mask_words masks words, and captions of kind {_kinds(sets)} are states of a text encoder; set "
            "augment.text instead, or finetune.mask_words for when the encoder is put back"
        )


def _adapter(recipe: Recipe, side: str, facts: FeatureFacts) -> Adapter:
    dim, kind = recipe.model.dim, block_of(side, facts.kind)
    block = recipe.adapter[kind]
    if facts.kind == "global":
        block, facts = {**block, "global": "cached"}, replace(facts, channels=facts.global_channels)
    if facts.vocabulary_size is not None:
        masks = side == "text" and recipe.augment.mask_words > 0
        sizes: tuple[int | None, ...] = (facts.vocabulary_size + masks, dim)  # <mask> is the last word
    else:
        sizes = (facts.channels, facts.global_channels, dim)
    part = part_of(ADAPTERS, block["name"], recipe.sources)
    if ":" in block["name"]:
        _make(f"adapter.{kind}", lambda *sizes, **given: try_adapter(part, sizes, given), block, *sizes)
    return _make(f"adapter.{kind}", part, block, *sizes)


def _kinds(sets: Facts) -> str:
    return " and ".join(dict.fromkeys(f"'{facts.kind}'" for facts in sets))


def _make(path: str, part: Callable[..., Any], block: Block, *sizes: int | None) -> Any:
    try:
        return part(*sizes, **arguments(block))
    except ValueError as error:
        raise RecipeError(f"{path}: {error}") from error
