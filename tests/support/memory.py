"""The memory that a call takes at most, measured in a process of its own, where no thread of another test allocates."""

import tracemalloc
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any


def peak_of(function: Callable[..., Any], first: tuple[Any, ...], values: tuple[Any, ...]) -> int:
    """Return the most bytes held at once by Python and NumPy during ``function(*values)``; all of it is pickled.

    ``function(*first)`` is called before, so that what is loaded once counts no more than it stays.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_measure, function, first, values).result()


def _measure(function: Callable[..., Any], first: tuple[Any, ...], values: tuple[Any, ...]) -> int:
    tracemalloc.start()
    function(*first)
    tracemalloc.reset_peak()
    function(*values)
    return tracemalloc.get_traced_memory()[1]
