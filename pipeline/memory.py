"""How the allocator of this process treats memory that was freed."""

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -3, -4, -8  # of mallopt(3)
_KEEPING = {
    _M_ARENA_MAX: 1,  # one arena for all threads
    _M_MMAP_MAX: 0,  # no block has a mapping of its own
    _M_TRIM_THRESHOLD: -1,  # nothing is given back in between
}
# Whoever sets a threshold ends its growth; it would have grown to these.
_AFTERWARDS = {_M_MMAP_MAX: 65_536, _M_MMAP_THRESHOLD: 32 << 20, _M_TRIM_THRESHOLD: 64 << 20}


@contextmanager
def keeping_memory() -> Iterator[None]:
    """Keep what the layers of a network free for those that come next; at the end all of it is given back.

    glibc gives large blocks back at each `free`, and takes them anew as pages of zeros: on a CPU a convolutional
    network spends up to half of its time on that, a training step of large batches up to a quarter. Threads that are
    there already keep their arenas, so begin early. glibc counts its arenas but once, so that later threads share the
    one. Nothing happens where there is no glibc.
    """
    libc: Any = ctypes.CDLL(None) if sys.platform == "linux" else None
    if not hasattr(libc, "mallopt") or not hasattr(libc, "malloc_trim"):  # musl has neither
        yield
        return
    for parameter, value in _KEEPING.items():
        libc.mallopt(parameter, value)
    try:
        yield
    finally:
        for parameter, value in _AFTERWARDS.items():
            libc.mallopt(parameter, value)
        libc.malloc_trim(0)
