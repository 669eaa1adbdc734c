"""The head: two branches, adapter and aggregator each, and the similarity that compares what they give."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..pipeline.batches import Features
from ..pipeline.cache import CaptionSet, ImageSet
from ..pipeline.errors import RecipeError
from .adapters import ADAPTERS
from .aggregators import AGGREGATORS, Aggregated
from .losses import LOSSES
from .recipe import Recipe, arguments
from .similarity import SIMILARITIES


@dataclass(frozen=True)
class FeatureFacts:
    """What a model must know of a feature set; with the recipe it is all that is needed to rebuild the model.

    Attributes:
        kind: ``grid``, ``roi``, ``words`` or ``tokens``; picks the adapter.
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
        """Return the embeddings of B samples: ``[B, D]`` or ``[B, K, D]``."""
        adapted = self.adapter(
            local=features.local, length=features.length, global_=features.global_, token=features.token
        )
        return self.aggregator(adapted.local, adapted.length, adapted.global_)


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
        """Return the embeddings of I images, ``[I, D]`` or ``[I, K, D]``, with what the losses may need."""
        return self.image(features)

    def embed_captions(self, features: Features) -> Aggregated:
        """Return the embeddings of C captions, ``[C, D]`` or ``[C, K, D]``, with what the losses may need."""
        return self.text(features)

    def similarity(self, images: Tensor, captions: Tensor) -> Tensor:
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


def build_losses(recipe: Recipe) -> nn.ModuleDict:
    """Make the loss terms of a recipe; their weights stay in the recipe."""
    return nn.ModuleDict({term: _make(f"loss.{term}", LOSSES[term], block) for term, block in recipe.loss.items()})


def _branch(recipe: Recipe, side: str, facts: FeatureFacts) -> Branch:
    if facts.kind not in ADAPTERS:
        raise RecipeError(f"there is no adapter for {side} features of kind '{facts.kind}': {', '.join(ADAPTERS)}")
    dim = recipe.model.dim
    if facts.vocabulary_size is not None:
        sizes: tuple[int | None, ...] = (facts.vocabulary_size, dim)
    else:
        sizes = (facts.channels, facts.global_channels, dim)
    adapter = _make(f"adapter.{facts.kind}", ADAPTERS[facts.kind], recipe.adapter[facts.kind], *sizes)
    block = recipe.aggregator[side]
    return Branch(adapter, _make(f"aggregator.{side}", AGGREGATORS[block["name"]], block, adapter.local_dim, dim))


def _make(path: str, part: Callable[..., Any], block: Mapping[str, Any], *sizes: int | None) -> Any:
    try:
        return part(*sizes, **arguments(block))
    except ValueError as error:
        raise RecipeError(f"{path}: {error}") from error
