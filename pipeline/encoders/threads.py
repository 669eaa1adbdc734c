"""How the threads of a process share torch.

Loading traces the network, which patches torch for the whole process while it lasts, and draws random numbers:
`loading` keeps that apart from any other use of a network. `encoding` lets the threads of a process encode: on a GPU
one after the other, on a CPU at the same time.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_turn = threading.Condition(threading.RLock())
_encoding: list[int] = []  # threads that encode on the CPU now


@contextmanager
def loading() -> Iterator[None]:
    """Be alone with torch in this process; afterwards its random numbers go on as if none had been drawn."""
    import torch

    with _alone(), torch.random.fork_rng(devices=[]):
        yield


@contextmanager
def _alone() -> Iterator[None]:
    with _turn:
        _turn.wait_for(lambda: not _encoding)
        yield


@contextmanager
def encoding(device: str) -> Iterator[None]:
    """Encode on `device`: alone on a GPU, at the same time as others on a CPU."""
    if not device.startswith("cpu"):
        with _alone():
            yield
        return
    me = threading.get_ident()
    with _turn:
        _encoding.append(me)
    try:
        yield
    finally:
        with _turn:
            _encoding.remove(me)
            _turn.notify_all()
