"""``xret serve``: a web page and a JSON endpoint over a run."""

import ipaddress
from contextlib import closing
from typing import Any

import click

from ..pipeline.errors import XretError
from .parsing import FOLDER
from .search import run_options


@click.command()
@click.argument("run")
@run_options
@click.option(
    "--data-root",
    type=FOLDER,
    help="The folder of the images, or the one that the manifest's relative paths start from.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="The address or name to listen at.")
@click.option(
    "--port",
    default=8000,
    show_default=True,
    type=click.IntRange(0, 65535),
    help="The port to listen at; 0 takes any that is free, and prints it.",
)
def serve(run: str, host: str, port: int, **options: Any) -> None:
    """Search with a run in a browser.

    A page to type a sentence or drop a picture, and a JSON endpoint. Only this machine can reach it, unless --host says
    otherwise. Pictures that are sent stay in memory. Ctrl-C or SIGTERM ends it when the answers under way are given.

    \b
    xret serve run --data-root DIR
    curl 'http://127.0.0.1:8000/api/search?q=a+red+square&k=5'
    curl -H 'Content-Type: image/jpeg' --data-binary @photo.jpg \\
        'http://127.0.0.1:8000/api/search?k=5'
    """
    from ..heads.retrieval.retriever import Retriever

    try:
        from ..heads.retrieval.serving.server import serve as serve_forever
    except ModuleNotFoundError as error:
        raise XretError(
            f"the server needs Starlette and uvicorn ({error.name} is not installed): pip install 'xret[serve]'"
        ) from error
    with closing(Retriever(run, **options)) as retriever:
        if not is_loopback(host):
            click.echo(f"anyone who reaches {host} can search and see the pictures: there is no password", err=True)
        click.echo("loading gallery and encoders …", err=True)
        serve_forever(retriever, host=host, port=port, say=lambda address: click.echo(f"{run} is served at {address}"))


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches a server that listens at `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
