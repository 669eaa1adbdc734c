"""A page in the browser and its API over a run: a text or a picture in, a gallery of answers out (Gradio)."""

import logging
from pathlib import Path
from typing import Any

import gradio
from PIL import Image

from ...pipeline.data.images import thumbnail
from ...pipeline.errors import XretError
from ..modules.similarity import SIMILARITIES
from ..recipes.own import part_of
from .gallery import Gallery, Hit
from .retriever import Retriever

MOST_RESULTS, QUERY_LENGTH, SIDE = 100, 1000, 600  # SIDE: of a picture on the page, pixels at most
UPLOAD, QUEUE = "16mb", 64  # of a picture that is sent, and searches that may wait
log = logging.getLogger("xret")

Answers = tuple[list[tuple[Image.Image, str]], list[dict[str, Any]]]  # pictures with captions, and the hits


def make_page(retriever: Retriever) -> Any:
    """Return the page, a `gradio.Blocks`, with the endpoints ``/search_text`` and ``/search_picture``.

    Model and gallery, or the index in its place, are loaded here, so that no query waits for them.
    """
    run, searched, what = retriever.run, retriever.searched, "pictures"
    row_of = {id_: row for row, id_ in enumerate(searched.names("images")[0])}
    image_of: dict[str, int] = {}  # the row of each caption's image
    if isinstance(searched, Gallery):
        what = f"images and {len(searched.texts):,} captions of {searched.dataset}, split {searched.split}"
        image_of = dict(zip(searched.caption_ids, searched.caption_image.tolist(), strict=True))
    if retriever.index_of("images") is None:
        searched.of("images")
    try:
        searched.picture(0)
    except XretError as error:
        log.warning("no pictures will be shown: %s", error)

    def show(hit: Hit) -> tuple[Image.Image, str] | None:
        row = row_of[hit.id] if hit.caption is None else image_of[hit.id]
        try:
            picture = thumbnail(searched.picture(row), SIDE, upright=True)
        except XretError:
            return None
        return picture, f"{hit.score:.3f}  {hit.caption or hit.file_name}"

    def search(query: Any, k: int) -> Answers:
        try:
            hits = retriever.search(query, min(int(k), MOST_RESULTS))
        except XretError as error:
            raise gradio.Error(str(error), print_exception=False) from error
        return [shown for shown in map(show, hits) if shown is not None], [hit.to_dict() for hit in hits]

    def search_text(text: str, k: int = 10) -> Answers:
        """Find the images that fit a text."""
        return search(text[:QUERY_LENGTH], k)

    def search_picture(picture: Image.Image | None, k: int = 10) -> Answers:
        """Find the captions that fit a picture, each shown with its image, or in a folder the pictures like it."""
        return ([], []) if picture is None else search(picture, k)

    name = run.path.resolve().name
    score = part_of(SIMILARITIES, run.recipe.similarity["name"], run.recipe.sources).score
    with gradio.Blocks(title=f"xret: {name}", analytics_enabled=False, delete_cache=(600, 3600)) as page:
        gradio.Markdown(f"# {name}\n{run.recipe.name} on {len(row_of):,} {what}. A score is {score}.")
        with gradio.Row():
            with gradio.Column():
                text = gradio.Textbox(label="Describe an image, and press Enter", max_length=QUERY_LENGTH)
                count = gradio.Slider(1, MOST_RESULTS, 10, step=1, label="Results")
            picture = gradio.Image(type="pil", sources=["upload", "clipboard"], label="Or drop a picture", height=260)
        picture.async_move_resource_to_block_cache = _only_uploads(picture.async_move_resource_to_block_cache)  # type: ignore[method-assign]
        found = gradio.Gallery(label="Answers", columns=5, object_fit="contain", format="jpeg", interactive=False)
        with gradio.Accordion("As JSON", open=False):
            hits = gradio.JSON(show_label=False)
        text.submit(search_text, [text, count], [found, hits], api_name="search_text")
        picture.input(search_picture, [picture, count], [found, hits], api_name="search_picture")
    return page.queue(max_size=QUEUE, default_concurrency_limit=1)


def _only_uploads(move: Any) -> Any:
    """Return what puts a picture into the cache, but fetches no address that a client names."""

    async def moved(path: str | Path | None) -> Any:
        if "://" in str(path):
            raise gradio.Error("send the picture itself and not its address", print_exception=False)
        return await move(path)

    return moved


def serve(retriever: Retriever, host: str, port: int | None) -> Any:
    """Serve the page in the background, and return it: a `gradio.Blocks` with a `local_url` and a `close`.

    A `port` of None is the first free one from 7860 on. XretError where the address cannot be listened at.
    """
    page, limits = make_page(retriever), {"max_file_size": UPLOAD, "enable_monitoring": False, "ssr_mode": False}
    shown = {"share": False, "quiet": True, "show_error": True, "footer_links": ["api"], "prevent_thread_lock": True}
    try:
        page.launch(server_name=host, server_port=port, **limits, **shown)
    except OSError as error:
        raise XretError(
            f"the server cannot listen at {host}, port {port or '7860 to 7959'}; give --host an address of this machine"
            " such as 127.0.0.1, and --port a number from 1024 that is free"
        ) from error
    return page
