"""What a generated scene is made of, scenes at random, and their pictures."""

import math
from dataclasses import dataclass
from functools import lru_cache
from random import Random

from PIL import Image, ImageDraw, ImageFilter

SIDE = 224  # pixels of a picture
SCALE = 4  # shapes are drawn larger and reduced, so that edges are smooth

COLOURS = {
    "red": (220, 74, 66),
    "orange": (242, 146, 58),
    "yellow": (250, 212, 84),
    "green": (70, 152, 92),
    "turquoise": (76, 200, 192),
    "blue": (62, 106, 200),
    "purple": (138, 80, 184),
    "pink": (244, 154, 190),
    "brown": (130, 76, 48),
    "white": (250, 248, 242),
    "black": (42, 42, 50),
}
# Softer than the colour of its name, and far from all others: some channel differs by 50, shades included.
GROUNDS = {
    "red": (206, 98, 120),
    "orange": (226, 150, 110),
    "yellow": (240, 218, 144),
    "green": (152, 202, 152),
    "turquoise": (150, 215, 208),
    "blue": (140, 176, 222),
    "purple": (178, 152, 214),
    "pink": (240, 182, 204),
    "brown": (176, 142, 118),
    "white": (248, 244, 232),
    "black": (50, 58, 92),
}
PAPER = (252, 250, 246)  # the rim of an object
SHADOW, DEPTH = (30, 30, 60), 70  # of 255: how much of its colour a shadow has
WIDER = 4  # pixels that a shadow is wider than its object, on each side
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
    """Draw a scene, RGB, `SIDE` pixels square: stickers on soft ground; `random` gives shades and turns stripes."""
    canvas = _lit(_shade(GROUNDS[scene.ground], random), SIDE, 8)
    for thing in scene.things:
        x, y, side, _ = thing.box
        red, green, blue = COLOURS[thing.colour]
        is_light = 0.299 * red + 0.587 * green + 0.114 * blue >= 140
        ink = (red * 3 // 5, green * 3 // 5, blue * 3 // 5) if is_light else PAPER
        fill = _lit(_shade(COLOURS[thing.colour], random), side, 12)
        fill.paste(ink, (0, 0), _texture(thing.texture, side, random.random() < 0.5))
        canvas.paste(SHADOW, (x - WIDER, y - WIDER), _shadow(thing.shape, side))
        canvas.paste(PAPER, (x, y), _mask(thing.shape, side, 1.0))
        canvas.paste(fill, (x, y), _mask(thing.shape, side, 0.88))
    return canvas


def _shade(colour: tuple[int, int, int], random: Random) -> tuple[int, ...]:
    return tuple(min(255, max(0, value + random.randint(-6, 6))) for value in colour)


def _lit(colour: tuple[int, ...], side: int, by: int) -> Image.Image:
    """Return a square of a colour that is lighter at the top and darker at the bottom, by so much."""
    top, bottom = (Image.new("RGB", (side, side), tuple(value + way * by for value in colour)) for way in (1, -1))
    return Image.composite(bottom, top, _ramp(side))


@lru_cache(512)
def _ramp(side: int) -> Image.Image:
    return Image.linear_gradient("L").resize((side, side))


@lru_cache(512)
def _texture(texture: str, side: int, turned: bool) -> Image.Image:
    """Return the stripes or dots of a surface in white on black, five along a side."""
    where, step = Image.new("L", (SCALE * side, SCALE * side)), SCALE * side // 5
    pen = ImageDraw.Draw(where)
    for y in range(0, SCALE * side, step):
        if texture == "striped":
            pen.rectangle((0, y, SCALE * side, y + step // 2 - 1), fill=255)
        for x in range(0, SCALE * side, step) if texture == "dotted" else ():
            pen.ellipse((x + step // 5, y + step // 5, x + step * 4 // 5, y + step * 4 // 5), fill=255)
    return (where.transpose(Image.Transpose.ROTATE_90) if turned else where).reduce(SCALE)


@lru_cache(512)
def _shadow(shape: str, side: int) -> Image.Image:
    """Return what a shape shades: faint, soft and a little below it."""
    shadow = Image.new("L", (side + 2 * WIDER, side + 2 * WIDER))
    shadow.paste(DEPTH, (WIDER, WIDER + 1), _mask(shape, side, 1.0))
    return shadow.filter(ImageFilter.BoxBlur(1))


@lru_cache(512)
def _mask(shape: str, side: int, scale: float) -> Image.Image:
    """Return the shape in white on black, its corners rounded; `scale` shrinks it, and widens a ring's hole."""
    large, width = SCALE * side, SCALE * side // 12
    mask = Image.new("L", (large, large))
    pen = ImageDraw.Draw(mask)
    points = [_at(x, y, large - width, scale, width / 2) for x, y in OUTLINES[shape]]
    pen.polygon(points, fill=255)
    pen.line([*points, *points[:2]], fill=255, width=width, joint="curve")
    if shape == "ring":
        pen.polygon([_at(x, y, large, 0.45 / scale) for x, y in OUTLINES["circle"]], fill=0)
    return mask.reduce(SCALE)


def _at(x: float, y: float, side: int, scale: float, inset: float = 0) -> tuple[float, float]:
    return inset + (side - 1) * (0.5 + scale * x / 2), inset + (side - 1) * (0.5 + scale * y / 2)


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
