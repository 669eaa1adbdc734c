"""Frozen backbones, one file each. An encoder is loaded once a process and shared by its threads.

Loading traces the network, which patches torch for the whole process while it lasts, and draws random numbers:
`loading` keeps that apart from any other use of a network. `encoding` lets the threads of a process encode: on a GPU
one after the other, on a CPU beside each other with a core each, which is faster than all cores on one batch (1.2 times
for MiniLM on two) and makes the features independent of how many cores there are.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ..data.regions import Regions
from ..errors import EncoderError

if TYPE_CHECKING:
    from .bert import BertEncoder

_turn = threading.Condition(threading.RLock())
_together = {"now": 0, "threads": 0}  # how many encode on the CPU now; torch's threads before they began
REGION_ENCODERS = ("butd", "fasterrcnn_resnet50_fpn_v2")


class VisualEncoder(Protocol):
    """What every image encoder offers.

    Attributes:
        name: the set's name begins with it.
        kind: ``grid``, ``roi`` or ``frames``.
        rows: local rows of an image, N; the most, where they vary.
        channels: width of a row.
        global_channels: width of the global feature.
        extras: which of ``boxes``, ``classes``, ``scores`` it gives.
        identity: what decides the features.
        versions: of the libraries; they do not.
    """

    name: str
    kind: str
    rows: int
    channels: int
    global_channels: int
    extras: tuple[str, ...]
    identity: dict[str, Any]
    versions: dict[str, str]

    def decode(self, path: Any) -> tuple[Any, tuple[int, int]]:
        """Read one image as the network takes it; return it and the image's own (width, height)."""
        ...

    def encode(self, decoded: Any) -> "tuple[np.ndarray, np.ndarray] | list[Regions]":
        """Encode a batch.

        A grid encoder takes a tensor [B,3,S,S] and gives local [B,N,C] and global [B,C], the others take a list
        and give the regions of each image.
        """
        ...


@contextmanager
def loading() -> Iterator[None]:
    """Be alone with torch in this process."""
    with _turn:
        _turn.wait_for(lambda: _together["now"] == 0)
        yield


@contextmanager
def encoding(device: str) -> Iterator[None]:
    """Encode on `device`: alone on a GPU, beside others on a CPU."""
    import torch

    if not device.startswith("cpu"):
        with loading():
            yield
        return
    with _turn:
        if _together["now"] == 0:
            _together["threads"] = torch.get_num_threads()
            torch.set_num_threads(1)
        _together["now"] += 1
    try:
        yield
    finally:
        with _turn:
            _together["now"] -= 1
            if _together["now"] == 0:
                torch.set_num_threads(_together["threads"])
                _turn.notify_all()


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
        frames: an image is a folder of frames, of which so many are taken; None: it is a picture.
        trust: let a file of weights run code while it is read.

    Raises:
        EncoderError: the name is unknown, the weights do not fit, or an option is not for this encoder.
    """
    if regions is not None and name not in REGION_ENCODERS:
        raise EncoderError(f"--regions is for {' and '.join(REGION_ENCODERS)}; '{name}' has a fixed grid, leave it out")
    if frames is not None and name in REGION_ENCODERS:
        raise EncoderError(f"--frames takes the pooled feature of a grid, and '{name}' gives regions; leave it out")
    with loading():
        return _visual(name, weights, image_size, device, regions or (36, 36), frames, trust, _state(weights))


def load_text(
    weights: str, device: str, *, layer: int = -1, special_tokens: bool = True, max_tokens: int | None = None
) -> "BertEncoder":
    """Return the text encoder that a folder or hub id names.

    The same arguments give the same object again, unless files were replaced.

    The words encoder has no weights: `words.WordsEncoder.build` makes it from the training captions.

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


def _state(weights: str) -> tuple[object, ...]:
    """Return what tells that a file, or a file of a folder, was replaced since; nothing for a name that is no path."""
    path = Path(weights)
    try:
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        stats = [(file.name, file.stat()) for file in files if file.is_file()]
    except OSError:
        return ()  # whoever reads them says why they cannot be read
    return tuple((name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


@cache
def _visual(
    name: str,
    weights: str,
    image_size: int,
    device: str,
    regions: tuple[int, int],
    frames: int | None,
    trust: bool,
    _state: tuple[object, ...],
) -> VisualEncoder:
    if name == "butd":
        from .detectors.butd import ButdEncoder

        return ButdEncoder(weights, regions, device, trust)
    if name == "fasterrcnn_resnet50_fpn_v2":
        from .detectors.torchvision_detector import DetectorEncoder

        return DetectorEncoder(weights, regions, device, trust)
    from .grid import GridEncoder

    grid: Any
    if name == "butd-grid":
        from .detectors.butd import ButdGridEncoder

        grid = ButdGridEncoder(weights, image_size, device, trust)
    else:
        grid = GridEncoder(name, weights, image_size, device, trust)
    if frames is None:
        return grid
    from .frames import FramesEncoder

    return FramesEncoder(grid, frames)


@cache
def _text(
    weights: str,
    device: str,
    layer: int,
    special_tokens: bool,
    max_tokens: int | None,
    _state: tuple[object, ...],
) -> "BertEncoder":
    from .bert import BertEncoder

    return BertEncoder(weights, device, layer, special_tokens, max_tokens)
