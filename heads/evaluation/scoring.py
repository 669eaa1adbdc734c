"""What ranks the samples of a store, a run or frozen encoders without any head, and how it scores a split.

Encoders that were trained together, as the towers of a CLIP, name the `space` of their features. The cosine of their
cached global features is then a ranking by itself, and the row that a head on these features has to beat. Everything
is computed in float32.
"""

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Several
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from ...pipeline.device import pick_device, within_memory
from ...pipeline.encoders.origin import Origin
from ...pipeline.errors import RunError
from ...pipeline.reading.batches import Batches
from ...pipeline.reading.dataset import fields_there
from ...pipeline.reading.features import Features
from ...pipeline.reading.joined_sets import parts_of
from ...pipeline.store import FeatureCache
from ..model import Model, in_one_space
from ..modules.aggregators import Aggregated
from ..modules.embedding import Embedding, Gaussian, Joint, Sequence, concatenate, each, tensors_of
from ..modules.padding import mean_rows, zero_padding
from ..modules.similarity import SIMILARITIES, in_blocks
from ..runs.encoders import Encoders, find_encoders, origins_of
from ..runs.features import Sets, batches_of, open_store, sets_named, sets_of_run
from ..runs.info import BRANCHES, BranchName
from ..runs.run import Run
from .metrics import Ranks, block_ranks, log_circular_variance, ranks
from .own_model import CheckedModel, Embedder, digest_of, require_methods
from .pairs import NOT_FINITE, Pairs, Part

BATCH = 256  # samples embedded in one go
Modality = Literal["images", "captions"]
MODALITIES: tuple[Modality, Modality] = ("images", "captions")
WHOLE = 1 << 28  # pairs, whose similarities take a gibibyte; those of more are computed in blocks, again each time


class Ranker:
    """A run or a user-defined model, with the feature sets that it reads of a store.

    Store, sets and model of a run are opened at their first use. Arguments and errors are those of `evaluate`; a model
    reads all fields of its sets, and its device ``auto`` is that of its weights.
    """

    run: Run | None = None  # None: another model ranks
    views = 1  # of each image, in the mean over which it ranks

    def __init__(
        self,
        ranks: str | Path | Embedder,
        *,
        store: str | Path | None = None,
        features: str = "auto",
        device: str = "auto",
        trust: bool = False,
    ) -> None:
        self._store, self._trust = store, trust
        if isinstance(ranks, str | Path):
            if features != "auto":
                raise RunError(f"{ranks} is a run and reads the sets that it was trained on; leave --features out")
            self.run, self.device = Run(ranks, trust), pick_device(device)
            self.name, self.title = str(self.run.path), self.run.recipe.name
            return
        self.name, self.title = type(ranks).__name__, "a user-defined model"
        require_methods(ranks)
        if store is None:
            raise RunError(f"{self.name} is a model and needs store=…, whose features it embeds")
        weights = [*ranks.parameters()] if isinstance(ranks, nn.Module) else []
        self.device = weights[0].device if weights and device == "auto" else pick_device(device)
        self.cache = FeatureCache.open(store)
        image, _, text = features.partition(",")
        keys = ("--features IMAGE,TEXT",) * 2
        self.sets = sets_named(self.cache, image.strip(), text.strip() or "auto", keys)
        self._given = ranks
        self.model = cast(Model, CheckedModel(ranks, *fields_there(*self.sets)))

    @cached_property
    def cache(self) -> FeatureCache:
        """The store."""
        assert self.run is not None
        return open_store(self.run, self._store)

    @property
    def on_own_store(self) -> bool:
        """Whether the store is that of a run, perhaps elsewhere; it has the same samples."""
        run = self.run
        return run is not None and (self._store is None or self.cache.manifest_sha256 == run.info.manifest_sha256)

    @cached_property
    def sets(self) -> Sets:
        """The feature sets of the store that are read; RunError where there are none."""
        assert self.run is not None
        return sets_of_run(self.run, self.cache)

    @cached_property
    def model(self) -> Model:
        """What embeds and compares; of a run the head, with the weights of its best epoch."""
        assert self.run is not None
        with within_memory(self.device):
            return self.run.model(self.device)

    def batches(self, split: str | Several[str], **how: Any) -> Batches:
        """Return what the model reads of a split, or of several; `how` and errors as of `stored_batches`."""
        return batches_of(self.sets, self.model, split, self.device, **how)

    def further_views(self, split: str) -> Iterator[Embedding]:
        """Yield the embeddings of a split's images in each of the `views` but the first."""
        for view in range(1, self.views):
            images = self.batches(split, views=(view,)).image_features(BATCH)
            yield embed_all(self.model.embed_images, images)

    def origins(self, branch: BranchName) -> tuple[Origin, ...]:
        """Return what made each feature set of ``image`` or ``text``; RunError where a run has lost a backbone."""
        if self.run is not None:
            return origins_of(self.run, branch)
        return tuple(map(Origin.of, parts_of(self.sets[BRANCHES.index(branch)])))

    @property
    def vocabulary(self) -> Several[str]:
        """The words by which captions are read; none where they are states of a text encoder."""
        return (self.sets[1] if self.run is None else self.run).vocabulary or ()

    def encoders(self, branch: BranchName, weights: str | None = None) -> Encoders:
        """Return the encoder of each feature set of ``image`` or ``text``; see `find_encoders`."""
        origins = self.origins(branch)
        return find_encoders(origins, self.vocabulary, branch, weights, str(self.device), self._trust)

    @property
    def digest(self) -> str:
        """The SHA-256 of the weights, in hexadecimal."""
        return digest_of(self._given) if self.run is None else self.run.weights_digest


class Frozen(Ranker):
    """Frozen encoders, whose global features are compared by cosine."""

    def __init__(self, sets: Sets, device: str) -> None:
        assert isinstance(sets[0].cache, FeatureCache)
        self.device, self.sets, self.cache = pick_device(device), sets, sets[0].cache
        self.model = cosine_model().to(self.device)
        self.name = self.title = f"untrained {sets[0].name} and {sets[1].name}"


def cosine_model() -> Model:
    """Return what compares global features as they are, by cosine."""
    frozen: Any = _AsCached()
    return Model(frozen, frozen, SIMILARITIES["cosine"]()).eval()


class _AsCached(nn.Module):
    """The branch of features that nothing is trained on: their global feature, float32."""

    fields: ClassVar = {"global"}

    def forward(self, features: Features) -> Aggregated:
        """Return the cached global features ``[B, D]``."""
        assert features.global_ is not None, "it is in `fields`"
        return Aggregated(features.global_.float())


def open_frozen(store: str, device: str, features: str = "auto") -> Frozen:
    """Open the image and the caption set of a store whose global features lie in one space.

    `features` is how their names begin, as ``grid@3f,tokens``; ``auto``: any. RunError if there are none, or several;
    CacheError if the store cannot be used.
    """
    cache = FeatureCache.open(store)
    image, _, text = ("" if features == "auto" else features).partition(",")
    images = [cache.image_set(name) for name in cache.set_names("images") if name.startswith(image.strip())]
    captions = [cache.caption_set(name) for name in cache.set_names("captions") if name.startswith(text.strip())]
    pairs = [pair for pair in product(images, captions) if in_one_space(*pair)]
    if len(pairs) > 1:
        named = "; ".join(f"{image_set.name},{caption_set.name}" for image_set, caption_set in pairs)
        raise RunError(
            f"{store} has several image and caption sets in one space: {named}; choose by --features IMAGE,TEXT"
        )
    if not pairs:
        named = "" if features == "auto" else f" whose names begin with {features}"
        raise RunError(
            f"{store} has no image and caption features in one space{named}, which cosine could compare without a head;"
            " extract both towers of one model with `xret extract … --encoder hf:MODEL`, or name a run"
        )
    return Frozen(pairs[0], device)


def is_store(path: str | Path) -> bool:
    """Return whether the path is a feature store; URLs always are."""
    return "://" in str(path) or ((Path(path) / "zarr.json").exists() and not (Path(path) / "run.json").exists())


@dataclass(frozen=True)
class Side:
    """One modality of a split."""

    embedding: Embedding  # of B samples, float32
    uncertainty: Tensor | None  # the log-determinant of each sample's covariance, [B]; None without Gaussians
    length: Tensor  # valid local rows, or tokens, of each sample, int64 [B] on the CPU

    @cached_property
    def elements(self) -> Tensor:
        """Unit elements, ``[B, K, D]``: a vector, a Gaussian's mean and the mean of a sequence's unit rows are one.

        An average of heads has one, too: the means of theirs side by side.
        """
        embedding = self.embedding
        if isinstance(embedding, Joint):
            sides = (replace(self, embedding=part).elements.mean(1) for part in embedding)
            return functional.normalize(torch.cat([*sides], 1), dim=-1)[:, None]
        if isinstance(embedding, Gaussian):
            embedding = embedding.mean
        elif isinstance(embedding, Sequence):
            embedding = mean_rows(functional.normalize(embedding.rows, dim=-1), embedding.length)
        return functional.normalize(embedding if embedding.ndim == 3 else embedding[:, None], dim=-1)


@dataclass(frozen=True)
class Scored:
    """The usable samples of a split as a ranker embeds them, images in their first view, and compares them."""

    ranker: Ranker
    batches: Batches
    image: Side
    text: Side
    split: str
    similarity: Tensor  # [I, C]; larger is closer; empty where there are `pairs`
    caption_image: Tensor  # the image (its row here) of each caption, int64 [C] on the CPU
    ids: list[str]  # of the images, as the store has them
    file_names: list[str]
    cocoid: np.ndarray  # the images' numbers in COCO, int64 [I]; -1 where there is none
    sentid: np.ndarray  # the captions' numbers, int64 [C]
    texts: list[str]
    skipped: int  # samples that could not be read when the features were extracted
    log_circular_variance: float | None  # of the embedding sets; None of vectors
    pairs: Pairs | None = None  # in the place of a matrix that would be too large

    def ranks(self) -> tuple[Ranks, Ranks]:
        """Return `metrics.ranks` of the similarities."""
        if self.pairs is None:
            return ranks(self.similarity, self.caption_image)
        with within_memory(self.similarity.device, *lacking(self.split)):
            return block_ranks(self.pairs.blocks, len(self.ids), self.pairs.caption_image)

    def biased(self, images: Tensor, captions: Tensor) -> "Scored":
        """Return it with something added to the similarities of each of I images and C captions."""
        if self.pairs is not None:
            return replace(self, pairs=replace(self.pairs, biases=(images, captions)))
        biased = self.similarity + images.to(self.similarity)[:, None] + captions.to(self.similarity)
        return replace(self, similarity=biased)

    def deviation(self) -> float:
        """Return the standard deviation of the similarities."""
        return float(self.similarity.double().std(correction=0)) if self.pairs is None else self.pairs.deviation()

    @property
    def model(self) -> Model:
        """The ranker's."""
        return self.ranker.model

    def without_embeddings(self) -> "Scored":
        """Return it with empty sides: those of sequences take more memory than the scores."""
        empty = Side(torch.empty(0), None, torch.empty(0))
        return replace(self, image=empty, text=empty)

    @property
    def is_set(self) -> bool:
        """Whether a sample is several elements."""
        return self.image.elements.shape[1] > 1 or self.text.elements.shape[1] > 1


def embed_split(ranker: Ranker, split: str, *, whole: bool = True) -> Scored:
    """Embed a split and compare its images and captions.

    Similarities are the mean over the ranker's views of an image, whatever an embedding is: the slots of sets may
    change places from view to view, so that a mean of embeddings would blend what does not belong together. Unless
    the `whole` matrix is needed, that of more than `WHOLE` pairs is not made, see `pairs`.

    Raises:
        RunError: a similarity is not finite, the weights are damaged, or memory does not suffice.
        CacheError: the split is unknown, empty or not complete.
    """
    device = ranker.device
    with within_memory(device, *lacking(split)):
        model, batches = ranker.model, ranker.batches(split)
        image = embed_side(model.embed_images, batches.image_features(BATCH))
        text = embed_side(model.embed_captions, batches.caption_features(BATCH))
        texts, rows = batches.texts(), (batches.image_rows, batches.caption_rows)
        (first, last), (begin, end) = ((int(some[0]), int(some[-1]) + 1) for some in rows)
        pairs, similarity = None, torch.empty(0, device=device)
        if whole or batches.images * batches.captions <= WHOLE:
            similarity = compare(model, image.embedding, text.embedding, texts)
            for of_view in ranker.further_views(split):
                similarity += compare(model, of_view, text.embedding, texts)
        else:
            part = Part(model, (image.embedding, *ranker.further_views(split)), text.embedding)
            owner = torch.as_tensor(batches.caption_image, device=device)
            pairs = Pairs((part,), owner, representatives(text.embedding, texts))
        both = [side.embedding for side in (image, text)]
        sets = [side for side in both if isinstance(side, Tensor) and side.ndim == 3 and side.shape[1] > 1]
        return Scored(
            ranker,
            batches,
            image,
            text,
            split,
            similarity=similarity.div_(ranker.views),
            caption_image=torch.as_tensor(batches.caption_image),
            ids=batches.ids(),
            file_names=batches.file_names(),
            cocoid=ranker.cache.sample_array("cocoid", first, last)[batches.image_rows - first],
            sentid=ranker.cache.sentids(begin, end)[batches.caption_rows - begin],
            texts=texts,
            skipped=batches.skipped,
            log_circular_variance=log_circular_variance(*sets) if len(sets) == 2 else None,
            pairs=pairs,
        )


def lacking(split: str) -> tuple[str, str]:
    """Return what `within_memory` says of a split that is too large."""
    return f"what is computed of split '{split}'", "evaluate a smaller split, or where there is more memory"


def embed_side(embed: Callable[[Features], Aggregated], parts: Iterable[Features]) -> Side:
    """Return the samples of all `parts`, embedded by `Model.embed_images` or `Model.embed_captions`."""
    uncertainties, lengths = [], []

    def noted(features: Features) -> Aggregated:
        aggregated = embed(features)
        # That of sets drawn from a Gaussian is the Gaussian's.
        gaussian = aggregated.embedding if isinstance(aggregated.embedding, Gaussian) else aggregated.gaussian
        if gaussian is not None:
            uncertainties.append(gaussian.log_determinant())
        lengths.append(features.rows.cpu())
        return aggregated

    embedding = embed_all(noted, parts)
    return Side(embedding, torch.cat(uncertainties) if uncertainties else None, torch.cat(lengths))


def embed(model: Model, batches: Batches) -> tuple[Embedding, Embedding]:
    """Return the embeddings of a split's images and captions in their order; the model stays in evaluation mode."""
    model.eval()
    images = embed_all(model.embed_images, batches.image_features(BATCH))
    return images, embed_all(model.embed_captions, batches.caption_features(BATCH))


@torch.no_grad()
def embed_all(embed: Callable[[Features], Aggregated], parts: Iterable[Features]) -> Embedding:
    """Return the embeddings of all samples of `parts`, float32, by `Model.embed_images` or `Model.embed_captions`."""
    embeddings = (embed(features).embedding for features in parts)
    return concatenate([each(lambda t: t.float() if t.is_floating_point() else t, part) for part in embeddings])


@torch.no_grad()
def compare(model: Model, images: Embedding, captions: Embedding, texts: Several[str]) -> Tensor:
    """Return the similarity of I images and C captions, ``[I, C]``, computed in blocks; RunError if not all are finite.

    Captions of identical `texts` and embeddings are scored once, so that their ties are exact.
    """
    unique, inverse = torch.unique(representatives(captions, texts), return_inverse=True)
    some = len(unique) < len(texts)
    scored = in_blocks(model.similarity, images, each(lambda t: t[unique], captions) if some else captions)
    if not scored.isfinite().all():
        raise RunError(NOT_FINITE)
    return scored[:, inverse] if some else scored


def representatives(embeddings: Embedding, texts: Several[str]) -> Tensor:
    """Return for each caption the first one with the same text and the same embedding, up to rounding, int64 [C].

    Captions of one text are embedded in different batches, where equal features may give embeddings that differ in the
    last digits. Other features of the same text (another image's, in an end-to-end model) stay apart.
    """
    flat = _flat(embeddings)
    seen: dict[str, int] = {}
    first = torch.tensor([seen.setdefault(text, row) for row, text in enumerate(texts)], device=flat.device)
    close = (flat - flat[first]).norm(dim=1) <= 1e-3 * flat[first].norm(dim=1)
    return torch.where(close, first, torch.arange(len(texts), device=first.device))


def _flat(embeddings: Embedding) -> Tensor:
    """Return all numbers of each sample, ``[B, …]``."""
    if isinstance(embeddings, Joint):
        return torch.cat([*map(_flat, embeddings)], 1)
    if isinstance(embeddings, Sequence):
        return zero_padding(*embeddings).flatten(1)
    return torch.cat([t.flatten(1) for t in tensors_of(embeddings).values()], 1)
