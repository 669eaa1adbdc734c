"""What a generated scene is made of, scenes at random, and their pictures."""

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
SIZES = {"big": (58, 68), "small": (34, 42)}  # shortest and longest side of the box in pixels
TEXTURES = ("plain", "striped", "dotted")
THINGS = 4  # objects of a scene, each in a ninth of the picture of its own

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
    def phrase(self) -> str:
        """Its looks: ``a big striped red circle``."""
        texture = () if self.texture == "plain" else (self.texture,)
        return " ".join(("a", self.size, *texture, self.colour, self.shape))

    @property
    def caption(self) -> str:
        """Its looks and its place, the ninth that its centre lies in: ``a small red star at the top left``."""
        x, y, width, height = self.box
        row = ("top", "", "bottom")[int(3 * (y + height / 2) / SIDE)]
        column = ("left", "", "right")[int(3 * (x + width / 2) / SIDE)]
        place = f"{row} {column}".strip()
        return f"{self.phrase} at the {place}" if place else f"{self.phrase} in the middle"


@dataclass(frozen=True)
class Scene:
    """Objects on a ground of one colour that none of them has; no two have shape and colour in common."""

    ground: str
    things: tuple[Thing, ...]


def random_scene(random: Random) -> Scene:
    """Make up a scene."""
    ground = random.choice(list(COLOURS))
    looks = random.sample([(shape, colour) for shape in SHAPES for colour in COLOURS if colour != ground], THINGS)
    ninths = random.sample(range(9), THINGS)
    return Scene(ground, tuple(_random_thing(random, *look, ninth) for look, ninth in zip(looks, ninths, strict=True)))


def _random_thing(random: Random, shape: str, colour: str, ninth: int) -> Thing:
    size = random.choice(list(SIZES))
    side = random.randint(*SIZES[size])
    x, y = (place * SIDE // 3 + random.randint(3, SIDE // 3 - 3 - side) for place in (ninth % 3, ninth // 3))
    return Thing(shape, colour, size, random.choice(TEXTURES), (x, y, side, side))


def draw(scene: Scene, random: Random) -> Image.Image:
    """Draw a scene, RGB, `SIDE` pixels square; `random` gives shades and the direction of stripes."""
    canvas = Image.new("RGB", (SIDE * SCALE, SIDE * SCALE), _shade(scene.ground, random))
    for thing in scene.things:
        x, y, width, _ = (SCALE * number for number in thing.box)
        red, green, blue = COLOURS[thing.colour]
        is_light = 0.299 * red + 0.587 * green + 0.114 * blue >= 128
        edge, ink = ((20, 20, 20), (60, 60, 60)) if is_light else ((250, 250, 250), (225, 225, 225))
        fill = Image.new("RGB", (width, width), _shade(thing.colour, random))
        fill.paste(ink, (0, 0), _texture(thing.texture, width, random))
        canvas.paste(edge, (x, y), _mask(thing.shape, width, 1.0))
        canvas.paste(fill, (x, y), _mask(thing.shape, width, 0.9))
    return canvas.reduce(SCALE)


def _shade(colour: str, random: Random) -> tuple[int, ...]:
    return tuple(min(255, max(0, value + random.randint(-10, 10))) for value in COLOURS[colour])


def _texture(texture: str, side: int, random: Random) -> Image.Image:
    """Return the stripes or dots of a surface in white on black, five along a side."""
    where, step = Image.new("L", (side, side)), side // 5
    pen = ImageDraw.Draw(where)
    for y in range(0, side, step):
        if texture == "striped":
            pen.rectangle((0, y, side, y + step // 2 - 1), fill=255)
        for x in range(0, side, step) if texture == "dotted" else ():
            pen.ellipse((x + step // 5, y + step // 5, x + step * 4 // 5, y + step * 4 // 5), fill=255)
    return where.transpose(Image.Transpose.ROTATE_90) if random.random() < 0.5 else where


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
