"""How the threads of a process share torch.

To load an encoder draws random numbers, and libraries change torch's defaults for the whole process meanwhile;
`loading` keeps that apart from all `encoding`.
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
    with _turn:
        _encoding.append(threading.get_ident())
    try:
        yield
    finally:
        with _turn:
            _encoding.pop()
            _turn.notify_all()
