"""Frozen backbones, one file each. An encoder is loaded once a process and shared by its threads.

Loading traces the network, which patches torch for the whole process while it lasts, and draws random numbers:
`ONE_AT_A_TIME` keeps that apart from any other use of a network.
"""

import threading
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .bert import BertEncoder
    from .grid import GridEncoder

ONE_AT_A_TIME = threading.RLock()


def load_visual(name: str, weights: str, image_size: int, device: str) -> "GridEncoder":
    """Return the image encoder `name`; the same words give the same object again.

    Args:
        name: any torchvision classification network.
        weights: ``imagenet``, a file, or ``random:SEED``.
        image_size: side of the square input, pixels.
        device: ``cpu``, ``cuda`` or ``cuda:N``.

    Raises:
        EncoderError: the name is unknown, the weights do not fit, or the network does not take this size.
    """
    with ONE_AT_A_TIME:
        return _visual(name, weights, image_size, device)


def load_text(weights: str, device: str) -> "BertEncoder":
    """Return the text encoder that a folder or hub id names; the same words give the same object again.

    The words encoder has no weights: `words.WordsEncoder.build` makes it from the training captions.

    Raises:
        EncoderError: there is no such model, or it is incomplete.
    """
    with ONE_AT_A_TIME:
        return _text(weights, device)


@cache
def _visual(name: str, weights: str, image_size: int, device: str) -> "GridEncoder":
    from .grid import GridEncoder

    return GridEncoder(name, weights, image_size, device)


@cache
def _text(weights: str, device: str) -> "BertEncoder":
    from .bert import BertEncoder

    return BertEncoder(weights, device)
