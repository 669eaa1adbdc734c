"""A contact sheet: a few queries of both directions with what a head found for them, as one picture."""

import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

TOP = 5
SIDE = 150  # of a thumbnail, pixels
GAP = 12
LEFT = 330  # where the results begin
WIDTH = LEFT + TOP * (SIDE + GAP) + GAP
PAPER, INK, FAINT, RIGHT = "#ffffff", "#1d1d1f", "#6e6e73", "#1a7f37"


def contact_sheet(
    similarity: np.ndarray,
    caption_image: np.ndarray,
    files: Sequence[Path],
    texts: Sequence[str],
    *,
    title: str,
    queries: int = 4,
    seed: int = 0,
) -> Image.Image:
    """Draw the top results of a few random captions and of a few random images; right answers are green.

    Args:
        similarity: [images, captions]; larger is closer.
        caption_image: the image of each caption, [captions].
        files: the image files.
        texts: the captions.
        title: the first line.
        queries: how many of each direction.
        seed: picks them.
    """
    dice = np.random.default_rng(seed)
    captions = dice.choice(len(texts), min(queries, len(texts)), replace=False)
    images = dice.choice(len(files), min(queries, len(files)), replace=False)
    strips = [_line(title, 22, INK), _line("Caption to image: the right picture has a green frame", 16, FAINT)]
    for caption in captions:
        best = np.argsort(-similarity[:, caption], kind="stable")[:TOP]
        found = [(files[image], image == caption_image[caption]) for image in best]
        strips.append(_pictures(texts[caption], found))
    strips.append(_line("Image to caption: a right caption is green", 16, FAINT))
    for image in images:
        best = np.argsort(-similarity[image], kind="stable")[:TOP]
        strips.append(_captions(files[image], [(texts[c], caption_image[c] == image) for c in best]))
    sheet = Image.new("RGB", (WIDTH, sum(strip.height for strip in strips) + GAP), PAPER)
    y = 0
    for strip in strips:
        sheet.paste(strip, (0, y))
        y += strip.height
    return sheet


def _line(text: str, size: int, colour: str) -> Image.Image:
    strip = Image.new("RGB", (WIDTH, size + 2 * GAP), PAPER)
    ImageDraw.Draw(strip).text((GAP, GAP), text, colour, _font(size))
    return strip


def _pictures(query: str, found: Sequence[tuple[Path, bool]]) -> Image.Image:
    strip = Image.new("RGB", (WIDTH, SIDE + GAP), PAPER)
    ImageDraw.Draw(strip).multiline_text((GAP, GAP), textwrap.fill(query, 36), INK, _font(17), spacing=6)
    for place, (file, right) in enumerate(found):
        _paste(strip, file, LEFT + place * (SIDE + GAP), RIGHT if right else None)
    return strip


def _captions(query: Path, found: Sequence[tuple[str, bool]]) -> Image.Image:
    strip = Image.new("RGB", (WIDTH, SIDE + GAP), PAPER)
    _paste(strip, query, GAP, None)
    for place, (text, right) in enumerate(found):
        at = (SIDE + 2 * GAP, GAP + place * (SIDE - GAP) // TOP)
        line = f"{place + 1}. {textwrap.shorten(text, 88, placeholder=' …')}"
        ImageDraw.Draw(strip).text(at, line + ("  (right)" if right else ""), RIGHT if right else FAINT, _font(17))
    return strip


def _paste(strip: Image.Image, file: Path, x: int, frame: str | None) -> None:
    with Image.open(file) as image:
        picture = image.convert("RGB").resize((SIDE, SIDE))
    strip.paste(picture, (x, 0))
    if frame:
        ImageDraw.Draw(strip).rectangle((x, 0, x + SIDE - 1, SIDE - 1), outline=frame, width=6)


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)
