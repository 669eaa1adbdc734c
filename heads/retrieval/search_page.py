"""The results of a search as one HTML file that needs no other: pictures are inside, small."""

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from ...pipeline.data.images import jpeg, thumbnail
from ...pipeline.errors import RunError, SampleError
from ...pipeline.files import write_bytes
from .hits import Hit, Modality
from .retriever import Picture, Retriever

SIDE = 320  # of a thumbnail at most, pixels

_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
:root { color-scheme: light dark; --paper: #fff; --ink: #1d1d1f; --faint: #5f5f64; --line: #d8d8dc; }
@media (prefers-color-scheme: dark) { :root { --paper: #161618; --ink: #f0f0f2; --faint: #a1a1a8; --line: #3a3a3e; } }
body { margin: 0 auto; max-width: 72rem; padding: 1.5rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.45 system-ui, sans-serif; }
h1 { font-size: 1.4rem; margin: 0 0 .25rem; overflow-wrap: anywhere; }
p, .about { color: var(--faint); margin: 0 0 1.25rem; overflow-wrap: anywhere; }
ol { list-style: none; margin: 0; padding: 0; display: grid; gap: 1rem; }
ol.pictures { grid-template-columns: repeat(auto-fill, minmax(11rem, 1fr)); }
ol.captions { gap: 0; }
ol.captions li { border-top: 1px solid var(--line); padding: .5rem 0; overflow-wrap: anywhere; }
figure { margin: 0; }
img { display: block; width: 100%; aspect-ratio: 1; object-fit: cover; border-radius: .5rem; background: var(--line); }
img.query { width: 16rem; aspect-ratio: auto; margin-bottom: 1rem; }
figcaption, .score { color: var(--faint); font-size: .85rem; font-variant-numeric: tabular-nums;
  overflow-wrap: anywhere; }
</style>
</head>
<body>
<main>
{% if picture %}<img class="query" src="{{ picture }}" alt="The picture that was searched with">{% endif %}
<h1>{{ title }}</h1>
<p>{{ about }}</p>
{% if found and found[0].hit.file_name %}
<ol class="pictures">
{% for one in found %}
<li><figure>
{% if one.picture %}<img src="{{ one.picture }}" alt="{{ one.said or one.hit.file_name }}">{% endif %}
<figcaption>{{ one.hit.rank }} · {{ one.score }} · {{ one.hit.file_name }}{{ one.note }}</figcaption>
</figure></li>
{% endfor %}
</ol>
{% else %}
<ol class="captions">
{% for one in found %}
<li>{{ one.hit.caption }}<div class="score">{{ one.hit.rank }} · {{ one.score }}{{ one.note }}</div></li>
{% endfor %}
</ol>
{% endif %}
</main>
</body>
</html>
"""


def write_page(path: Path, retriever: Retriever, query: Picture, hits: Sequence[Hit]) -> None:
    """Write the hits of a search as a page, in one step.

    Args:
        path: of the file; one that is there is replaced.
        retriever: found them.
        query: what was searched for.
        hits: of its `search`.

    Raises:
        CacheError, ManifestError: the folder of the images is not known.
        RunError: the file cannot be written, or the hits are of an index that has pictures of other stores, too.
    """
    gallery = retriever.gallery
    answers: Modality = "images" if isinstance(query, str) else "captions"
    if retriever.searches_others(answers):
        raise RunError(
            f"the index has {answers} of other stores than {gallery.url}, and a page shows the pictures of one; leave"
            " --html, or search an index of this store alone"
        )
    said: dict[str, str] = {}  # a caption of each image
    for image, text in zip(gallery.caption_image.tolist(), gallery.texts, strict=True):
        said.setdefault(gallery.file_names[image], text)
    found: list[dict[str, Any]] = []
    for hit in hits:
        note = "" if hit.uncertainty is None else f" · uncertainty {hit.uncertainty:.4f}"
        one: dict[str, Any] = {"hit": hit, "score": f"{hit.score:.4f}", "note": note, "picture": None}
        if hit.file_name is not None:
            one["said"] = said.get(hit.file_name)
            try:
                one["picture"] = _url(gallery.path_of(hit.file_name))
            except SampleError as error:
                one["note"] += f" ({error.reason})"
        found.append(one)
    page = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(_PAGE)
    text = page.render(
        title=query
        if isinstance(query, str)
        else f"Captions for {query.name if isinstance(query, Path) else 'a picture'}",
        picture=None if isinstance(query, str) else _url(query),
        about=f"{len(hits)} of {retriever.searched(answers):,} {answers} of {gallery.dataset}, split {gallery.split},"
        f" by {retriever.run.path}",
        found=found,
    )
    encoded = text.encode("utf-8", "replace")  # a file's name may be no text
    write_bytes(path, encoded, RunError, "choose another --html")


def _url(picture: Picture) -> str:
    """Return a picture, small, as a ``data:`` URL."""
    return f"data:image/jpeg;base64,{base64.b64encode(jpeg(thumbnail(picture, SIDE))).decode()}"
