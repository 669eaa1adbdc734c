"""How the threads of a process share its encoders and torch.

Loading traces the network, which patches torch for the whole process while it lasts, and draws random numbers:
`loading` keeps that apart from any other use of a network. `Loaded` keeps the networks that were used last and gives
one that is there at once: a task that begins does not wait for the batches of others. `encoding` lets the threads of a
process encode: on a GPU one after the other, on a CPU at the same time, each on one core. That is faster than all cores
on one batch (1.2 times for MiniLM on two), and the features do not depend on the number of cores.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

Encoder = TypeVar("Encoder")

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


class Loaded(Generic[Encoder]):
    """The encoders that were used last.

    Args:
        most: how many stay when nobody has them.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._by_key: OrderedDict[Hashable, Encoder] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], Encoder]) -> Encoder:
        """Return the encoder of `key`, made by `make` while no other thread uses a network if it is not there."""
        if (found := self._find(key)) is not None:
            return found
        with loading():
            if (found := self._find(key)) is None:  # another thread may have made it meanwhile
                found = make()
                with self._lock:
                    self._by_key[key] = found
                    while len(self._by_key) > self._most:
                        self._by_key.popitem(last=False)
            return found

    def _find(self, key: Hashable) -> Encoder | None:
        with self._lock:
            if key in self._by_key:
                self._by_key.move_to_end(key)
            return self._by_key.get(key)
