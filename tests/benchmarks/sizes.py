"""The flag `--small`, with which every benchmark shows in seconds that all of it runs; its figures say nothing."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import click

VOCABULARY = 8481  # words that occur four times in Flickr30K's captions


def small(**sizes: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the flag; with it, `sizes` stand in the place of the options of these names."""

    def add(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(small: bool, **given: Any) -> None:
            command(**(given | sizes if small else given))

        return click.option("--small", is_flag=True, help="Sizes of a moment: figures say nothing.")(run)

    return add
