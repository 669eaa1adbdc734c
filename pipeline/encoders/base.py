"""The contract that every encoder keeps, whichever library it comes from."""

from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from ..errors import EncoderError
from ..store.regions import REGION_ARRAYS, Regions
from .spec import EncoderSpec

if TYPE_CHECKING:
    from torch import Tensor, nn


class Encoder(Protocol):
    """What every encoder has."""

    name: str  # the set's name begins with it; letters, digits, ``.``, ``_`` and ``-``
    kind: str  # of the features: ``grid``, ``roi`` or ``frames`` of images, ``tokens`` or ``words`` of captions
    identity: dict[str, Any]  # what decides the features; JSON
    versions: dict[str, str]  # of the libraries; they do not decide the features
    # Global features of images and captions of the same space are compared by their cosine, as CLIP's are; None: no
    # other encoder shares it.
    space: str | None = None
    spec: EncoderSpec  # loads it again, from any folder; `load_visual` and `load_text` set it


class VisualEncoder(Encoder, Protocol):
    """What every image encoder offers."""

    rows: int  # local rows of an image, N; the most, where they vary
    grid: tuple[int, int] | None = None  # of kind ``grid``: height and width, in cells, that the rows fill row by row
    channels: int  # width of a row, C
    global_channels: int  # width of the global feature
    extras: tuple[str, ...] = ()  # which of ``boxes``, ``classes``, ``scores`` it gives

    def decode(self, picture: Any) -> tuple[Any, tuple[int, int]]:
        """Read one image as the network takes it; return it and the image's own (width, height).

        A picture is a `data.images.PictureFile` or a path, also of a folder of frames. Raises `SampleError` for one
        that cannot be read, or is far too long and narrow.
        """

    def encode(self, decoded: Any) -> tuple[np.ndarray, np.ndarray] | list[Regions]:
        """Encode a batch.

        A grid encoder takes a tensor [B,3,H,W] and gives float32 local [B,N,C] and global features [B,D]. The others
        take a list and give the regions of each image.
        """


class TextEncoder(Encoder, Protocol):
    """What every caption encoder offers."""

    vocabulary: tuple[str, ...] | None = None  # the training captions' words by token id; None: the model has its own
    channels: int | None  # width of a token's state, C; None where there are only ids
    global_channels: int | None  # width of the global feature; None where there are only ids

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each caption, at least one."""

    def count_truncated(self, texts: Sequence[str]) -> int:
        """Return how many captions `tokenize` cuts short."""

    def encode(self, ids: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray] | None:
        """Encode tokenised captions; None where there are only ids.

        Returns the states of the tokens, caption after caption without padding, float32 [sum of lengths, C], and the
        global features [B,D].
        """


class TrainableEncoder(Encoder, Protocol):
    """What an encoder offers besides where its network can be trained."""

    network: "nn.Module"  # what is trained; it comes frozen, in evaluation mode
    suffix: ClassVar[str]  # of what `save` writes: ``.safetensors``, a file, or none, a folder

    @property
    def features(self) -> "Callable[..., tuple[Tensor, Tensor]]":
        """Takes pixels, or token ids and lengths, to local [B,N,C] and global features [B,C] on the device."""

    def weights_id(self) -> str:
        """Return the weights' entry in the identity of an encoder that reads what `save` writes now."""

    def save(self, path: Path) -> None:
        """Write the weights so that an `EncoderSpec` can name them: a file, or a folder."""


def turns_upright(identity: dict[str, Any]) -> bool:
    """Return whether an encoder of this identity applies EXIF orientations; what made imported sets may not."""
    preprocessing = identity.get("preprocessing")
    return isinstance(preprocessing, dict) and preprocessing.get("orientation") == "exif"


def encode_layers(encoders: Sequence[Any], batch: Any) -> list[Any]:
    """Return what each encoder's `encode` gives, as tensors on its device; regions are on the host.

    Encoders of several layers of a network share one pass through it. EncoderError: see `require_declared`.
    """
    import torch

    first = encoders[0]
    if hasattr(first, "encode_layers"):
        found: list[Any] = first.encode_layers(batch, encoders)
    else:
        encoded = first.encode(batch)
        if encoded is None:
            raise EncoderError(f"'{first.name}' declares features and its encode returns None; correct the encoder")
        if not isinstance(encoded, list):
            encoded = tuple(torch.from_numpy(np.require(one, np.float32, ["C", "W"])) for one in encoded)
        found = [encoded]
    for encoder, encoded in zip(encoders, found, strict=True):
        require_declared(encoder, batch, encoded)
    return found


def require_declared(encoder: Any, batch: Any, encoded: Any) -> None:
    """Raise EncoderError where the features of a batch have other shapes than their encoder declares."""
    shapes: list[tuple[str, Any, tuple[int, ...]]] = []  # of what, found and declared
    count = len(batch)
    if isinstance(encoded, list):
        shapes = [("regions", (len(encoded),), (count,))]
        for one in encoded:
            rows = min(max(len(one.local), 1), encoder.rows)
            shapes += [("local", np.shape(one.local), (rows, encoder.channels))]
            shapes += [(key, np.shape(getattr(one, key)), (rows, *REGION_ARRAYS[key][0])) for key in encoder.extras]
    else:
        samples = (count, encoder.views) if hasattr(encoder, "views") else (count,)
        rows = (*samples, encoder.rows) if hasattr(encoder, "rows") else (sum(map(len, batch)),)  # or tokens
        shapes = [
            ("local", tuple(encoded[0].shape), (*rows, encoder.channels)),
            ("global", tuple(encoded[1].shape), (*samples, encoder.global_channels)),
        ]
    for what, found, declared in shapes:
        if found != declared:
            name = encoder.identity.get("encoder", encoder.name)
            raise EncoderError(
                f"'{name}' gives {what} features of shape {found} and declares {declared}; correct the encoder"
            )


def in_passes(layers: Iterable[int], normed: int | None) -> list[list[int]]:
    """Return the layers, ascending, of each pass of a library that gives the norm to all maps of a pass or to none.

    `normed` is the layer that takes it; None: none does.
    """
    return [one for one in (sorted({*layers} - {normed}), [one for one in {*layers} if one == normed]) if one]


def choose_layer(what: str, layer: int, count: int) -> int:
    """Return a layer's number from 0, of `count`; numbers below 0 count from the last."""
    if not -count <= layer < count:
        raise EncoderError(
            f"{what} has no layer {layer}; choose one from 0 to {count - 1}, or from -1, the last, down to -{count}"
        )
    return layer % count


def require_cut(what: str, cuts: bool) -> None:
    """Raise EncoderError if ``whole`` changes nothing: `what` neither cuts something off nor pads pictures."""
    if not cuts:
        raise EncoderError(f"{what} takes whole pictures by itself; leave --whole out")


def load_library(module: str, extra: str) -> Any:
    """Return a library's module; EncoderError where it is not installed, which names the extra that installs it."""
    try:
        return import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        raise EncoderError(f"{name} is not installed ({error}): pip install 'xret[{extra}]'") from error


def library_versions(*modules: str) -> dict[str, str]:
    """Return the versions of imported libraries, which are recorded with the features."""
    return {"pillow" if name == "PIL" else name: str(import_module(name).__version__) for name in modules}
