"""How the threads of a process share its encoders and torch.

Loading traces the network, which patches torch for the whole process while it lasts, and draws random numbers:
`loading` keeps that apart from any other use of a network. `encoding` lets the threads of a process encode: on a GPU
one after the other, on a CPU at the same time, each on one core. That is faster than all cores on one batch (1.2 times
for MiniLM on two), and the features do not depend on the number of cores.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_turn = threading.Condition(threading.RLock())
_together = {"now": 0, "threads": 0}  # how many encode on the CPU now; torch's threads before they began


@contextmanager
def loading() -> Iterator[None]:
    """Be alone with torch in this process."""
    with _turn:
        _turn.wait_for(lambda: _together["now"] == 0)
        yield


@contextmanager
def encoding(device: str) -> Iterator[None]:
    """Encode on `device`: alone on a GPU, at the same time as others on a CPU."""
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
