"""``xret serve``: a web page and its API over a run."""

import os
import signal
import tempfile
from contextlib import suppress
from typing import Any

import click

from ..pipeline.errors import XretError
from .parsing import RUN_OR_ID, data_root_option
from .search import run_options


@click.command()
@click.argument("run", type=RUN_OR_ID)
@run_options
@data_root_option
@click.option("--host", default="127.0.0.1", help="The address or name to listen at.")
@click.option(
    "--port", type=click.IntRange(1, 65535), show_default="the first free from 7860", help="The port to listen at."
)
def serve(run: str, host: str, port: int | None, **options: Any) -> None:
    """Search with a run in a browser.

    Opens a page to type a sentence or drop a picture; its footer describes the API. Only this machine can reach it,
    unless --host says otherwise; there is no password. Ctrl-C ends it and removes the pictures that were sent.

    \b
    xret serve run --data-root DIR
    xret serve run --images holiday
    """
    from ..heads.retrieval.retriever import Retriever

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="xret-serve-") as scratch, suppress(KeyboardInterrupt):
        os.environ |= {"GRADIO_TEMP_DIR": scratch, "GRADIO_ANALYTICS_ENABLED": "False"}
        try:
            from ..heads.retrieval.serve import serve as start
        except ImportError as error:  # also where a proxy needs a package
            lacks = f"needs {error.name}, which is not installed: pip install 'xret[serve]'"
            raise XretError(f"the server {lacks if error.name else f'cannot start: {error}'}") from error
        start(Retriever(run, **options), host, port, lambda address: click.echo(f"{run} is served at {address}"))
