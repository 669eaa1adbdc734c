"""Which class makes an encoder. An encoder is loaded once a process and shared by its threads."""

from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from ..errors import EncoderError
from .base import TextEncoder, VisualEncoder
from .threads import loading

# By name: the module, the class, and what the size of its input is; any other name is a network of torchvision's.
_VISUAL = {
    "butd": ("detectors.butd", "ButdEncoder", "regions"),
    "butd-grid": ("detectors.butd", "ButdGridEncoder", "pixels"),
    "fasterrcnn_resnet50_fpn_v2": ("detectors.torchvision_detector", "DetectorEncoder", "regions"),
}
REGION_ENCODERS = tuple(name for name, (_, _, size) in _VISUAL.items() if size == "regions")


def load_visual(
    name: str,
    weights: str,
    image_size: int,
    device: str,
    *,
    regions: tuple[int, int] | None = None,
    frames: int | None = None,
    trust: bool = False,
) -> VisualEncoder:
    """Return the image encoder `name`; the same arguments give the same object again, unless files were replaced.

    Args:
        name: any torchvision classification network, ``butd``, ``butd-grid`` or ``fasterrcnn_resnet50_fpn_v2``.
        weights: ``imagenet``, a file, or ``random:SEED``.
        image_size: side of the square input, pixels; regions have sizes of their own.
        device: ``cpu``, ``cuda`` or ``cuda:N``.
        regions: fewest and most boxes of an image, for region encoders; None: 36.
        frames: an image is a folder of frames, of which this many are taken; None: it is a picture.
        trust: let a file of weights run code while it is read.

    Raises:
        EncoderError: the name is unknown, the weights do not fit, or an option is not for this encoder.
    """
    if regions is not None and name not in REGION_ENCODERS:
        raise EncoderError(f"--regions is for {' and '.join(REGION_ENCODERS)}; '{name}' has a fixed grid, leave it out")
    if frames is not None and name in REGION_ENCODERS:
        raise EncoderError(f"--frames takes the pooled feature of a grid, and '{name}' gives regions; leave it out")
    size = (regions or (36, 36)) if name in REGION_ENCODERS else image_size
    with loading():
        return _visual(name, weights, size, device, frames, trust, _state(weights))


def load_text(
    weights: str, device: str, *, layer: int = -1, special_tokens: bool = True, max_tokens: int | None = None
) -> TextEncoder:
    """Return the text encoder that a folder or hub id names.

    The same arguments give the same object again, unless files were replaced. The words encoder has no weights:
    `words.WordsEncoder.build` makes it from the training captions.

    Args:
        weights: hub id or folder.
        device: ``cpu``, ``cuda`` or ``cuda:N``.
        layer: which hidden states; 0 are the embeddings, -1 the last.
        special_tokens: keep the states of the special tokens.
        max_tokens: tokens of a caption that are encoded; None: what the model takes.

    Raises:
        EncoderError: there is no such model, it is incomplete, or an option does not fit it.
    """
    with loading():
        return _text(weights, device, layer, special_tokens, max_tokens, _state(weights))


def make_visual(name: str, weights: str, size: int | tuple[int, int], device: str, trust: bool = False) -> Any:
    """Return a new image encoder that is not shared; the caller is alone with torch (`threads.loading`).

    Args:
        name, weights, device, trust: as for `load_visual`.
        size: side of the square input, pixels; of a region encoder the fewest and most boxes.

    Raises:
        EncoderError: as for `load_visual`.
    """
    if name not in _VISUAL:
        from .grid import GridEncoder

        return GridEncoder(name, weights, size, device, trust)  # type: ignore[arg-type]
    module, encoder, _ = _VISUAL[name]
    return getattr(import_module(f".{module}", __package__), encoder)(weights, size, device, trust)


@cache
def _visual(name: str, weights: str, size: Any, device: str, frames: int | None, trust: bool, _state: Any) -> Any:
    encoder = make_visual(name, weights, size, device, trust)
    if frames is None:
        return encoder
    from .frames import FramesEncoder

    return FramesEncoder(encoder, frames)


@cache
def _text(weights: str, device: str, layer: int, special_tokens: bool, max_tokens: int | None, _state: Any) -> Any:
    from .bert import BertEncoder

    return BertEncoder(weights, device, layer, special_tokens, max_tokens)


def _state(weights: str) -> tuple[object, ...]:
    """Return what changes when a file, or a file of a folder, is replaced; nothing for a name that is not a path."""
    path = Path(weights)
    try:
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        stats = [(file.name, file.stat()) for file in files if file.is_file()]
    except OSError:
        return ()  # reading them will say why they cannot be read
    return tuple((name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in stats)
