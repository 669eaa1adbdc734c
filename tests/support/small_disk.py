"""A disk that is full, as a limit to how large files may grow."""

import resource
from contextlib import contextmanager


@contextmanager
def small_disk(size):
    """Let no file grow above `size` bytes, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
