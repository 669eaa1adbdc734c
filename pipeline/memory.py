"""How the allocator of this process treats memory that was freed."""

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# Parameters of glibc's mallopt (mallopt(3)): their values while memory is kept, and glibc's own.
_PARAMETERS = {
    -8: (1, 0),  # M_ARENA_MAX: one arena for all threads; 0: by the number of cores
    -4: (0, 65_536),  # M_MMAP_MAX: no block has a mapping of its own
    -1: (2**31 - 1, 128 * 1024),  # M_TRIM_THRESHOLD: free bytes that stay
}


@contextmanager
def keeping_memory() -> Iterator[None]:
    """Keep what the layers of a network free for those that come next; at the end all of it is given back.

    glibc gives large blocks back at each `free`, and takes them anew as pages of zeros: on a CPU a convolutional
    network spends up to half of its time on that. Threads that are there already keep their arenas, so begin early.
    Nothing happens where there is no glibc.
    """
    libc: Any = ctypes.CDLL(None) if sys.platform == "linux" else None
    if not hasattr(libc, "mallopt") or not hasattr(libc, "malloc_trim"):  # musl has neither
        yield
        return
    for parameter, (kept, _) in _PARAMETERS.items():
        libc.mallopt(parameter, kept)
    try:
        yield
    finally:
        for parameter, (_, usual) in _PARAMETERS.items():
            libc.mallopt(parameter, usual)
        libc.malloc_trim(0)
