"""What a generated scene is made of, scenes at random, and their pictures."""

import itertools
import math
from dataclasses import dataclass
from random import Random

from PIL import Image, ImageDraw

SIDE = 224  # pixels of a picture
SCALE = 2  # pictures are drawn larger and reduced, so that edges are smooth

COLOURS = {
    "red": (214, 40, 40),
    "orange": (244, 140, 30),
    "yellow": (250, 220, 60),
    "green": (40, 140, 70),
    "turquoise": (70, 205, 200),
    "blue": (40, 75, 190),
    "purple": (125, 50, 155),
    "pink": (245, 150, 195),
    "brown": (115, 70, 40),
    "white": (245, 245, 245),
    "black": (25, 25, 30),
}
SHAPES = ("circle", "square", "triangle", "diamond", "star", "cross", "heart", "ring")
SIZES = {"big": (84, 100), "small": (46, 56)}  # shortest and longest side of the box in pixels
TEXTURES = ("plain", "striped", "dotted")
PATTERNS = ("plain", "shaded", "striped", "checkered", "dotted", "speckled")

Box = tuple[int, int, int, int]  # x, y, width, height in pixels
Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Thing:
    """An object: its looks and the box around it."""

    shape: str
    colour: str
    size: str
    texture: str
    box: Box

    @property
    def place(self) -> str:
        """The ninth of the picture that its centre lies in: ``top left``, ``middle``, ``right`` …"""
        x, y, width, height = self.box
        row = ("top", "", "bottom")[int(3 * (y + height / 2) / SIDE)]
        column = ("left", "", "right")[int(3 * (x + width / 2) / SIDE)]
        return f"{row} {column}".strip() or "middle"


@dataclass(frozen=True)
class Ground:
    """What lies behind the objects: one colour if plain, else two in the order of `COLOURS`."""

    pattern: str
    colours: tuple[str, ...]

    @property
    def tone(self) -> str:
        """``dark`` or ``light`` if all its colours are, else ``mixed``."""
        tones = {_tone(colour) for colour in self.colours}
        return tones.pop() if len(tones) == 1 else "mixed"


@dataclass(frozen=True)
class Scene:
    """Two to five objects on a ground; no two have shape and colour in common, none lies on another."""

    ground: Ground
    things: tuple[Thing, ...]


def random_scene(random: Random) -> Scene:
    """Make up a scene; no object has a colour of the ground."""
    pattern = random.choice(PATTERNS)
    chosen = random.sample(list(COLOURS), 1 if pattern == "plain" else 2)
    ground = Ground(pattern, tuple(colour for colour in COLOURS if colour in chosen))
    boxes = _random_boxes(random, random.randint(2, 5))
    free = [colour for colour in COLOURS if colour not in chosen]
    looks = random.sample(list(itertools.product(SHAPES, free)), len(boxes))
    things = [
        Thing(shape, colour, size, random.choice(TEXTURES), box)
        for (shape, colour), (size, box) in zip(looks, boxes, strict=True)
    ]
    return Scene(ground, tuple(things))


def _random_boxes(random: Random, number: int) -> list[tuple[str, Box]]:
    """Draw sizes and places, all apart from each other; begin again where they do not fit."""
    boxes: list[tuple[str, Box]] = []
    tries = 0
    while len(boxes) < number:
        if tries == 50:
            boxes, tries = [], 0
        tries += 1
        size = random.choice(list(SIZES))
        side = random.randint(*SIZES[size])
        x, y = (random.randint(4, SIDE - 4 - side) for _ in range(2))
        if all(_apart((x, y, side, side), box) for _, box in boxes):
            boxes.append((size, (x, y, side, side)))
    return boxes


def _apart(one: Box, other: Box, gap: int = 5) -> bool:
    (x1, y1, w1, h1), (x2, y2, w2, h2) = one, other
    return x1 + w1 + gap <= x2 or x2 + w2 + gap <= x1 or y1 + h1 + gap <= y2 or y2 + h2 + gap <= y1


def draw(scene: Scene, random: Random) -> Image.Image:
    """Draw a scene, RGB, `SIDE` pixels square; `random` gives shades, directions and grain."""
    side = SIDE * SCALE
    shades = [_shade(colour, random) for colour in scene.ground.colours]
    step = side // random.randint(5, 8)
    canvas = _surface(scene.ground.pattern, side, step, shades[0], shades[-1], random)
    for thing in scene.things:
        x, y, width, _ = (SCALE * number for number in thing.box)
        light = _tone(thing.colour) == "light"
        edge, ink = ((20, 20, 20), (60, 60, 60)) if light else ((250, 250, 250), (225, 225, 225))
        fill = _surface(thing.texture, width, width // 5, _shade(thing.colour, random), ink, random)
        canvas.paste(edge, (x, y), _mask(thing.shape, width, 1.0))
        canvas.paste(fill, (x, y), _mask(thing.shape, width, 0.9))
    return canvas.reduce(SCALE)


def _tone(colour: str) -> str:
    red, green, blue = COLOURS[colour]
    return "dark" if 0.299 * red + 0.587 * green + 0.114 * blue < 128 else "light"


def _shade(colour: str, random: Random) -> tuple[int, ...]:
    return tuple(min(255, max(0, value + random.randint(-10, 10))) for value in COLOURS[colour])


def _surface(
    pattern: str, side: int, step: int, first: tuple[int, ...], second: tuple[int, ...], random: Random
) -> Image.Image:
    """Fill a square with the first colour, and with the second where the pattern has it."""
    base = Image.new("RGB", (side, side), first)
    if pattern == "plain":
        return base
    if pattern == "shaded":
        where = Image.linear_gradient("L").resize((side, side))
    elif pattern == "speckled":
        grains = Image.frombytes("L", (56, 56), random.randbytes(56 * 56))
        where = grains.point(lambda value: 255 * (value > 127)).resize((side, side), Image.Resampling.NEAREST)
    else:
        where = Image.new("L", (side, side))
        _rule(pattern, ImageDraw.Draw(where), side, step)
    if pattern in ("shaded", "striped") and random.random() < 0.5:
        where = where.transpose(Image.Transpose.ROTATE_90)
    base.paste(second, (0, 0), where)
    return base


def _rule(pattern: str, pen: ImageDraw.ImageDraw, side: int, step: int) -> None:
    """Draw stripes, checks or dots, one each `step` pixels."""
    for row, y in enumerate(range(0, side, step)):
        if pattern == "striped":
            pen.rectangle((0, y, side, y + step // 2 - 1), fill=255)
        for column, x in enumerate(range(0, side, step)):
            if pattern == "checkered" and (row + column) % 2:
                pen.rectangle((x, y, x + step - 1, y + step - 1), fill=255)
            if pattern == "dotted":
                pen.ellipse((x + step // 5, y + step // 5, x + step * 4 // 5, y + step * 4 // 5), fill=255)


def _mask(shape: str, side: int, scale: float) -> Image.Image:
    """Return the shape in white on black; `scale` shrinks it around its centre, and widens a ring's hole."""
    mask = Image.new("L", (side, side))
    pen = ImageDraw.Draw(mask)
    pen.polygon([_at(x, y, side, scale) for x, y in OUTLINES[shape]], fill=255)
    if shape == "ring":
        pen.polygon([_at(x, y, side, 0.45 / scale) for x, y in OUTLINES["circle"]], fill=0)
    return mask


def _at(x: float, y: float, side: int, scale: float) -> tuple[float, float]:
    return (side - 1) * (0.5 + scale * x / 2), (side - 1) * (0.5 + scale * y / 2)


def _regular(corners: int, *radii: float) -> Points:
    """Corners evenly around the centre, the first one on top, their distances taken from `radii` in turn."""
    return [
        (radii[i % len(radii)] * math.sin(angle), -radii[i % len(radii)] * math.cos(angle))
        for i, angle in enumerate(2 * math.pi * i / corners for i in range(corners))
    ]


def _heart() -> Points:
    angles = [2 * math.pi * i / 60 for i in range(60)]
    return [
        (
            math.sin(a) ** 3,
            -(13 * math.cos(a) - 5 * math.cos(2 * a) - 2 * math.cos(3 * a) - math.cos(4 * a) + 2.5) / 14.5,
        )
        for a in angles
    ]


# Corners in the square from -1 to 1, y downwards.
OUTLINES: dict[str, Points] = {
    "circle": _regular(60, 1.0),
    "ring": _regular(60, 1.0),
    "square": [(-1, -1), (1, -1), (1, 1), (-1, 1)],
    "triangle": [(0, -1), (1, 1), (-1, 1)],
    "diamond": _regular(4, 1.0),
    "star": _regular(10, 1.0, 0.45),
    "cross": [
        *[(-0.35, -1), (0.35, -1), (0.35, -0.35), (1, -0.35), (1, 0.35), (0.35, 0.35)],
        *[(0.35, 1), (-0.35, 1), (-0.35, 0.35), (-1, 0.35), (-1, -0.35), (-0.35, -0.35)],
    ],
    "heart": _heart(),
}
