"""A head with its backbones before it: found again or named, networks that learn, and branches that begin with them.

A backbone is the same network, weights and preprocessing that made a feature set.
"""

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from ....pipeline.data.sources import PictureReader
from ....pipeline.device import on_host, send
from ....pipeline.encoders.base import TrainableEncoder, VisualEncoder
from ....pipeline.encoders.origin import Origin, grid_side
from ....pipeline.encoders.registry import is_own
from ....pipeline.errors import CacheError, EncoderError, SampleError
from ....pipeline.reading.batches import Batch, Batches
from ....pipeline.reading.features import Features
from ....pipeline.reading.pictures import unreadable
from ....pipeline.store import CaptionSet, ImageSet
from ...model import Branch, Model
from ...modules.aggregators import Aggregated
from ...recipes.blocks import Finetune, Recipe
from ..augmentation import drop_rows
from ..objective import Objective

_TOGETHER = 32  # samples that go through a backbone at once where no activations are kept
_PROBED = 4  # images whose features are compared with the cache
_DIFFERENCE = 0.05  # between the features of other files and those of the same; other libraries stay far below


def put_back_images(
    features: ImageSet,
    rows: np.ndarray,
    pictures: PictureReader,
    weights: str | None,
    device: str,
    image_size: int | None,
    trust: bool = False,
) -> TrainableEncoder:
    """Return the encoder that made an image set; some of its usable `rows` are compared with the `pictures` first.

    `weights` says where the encoder's are, if not where they were; `image_size` is another side of the input, pixels.
    EncoderError where these are not the set's weights, or the network does not take images of that size; CacheError
    where the set holds no grid or was imported, or the images are others; SampleError where one cannot be read.
    """
    origin = Origin.of(features)
    if features.kind != "grid" or origin.spec is None or is_own(origin.spec.name) or origin.spec.pool:
        raise CacheError(
            f"the encoder of '{features.name}' in {features.cache.url} cannot be trained: that needs a grid by xret of"
            " torchvision, transformers, timm or open_clip, without --pool; leave its images on the cache with"
            " --reattach text"
        )
    encoder: Any = origin.load_images(weights, device, trust)
    _check_images(encoder, features, rows, pictures)
    side = grid_side(features.identity)
    if image_size is None or image_size == side:
        return cast(TrainableEncoder, encoder)
    try:
        other: Any = origin.load_images(weights, device, trust, image_size=image_size)
        other.network.load_state_dict(encoder.network.state_dict())
    except (EncoderError, RuntimeError) as error:
        what = error if isinstance(error, EncoderError) else f"its weights are for images of {side} pixels"
        raise EncoderError(f"finetune.image_size={image_size} does not suit the backbone: {what}") from error
    return cast(TrainableEncoder, other)


def put_back_captions(features: CaptionSet, weights: str | None, device: str, trust: bool = False) -> TrainableEncoder:
    """Return the encoder that made a caption set; EncoderError for other weights, CacheError for an unfit set."""
    origin = Origin.of(features)
    if features.kind != "tokens" or origin.spec is None or is_own(origin.spec.name):
        raise CacheError(
            f"'{features.name}' in {features.cache.url} holds no states of a text encoder that xret ran, so there is"
            " no backbone to put back; take --reattach image"
        )
    return cast(TrainableEncoder, origin.load_captions(weights, device, trust))


def read_image(encoder: VisualEncoder, pictures: PictureReader, name: str) -> Tensor:
    """Return one image's pixels as the network takes them; a `SampleError` says what to do."""
    try:
        pixels: Tensor = encoder.decode(pictures.open(name))[0]
    except SampleError as error:
        raise unreadable(error) from error
    return pixels


def _check_images(encoder: Any, features: ImageSet, rows: np.ndarray, pictures: PictureReader) -> None:
    for row in rows[np.linspace(0, len(rows) - 1, min(_PROBED, len(rows))).astype(int)]:
        (name,) = features.cache.file_names(row, row + 1)
        pixels = read_image(encoder, pictures, name)
        with torch.inference_mode():
            found = encoder.features(pixels[None])[1].cpu().numpy()[0]
        cached = features.global_(np.array([row]))[0].astype(np.float32)
        if np.linalg.norm(found - cached) > _DIFFERENCE * np.linalg.norm(cached):
            raise CacheError(
                f"{name} has other features than '{features.name}' holds for it, so it is not the file that"
                f" was extracted; give the right --data-root"
            )


class Backbone(nn.Module):
    """The network of an encoder, trainable. Batch norms keep their statistics whatever happens.

    With `checkpointing` no activations are kept for the backward pass: they are computed again, some samples at a time.
    """

    def __init__(self, encoder: TrainableEncoder, checkpointing: bool = False) -> None:
        super().__init__()
        self.encoder = encoder
        self.network = encoder.network.requires_grad_(True)
        self.checkpointing = checkpointing
        self.learns = True  # whether gradients reach it; if not, it gives what the encoder does, without dropout

    def __deepcopy__(self, memo: dict[int, Any]) -> "Backbone":
        """Return a backbone with weights of its own, as a moving average needs; a tokeniser stays the encoder's."""
        encoder = copy.copy(self.encoder)
        for name, value in vars(encoder).items():
            if isinstance(value, nn.Module):
                setattr(encoder, name, copy.deepcopy(value, memo))
        copied = Backbone(encoder, self.checkpointing)
        copied.learns = self.learns
        return copied.train(self.training)

    def train(self, mode: bool = True) -> "Backbone":
        """Switch dropout, where the network has it, on or off."""
        super().train(mode and self.learns)
        for module in self.modules():
            if isinstance(module, _BatchNorm):
                module.eval()
        return self

    def forward(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return local [B,N,C] and global features [B,C] of what the encoder's `features` takes."""
        learns = self.learns and torch.is_grad_enabled()
        if learns and not self.checkpointing:
            return self.encoder.features(*inputs)
        parts = zip(*(tensor.split(_TOGETHER) for tensor in inputs), strict=True)
        if learns:
            made = [checkpoint(self.encoder.features, *part, use_reentrant=False) for part in parts]
        else:
            with torch.no_grad():
                made = [self.encoder.features(*part) for part in parts]
        local, global_ = zip(*made, strict=True)
        return torch.cat(local), torch.cat(global_)


class Reattached(Branch):
    """A head's branch, with which it shares its parts, after its backbone; images come as pixels in `local`.

    `drop` and `varies`: the chance of a row to be left out while training, see `augmentation.drop_rows`.
    """

    def __init__(self, branch: Branch, backbone: Backbone, drop: float, varies: bool = False) -> None:
        super().__init__(branch.adapter, branch.aggregator, branch.residual, branch.twin)
        self.backbone = backbone
        self.drop, self.varies = drop, varies

    @property
    def fields(self) -> set[str]:
        """Nothing is read of the cached features."""
        return set()

    def forward(self, features: Features) -> Aggregated:
        """Return the embeddings of B samples, of pixels [B,3,S,S] or of token ids [B,N]."""
        length = features.length
        if features.token is not None:
            local, global_ = self.backbone(features.token, length)
        else:
            local, global_ = self.backbone(features.local)
            length = send(torch.full_like(on_host(length), local.shape[1]), length.device)
        made = Features(length, local, global_, grid=getattr(self.backbone.encoder, "grid", None))
        return super().forward(drop_rows(made, self.drop, self.varies) if self.training else made)


class EndToEndModel(Model):
    """A trained head with backbones before one branch or both; all weights of the head are shared with it.

    `encoders` are those that are put back, by ``image`` and ``text``, and `backbones` likewise.
    """

    def __init__(self, head: Model, encoders: Mapping[str, TrainableEncoder], recipe: Recipe) -> None:
        tuned, augment = recipe.finetune, recipe.augment
        # What masking leaves out of a caption takes the place of rows that are dropped.
        drops = {"image": augment.image, "text": 0.0 if tuned.mask_words else augment.text}
        backbones = {name: Backbone(encoder, tuned.checkpointing) for name, encoder in encoders.items()}
        branches = {"image": head.image, "text": head.text}
        for name, backbone in backbones.items():
            branches[name] = Reattached(branches[name], backbone, drops[name], name == "image" and augment.image_varies)
        super().__init__(branches["image"], branches["text"], head.compare)
        self.backbones = backbones
        self._head = (head,)  # in a tuple it is no module of this one, whose weights would have two names

    @property
    def head(self) -> Model:
        """The head alone, which shares its weights."""
        return self._head[0]

    def freeze(self, tuned: Finetune, epoch: int) -> None:
        """Let each backbone learn in `epoch`, counted from 0, or not, as the recipe says."""
        for name, backbone in self.backbones.items():
            learns = epoch >= getattr(tuned, f"{name}_frozen")
            if learns != backbone.learns:
                backbone.learns = learns
                backbone.train(self.training)


class EndToEndObjective(Objective):
    """The loss of a recipe with backbones in the loop: some are frozen at first, each drops rows of its own."""

    static = False

    def __init__(self, recipe: Recipe, model: EndToEndModel, losses: nn.ModuleDict, split: Batches) -> None:
        put_back: dict[str, Any] = dict.fromkeys(model.backbones, 0.0)
        super().__init__(replace(recipe, augment=replace(recipe.augment, **put_back)), model, losses, split)
        self.end_to_end = model

    def __call__(self, batch: Batch, now: float) -> Tensor:
        """Return the loss of a batch followed by its terms, as `Objective` does."""
        self.end_to_end.freeze(self.recipe.finetune, int(now))
        return super().__call__(batch, now)
