"""The memory that a call takes at most, measured in a process of its own, where no thread of another test allocates."""

import tracemalloc
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any


def peak_of(function: Callable[..., Any], *values: Any) -> int:
    """Return the most bytes held at once by Python and NumPy during ``function(*values)``; all of it is pickled."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_measure, function, values).result()


def _measure(function: Callable[..., Any], values: tuple[Any, ...]) -> int:
    tracemalloc.start()
    function(*values)
    return tracemalloc.get_traced_memory()[1]
