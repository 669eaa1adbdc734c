"""How this process treats memory that was freed; a library leaves that to its host."""

import ctypes
import sys
from typing import Any

_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8  # of mallopt(3)


def keep_freed_memory() -> None:
    """Keep what is freed for what comes next, in one arena for all threads.

    glibc gives large blocks back at each `free`, and takes new pages of zeros: on a CPU a convolutional
    network spends up to half of its time on that, a training step of large batches up to a quarter. Nothing happens
    where there is no glibc.
    """
    libc: Any = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_ARENA_MAX, 1)
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, -1)
