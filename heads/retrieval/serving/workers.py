"""Threads that compute beside the event loop, with a queue that is bounded."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")


class Busy(Exception):
    """The queue is full."""


class Workers:
    """A few threads; a call that nobody waits for any more is dropped from the queue.

    Args:
        threads: how many.
        most: calls at once, running and waiting.
    """

    def __init__(self, threads: int, most: int) -> None:
        self._pool = ThreadPoolExecutor(threads)
        self._most, self._calls = most, 0

    async def run(self, function: Callable[..., Result], *arguments: object) -> Result:
        """Call a function in a thread; raises `Busy` at once if too many calls wait."""
        if self._calls >= self._most:
            raise Busy
        self._calls += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)
        finally:
            self._calls -= 1

    def stop(self) -> None:
        """Take no more calls; those that run come to their end."""
        self._pool.shutdown(wait=False, cancel_futures=True)
