"""A page in the browser and its API over a run: a text or a picture in, a gallery of answers out (Gradio)."""

import logging
from pathlib import Path
from typing import Any

import gradio
from PIL import Image

from ...pipeline.data.images import thumbnail
from ...pipeline.errors import SampleError, XretError
from ..modules.similarity import SIMILARITIES
from .gallery import Gallery
from .hits import Hit
from .retriever import Retriever

MOST_RESULTS, QUERY_LENGTH, SIDE = 100, 1000, 600  # SIDE: of a picture on the page, pixels at most
UPLOAD, QUEUE = "16mb", 64  # bytes of a picture that is sent, and searches that may wait
EXAMPLES, EXAMPLE_LENGTH = 5, 80  # captions that the page offers as queries, and their characters at most
log = logging.getLogger("xret")


class Service:
    """A retriever as the page asks it. Making it loads gallery and model, so that no query waits for them.

    Args:
        retriever: searches; XretError where it cannot.
    """

    def __init__(self, retriever: Retriever) -> None:
        self.retriever, self.searched = retriever, retriever.searched
        self._row = {id_: row for row, id_ in enumerate(self.searched.names("images")[0])}
        if isinstance(self.searched, Gallery):
            rows = self.searched.caption_image.tolist()
            self._caption_row: dict[str, int] = dict(zip(self.searched.caption_ids, rows, strict=True))
        self.searched.of("images")
        try:
            self.searched.picture(0)
        except XretError as error:
            log.warning("no pictures will be shown: %s", error)

    def search_text(self, text: str, k: int = 10) -> tuple[list[tuple[Image.Image, str]], list[dict[str, Any]]]:
        """Return the images that fit a text: pictures with captions, and the hits."""
        return self._search(text[:QUERY_LENGTH], k)

    def search_picture(
        self, picture: Image.Image | None, k: int = 10
    ) -> tuple[list[tuple[Image.Image, str]], list[dict[str, Any]]]:
        """Return the captions that fit a picture, each with its image, or of a folder the pictures like it."""
        return ([], []) if picture is None else self._search(picture, k)

    def _search(self, query: Any, k: int) -> tuple[list[tuple[Image.Image, str]], list[dict[str, Any]]]:
        try:
            hits = self.retriever.search(self.retriever.encode_query(query), min(int(k), MOST_RESULTS))
        except XretError as error:
            raise gradio.Error(str(error), print_exception=False) from error
        return [shown for hit in hits if (shown := self._show(hit)) is not None], [hit.to_dict() for hit in hits]

    def _show(self, hit: Hit) -> tuple[Image.Image, str] | None:
        row = self._row[hit.id] if hit.caption is None else self._caption_row[hit.id]
        try:
            picture = thumbnail(self.searched.picture(row), SIDE, upright=True)
        except XretError as error:
            if isinstance(error, SampleError):
                log.warning("%s", error)
            return None
        return picture, f"{hit.score:.3f}  {hit.caption or hit.file_name}"

    def examples(self) -> list[str]:
        """Return some short captions of the gallery whose every word the run knows."""
        if not isinstance(self.searched, Gallery):
            return []
        short = [text for text in self.searched.texts[:1000] if text.strip() and len(text) <= EXAMPLE_LENGTH]
        known = [text for text in short if not self.retriever.unknown_words([text])]
        return known[:: max(1, -(-len(known) // EXAMPLES))]


def make_page(service: Service) -> Any:
    """Return the page, a `gradio.Blocks`, with the endpoints ``/search_text`` and ``/search_picture``."""
    run, searched = service.retriever.run, service.searched
    what = f"{len(searched.names('images')[0]):,} images"
    if isinstance(searched, Gallery):
        what += f" and {len(searched.texts):,} captions of {searched.dataset}, split {searched.split}"
    name, score = run.path.resolve().name, SIMILARITIES[run.recipe.similarity["name"]].score
    with gradio.Blocks(title=f"xret: {name}", analytics_enabled=False, delete_cache=(600, 3600)) as page:
        gradio.Markdown(f"# {name}\n{run.recipe.name} on {what}. A score is {score}.")
        with gradio.Row():
            with gradio.Column():
                text = gradio.Textbox(label="Describe an image, and press Enter", max_length=QUERY_LENGTH)
                if examples := service.examples():
                    gradio.Examples(examples, text)
                count = gradio.Slider(1, MOST_RESULTS, 10, step=1, label="Results")
            picture = gradio.Image(type="pil", sources=["upload", "clipboard"], label="Or drop a picture", height=260)
        picture.async_move_resource_to_block_cache = _only_uploads(picture.async_move_resource_to_block_cache)  # type: ignore[method-assign]
        found = gradio.Gallery(label="Answers", columns=5, object_fit="contain", format="jpeg", interactive=False)
        with gradio.Accordion("As JSON", open=False):
            hits = gradio.JSON(show_label=False)
        text.submit(service.search_text, [text, count], [found, hits], api_name="search_text")
        picture.input(service.search_picture, [picture, count], [found, hits], api_name="search_picture")
    page.queue(max_size=QUEUE, default_concurrency_limit=1)
    return page


def _only_uploads(move: Any) -> Any:
    """Return what puts a picture into the cache, but fetches no address that a client names."""

    async def moved(path: str | Path | None) -> Any:
        if "://" in str(path):
            raise gradio.Error("send the picture itself and not its address", print_exception=False)
        return await move(path)

    return moved


def serve(retriever: Retriever, host: str, port: int | None) -> Any:
    """Serve the page in the background, and return it: a `gradio.Blocks` with a `local_url` and a `close`.

    Args:
        retriever: searches.
        host: the address or name to listen at.
        port: None: the first free one from 7860 on.

    Raises:
        XretError: the address cannot be listened at, or the run cannot search.
    """
    page = make_page(Service(retriever))
    try:
        page.launch(
            server_name=host,
            server_port=port,
            share=False,
            quiet=True,
            prevent_thread_lock=True,
            show_error=True,
            ssr_mode=False,
            enable_monitoring=False,
            max_file_size=UPLOAD,
            footer_links=["api"],
        )
    except OSError as error:
        raise XretError(
            f"the server cannot listen at {host}, port {port or '7860 to 7959'}; give --host an address of this machine"
            " such as 127.0.0.1, and --port a number from 1024 that is free"
        ) from error
    return page
