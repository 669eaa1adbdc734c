"""The head: two branches, adapter and aggregator each, and the similarity that compares what they give."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..pipeline.cache import CaptionSet, ImageSet
from ..pipeline.errors import RecipeError
from ..pipeline.reading.features import Features
from .modules.adapters import ADAPTERS
from .modules.aggregators import AGGREGATORS, Aggregated
from .modules.embedding import Embedding, Sequence
from .modules.losses import LOSSES
from .modules.positions import cell_places
from .modules.similarity import SIMILARITIES
from .recipes.blocks import Block, Recipe, arguments
from .recipes.schema import takes


@dataclass(frozen=True)
class FeatureFacts:
    """What a model must know of a feature set; with the recipe it is all that is needed to rebuild the model.

    Attributes:
        kind: ``grid``, ``roi``, ``frames``, ``words`` or ``tokens``; picks the adapter.
        channels: width of the local features; None for words.
        global_channels: width of the global feature; None for words.
        vocabulary_size: number of words; None for other kinds.
    """

    kind: str
    channels: int | None
    global_channels: int | None
    vocabulary_size: int | None = None


def feature_facts(feature_set: ImageSet | CaptionSet) -> FeatureFacts:
    """Return the facts of a cached feature set."""
    vocabulary = getattr(feature_set, "vocabulary", None)
    size = None if vocabulary is None else len(vocabulary)
    return FeatureFacts(feature_set.kind, feature_set.channels, feature_set.global_channels, size)


class Branch(nn.Module):
    """One modality: an adapter, then an aggregator.

    Args:
        adapter: projects local and global features.
        aggregator: makes one embedding of them.
    """

    def __init__(self, adapter: nn.Module, aggregator: nn.Module) -> None:
        super().__init__()
        self.adapter = adapter
        self.aggregator = aggregator

    @property
    def fields(self) -> set[str]:
        """What must be read of the cache, of ``local``, ``global`` and ``token``."""
        adapter: Any = self.adapter
        return adapter.fields(self.aggregator.uses_local)

    def forward(self, features: Features) -> Aggregated:
        """Return the embeddings of B samples, with the global feature and the word ids for losses that want them."""
        adapted = self.adapter(
            features.length, features.local, features.global_, features.token, uses_local=self.aggregator.uses_local
        )
        placed = {"place": _place(features)} if self.aggregator.uses_place else {}
        made = self.aggregator(adapted.local, adapted.length, adapted.global_, **placed)
        token = None if features.token is None else Sequence(features.token, features.length)
        return made._replace(global_=adapted.global_, token=token)


def _place(features: Features) -> Tensor | None:
    """Return where the cells of maps lie that are not square, or of which some were left out; else None."""
    if features.place is None and features.grid is not None and features.local is not None:
        places = cell_places(features.local.shape[1], features.local.device, features.grid)
        return None if places is None else places[None]
    return features.place


class Model(nn.Module):
    """An image branch, a text branch and a similarity.

    Args:
        image: embeds images.
        text: embeds captions.
        compare: takes the embeddings of I images and C captions to ``[I, C]``; larger is closer.
    """

    def __init__(self, image: Branch, text: Branch, compare: nn.Module) -> None:
        super().__init__()
        self.image = image
        self.text = text
        self.compare = compare

    @property
    def image_fields(self) -> set[str]:
        """What must be read of the image features."""
        return self.image.fields

    @property
    def caption_fields(self) -> set[str]:
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


def build_model(recipe: Recipe, image: FeatureFacts, text: FeatureFacts) -> Model:
    """Make the model that a recipe describes, for feature sets with these facts.

    Its weights are drawn from torch's global generator.

    Raises:
        RecipeError: there is no adapter for a kind, or a part refuses its arguments.
    """
    return Model(
        _branch(recipe, "image", image),
        _branch(recipe, "text", text),
        _make("similarity", SIMILARITIES[recipe.similarity["name"]], recipe.similarity),
    )


def build_losses(recipe: Recipe, text: FeatureFacts) -> nn.ModuleDict:
    """Make the loss terms of a recipe for captions with these facts; the terms' weights stay in the recipe.

    Raises:
        RecipeError: a term generates captions, and they are no words.
    """
    losses = {}
    for term, block in recipe.terms.items():
        sizes: tuple[int, ...] = ()
        if takes(LOSSES[term], "vocabulary_size"):
            if text.vocabulary_size is None:
                raise RecipeError(
                    f"loss.{term} writes captions word by word and needs captions of kind 'words', not '{text.kind}'; "
                    f"extract with --text words, or set loss.{term}.weight=0"
                )
            sizes = (recipe.model.dim, text.vocabulary_size)
        losses[term] = _make(f"loss.{term}", LOSSES[term], block, *sizes)
    return nn.ModuleDict(losses)


def _branch(recipe: Recipe, side: str, facts: FeatureFacts) -> Branch:
    wanted = getattr(recipe.data, f"{side}_kind")
    if wanted is not None and facts.kind != wanted:
        raise RecipeError(
            f"recipe '{recipe.name}' holds its paper's values for {side} features of kind '{wanted}', not "
            f"'{facts.kind}'; take '{recipe.name.split('/')[0]}', or --set data.{side}_kind={facts.kind}"
        )
    if facts.kind not in ADAPTERS:
        raise RecipeError(f"there is no adapter for {side} features of kind '{facts.kind}': {', '.join(ADAPTERS)}")
    dim = recipe.model.dim
    masks = side == "text" and recipe.augment.mask_words > 0
    if facts.vocabulary_size is not None:
        sizes: tuple[int | None, ...] = (facts.vocabulary_size + masks, dim)  # <mask> is the last word
    elif masks:
        raise RecipeError(
            f"augment.mask_words masks words, and captions of kind '{facts.kind}' are states of a text encoder; set "
            "augment.text instead, or finetune.mask_words for when the encoder is put back"
        )
    else:
        sizes = (facts.channels, facts.global_channels, dim)
    adapter = _make(f"adapter.{facts.kind}", ADAPTERS[facts.kind], recipe.adapter[facts.kind], *sizes)
    block = recipe.aggregator[side]
    if block.get("positions") == "grid" and facts.kind != "grid":
        block = {**block, "positions": "none"}  # only the cells of a map lie in rows and columns
    return Branch(adapter, _make(f"aggregator.{side}", AGGREGATORS[block["name"]], block, adapter.local_dim, dim))


def _make(path: str, part: Callable[..., Any], block: Block, *sizes: int | None) -> Any:
    try:
        return part(*sizes, **arguments(block))
    except ValueError as error:
        raise RecipeError(f"{path}: {error}") from error
