"""What benchmarks share: clock, lines, and the flag `--small`, with which each shows in seconds that all of it runs."""

import json
import time
from collections.abc import Callable
from functools import wraps
from typing import Any

import click

VOCABULARY = 8481  # words that occur four times in Flickr30K's captions


def small(**sizes: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the flag; with it, figures say nothing, and `sizes` stand in the place of options and defaults."""

    def add(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(small: bool, **given: Any) -> None:
            command(**(given | sizes if small else given))

        return click.option("--small", is_flag=True, help="Sizes of a moment: figures say nothing.")(run)

    return add


def say(**found: object) -> None:
    """Print one JSON line."""
    click.echo(json.dumps(found))


def seconds_of(work: Callable[[], object]) -> float:
    """Run once and return how long it took by the clock."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
