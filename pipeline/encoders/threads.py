"""How the threads of a process share torch.

To load an encoder draws random numbers, and libraries change torch's defaults for the whole process meanwhile, which
must not reach what is `encoding`.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_turn = threading.Condition(threading.RLock())
_encoding: list[int] = []  # threads that encode on the CPU now


@contextmanager
def alone() -> Iterator[None]:
    """Let no other thread of this process encode."""
    with _turn:
        _turn.wait_for(lambda: not _encoding)
        yield


@contextmanager
def encoding(device: str) -> Iterator[None]:
    """Encode on `device`: alone on a GPU, at the same time as others on a CPU."""
    if not device.startswith("cpu"):
        with alone():
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
