"""A disk that is full, as a limit to how large files may grow."""

import resource
from contextlib import contextmanager


def limit_files(size):
    """Let no file of this process grow above `size` bytes; return the limit before."""
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))
    return before


@contextmanager
def small_disk(size):
    """Do so within a block."""
    before = limit_files(size)
    try:
        yield
    finally:
        limit_files(before)
