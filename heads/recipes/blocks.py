"""What a resolved recipe holds: its blocks, with the default of every value that belongs to no part."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from keyword import iskeyword
from typing import Annotated, Any, ClassVar, Literal, get_type_hints

from ..modules.parts import Count, Epochs, Factor, Positive, Share, Width, at_least, between
from ..modules.residual import Base
from .schema import Conditions, SetNames, flat, used

Block = Mapping[str, Any]  # of a part, with its name or its weight
Decay = Annotated[float, between(0, 0.99999)]
Role = Literal["learnt", "finetuned", "read", "rounded", "computed", "described"]
# What a key decides, by the key or by its first part: what a head learns, unless it stands here.
ROLES: dict[str, Role] = {
    **dict.fromkeys(("name", "paper", "reaches", "expected"), "described"),
    # Which feature sets; what they are is compared by their names.
    **dict.fromkeys(("data.image", "data.text", "data.image_kind", "data.text_kind"), "read"),
    "finetune": "finetuned",
    "runtime.precision": "rounded",
    "runtime": "computed",
}


def role(key: str) -> Role:
    """Return what a dotted key decides."""
    return ROLES.get(key) or ROLES.get(key.partition(".")[0], "learnt")


@dataclass(frozen=True, kw_only=True)
class Data:
    """Which feature sets are read, and how samples are put into batches."""

    used_with: ClassVar[Conditions] = {"captions": ("unit", ("image",))}
    image: SetNames = "auto"  # prefix of a feature set's name, or auto: the only one there; a list: several together
    text: SetNames = "auto"
    image_kind: SetNames | None = None  # refuse features of other kinds; null: take any. A run has those of its own
    text_kind: SetNames | None = None
    views: Literal["draw", "first"] = "draw"  # of images cached in several: one is drawn every epoch, or the first
    unit: Literal["image", "caption"] = "image"  # image: a batch holds images with all their captions
    batch_size: Annotated[int, at_least(2)] = 128  # in units
    captions: Count | None = None  # unit image: this many of each image, drawn every epoch; null: all
    share: Annotated[float, between(1e-6, 1)] = 1.0  # of the training images that it learns from, always the same ones
    chunk: Count | None = None  # units embedded at once, with the gradients of the batch; null: all

    def kinds(self, side: str) -> list[str]:
        """Return the kinds of features that ``image`` or ``text`` admits; none: any."""
        kinds: SetNames | None = getattr(self, f"{side}_kind")
        return [kinds] if isinstance(kinds, str) else kinds or []


@dataclass(frozen=True, kw_only=True)
class Size:
    """What the embedding is."""

    dim: Width = 1024  # its width, before a residual
    # What it is added to. frozen: global features, of encoders that lie in one space; cca, procrustes: linear maps of
    # global features or means of rows, in closed form, validated.
    residual: Base = "none"


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """An optimiser of torch, and gradient clipping."""

    used_with: ClassVar[Conditions] = {
        "beta1": ("name", ("adamw", "adam")),
        "beta2": ("name", ("adamw", "adam")),
        "momentum": ("name", ("sgd",)),
    }
    name: Literal["adamw", "adam", "sgd"] = "adamw"
    lr: Factor = 1e-3
    beta1: Decay = 0.9  # adamw and adam: of the mean of the gradients, a step
    beta2: Decay = 0.999  # of the mean of their squares
    momentum: Decay = 0.9  # sgd
    weight_decay: Factor = 0.0
    # Of which weights; matrices: of no bias, normalisation or scale; sides: of none of a loss or the similarity.
    decay: Literal["matrices", "sides", "all"] = "matrices"
    clip: Positive | None = 2.0  # largest norm of the whole gradient
    ema: Decay | None = None  # decay a step of the weights' moving average, which is then evaluated
    swa_epochs: Epochs = 0  # the mean of the weights at the ends of this many last epochs is evaluated
    # Times lr, for the weights of each component:
    image_adapter_lr: Factor = 1.0
    text_adapter_lr: Factor = 1.0
    aggregator_lr: Factor = 1.0
    loss_lr: Factor = 1.0  # and of the similarity


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The learning rate."""

    used_with: ClassVar[Conditions] = {
        "by": ("name", ("cosine", "linear")),
        "step": ("name", ("step",)),
        "gamma": ("name", ("step",)),
    }
    name: Literal["cosine", "linear", "step", "constant"] = "cosine"  # cosine, linear: from lr to 0 over all epochs
    by: Literal["epoch", "step"] = "epoch"  # how often these fall; a warm-up rises step by step in either case
    epochs: Epochs = 30  # 0: only with a residual, whose base alone is then the model
    step: Count = 10  # epochs; step only: after each of them …
    gamma: Factor = 0.1  # … lr is multiplied by this
    warmup_epochs: Factor = 0.0  # over this many epochs, or this part of one, lr rises linearly from 0, step by step, …
    warmup_after: Epochs = 0  # … which begin after this many
    patience: Count | None = None  # stop after this many epochs without a better validation RSUM


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """What is changed of whole samples while training."""

    image: Share = 0.0  # the chance of a row to be left out (size augmentation, VSE-infinity)
    image_varies: bool = False  # that chance is drawn for each image, up to `image`
    text: Share = 0.0
    mask_words: Share = 0.0  # share of a caption's words to mask, replace or drop, as finetune.mask_words does
    mix: Factor = 0.0  # alpha of FuseMix, which blends pairs of samples; 0: none


@dataclass(frozen=True, kw_only=True)
class Finetune:
    """How the backbones are trained when they are put back.

    `image_lr` and `text_lr` of 0 leave one on the cache, unless `xret finetune --reattach` names it.
    """

    image_lr: Factor = 0.0  # times lr
    text_lr: Factor = 0.0  # times lr
    image_frozen: Epochs = 0  # epochs, counted from the head's first, in which it does not learn
    text_frozen: Epochs = 0
    image_size: Annotated[int, between(32, 2048)] | None = None  # pixels a side; null: that of the cache
    crop_and_flip: Literal["none", "sides", "area", "large-area"] = "none"  # kind of random crops, beside flips
    mask_words: Share = 0.0  # share of a caption's words to mask, replace or drop
    checkpointing: bool = False  # compute the backbones' activations again backwards: less memory, a third more time


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """How it is computed. `auto` precision: bfloat16 (or float16) on a GPU, float32 on a CPU."""

    precision: Literal["auto", "float32", "tf32", "bfloat16", "float16"] = "auto"
    cache: Literal["auto", "memory", "stream"] = "auto"  # where the features lie while training
    checkpoint_steps: Count | None = None  # between two checkpoints; null: an epoch
    capture: Literal["auto", "off"] = "auto"  # steps as CUDA graphs, where the device is a GPU
    log: Literal["none", "tensorboard", "wandb"] = "none"  # beside metrics.jsonl


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A resolved recipe: every block is complete, every value has been checked.

    `adapter` has a block for each kind of feature set that `data` admits. `loss` has one for each term that is
    computed, and `same_text`. `expected` is the RSUM of the paper's rows that it has. `runtime` is an argument of the
    training that reads it, of which a recipe writes down the precision alone.
    """

    name: str
    paper: str
    reaches: Literal["cache", "finetune"]  # can the paper's row come from frozen features?
    expected: dict[str, float]
    data: Data
    model: Size
    adapter: dict[str, dict[str, Any]]
    aggregator: dict[str, dict[str, Any]]
    similarity: dict[str, Any]
    loss: dict[str, Any]
    optimizer: Optimizer
    schedule: Schedule
    augment: Augmentation
    finetune: Finetune
    runtime: Runtime
    code: dict[str, str] = field(default_factory=dict)  # of parts of one's own: SHA-256 of each module's file …
    sources: dict[str, str] = field(default_factory=dict)  # … and where it is here, see `own`; not written down
    conditions: Conditions = field(default_factory=dict)  # of keys that do not always count; not written down

    @property
    def terms(self) -> dict[str, dict[str, Any]]:
        """The blocks of the loss terms."""
        return {term: block for term, block in self.loss.items() if isinstance(block, dict)}

    def to_dict(self) -> dict[str, Any]:
        """Return all that counts of the recipe as plain nested values, fit for YAML and JSON."""
        values = {key: value for key, value in asdict(self).items() if key not in ("sources", "conditions")}
        values["runtime"] = {"precision": self.runtime.precision}  # which a paper may ask for
        for key, counts in (
            ("finetune", self.finetune.image_lr or self.finetune.text_lr),
            ("runtime", self.runtime.precision != "auto"),
            ("code", self.code),
        ):
            if not counts:
                del values[key]
        return used(values, self.conditions)

    def flat(self) -> dict[str, Any]:
        """Return all that counts by dotted keys, those of `runtime` included."""
        return flat({**self.to_dict(), "runtime": asdict(self.runtime)})


SECTIONS: dict[str, type[Any]] = {
    name: kind for name, kind in get_type_hints(Recipe).items() if isinstance(kind, type) and is_dataclass(kind)
}


def arguments(block: Block) -> dict[str, Any]:
    """Return a part's block as keyword arguments of its constructor (``global`` becomes ``global_``)."""
    no_parameter = "name" if "name" in block else "weight"  # a loss is named by the key of its block
    return {f"{key}_" if iskeyword(key) else key: value for key, value in block.items() if key != no_parameter}
