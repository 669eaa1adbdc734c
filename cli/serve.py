"""``xret serve``: a web page and its API over a run."""

import os
import re
import signal
import tempfile
from contextlib import suppress
from typing import Any

import click

from ..pipeline.errors import XretError
from .parsing import RUN_OR_ID, data_root_option
from .search import run_options


def _token(_ctx: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
    if value is not None and not re.fullmatch("[!-~]+", value):
        raise click.BadParameter("it must be letters and digits, such as `openssl rand -hex 16` prints")
    return value


def _root_path(_ctx: click.Context, _parameter: click.Parameter, value: str) -> str:
    if value and not re.fullmatch(r"(/[\w.~-]+)+/?", value):
        raise click.BadParameter(f"'{value}' is no path such as /photos")
    return value.rstrip("/")


@click.command()
@click.argument("run", type=RUN_OR_ID)
@run_options
@data_root_option
@click.option("--host", default="127.0.0.1", help="The address or name to listen at.")
@click.option(
    "--port", type=click.IntRange(1, 65535), show_default="the first free from 7860", help="The port to listen at."
)
@click.option(
    "--token",
    default=lambda: os.environ.get("XRET_TOKEN"),
    show_default="the environment variable XRET_TOKEN",
    callback=_token,
    help="What each request has to bring: 'Authorization: Bearer TOKEN', or TOKEN as the password that a browser asks.",
)
@click.option("--root-path", default="", callback=_root_path, help="The path under which a proxy offers it.")
def serve(run: str, host: str, port: int | None, token: str | None, root_path: str, **options: Any) -> None:
    """Search with a run in a browser, or from programs.

    Opens a page to type a sentence or drop a picture; its footer describes the page's API. POST /search takes JSON,
    POST /search/picture a picture, and GET /health says that it runs. Only this machine can reach it, unless --host
    says otherwise. Ctrl-C or SIGTERM ends it as soon as running requests are answered, and removes the pictures that
    were sent.

    \b
    xret serve run --data-root DIR
    xret serve run --images holiday
    XRET_TOKEN=SECRET xret serve run --host 0.0.0.0 --root-path /photos
    """
    # OpenMP reads this as torch is imported: threads that spin after an operation would keep all others from a core.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from ..heads.retrieval.retriever import Retriever

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="xret-serve-") as scratch, suppress(KeyboardInterrupt):
        os.environ |= {"GRADIO_TEMP_DIR": scratch, "GRADIO_ANALYTICS_ENABLED": "False"}
        try:
            from ..heads.retrieval.serve import serve as start
        except ImportError as error:  # also where a proxy needs a package
            lacks = f"needs {error.name}, which is not installed: pip install 'xret[serve]'"
            raise XretError(f"the server {lacks if error.name else f'cannot start: {error}'}") from error

        def say(address: str) -> None:
            click.echo(f"{run} is served at {address}")

        start(Retriever(run, **options), host, port, say, token=token, root_path=root_path)
