"""Five captions of a generated scene, each of another part of it.

A caption is made from a claim, which is kept with the text so that one can tell whether it also fits another scene:
`things` (objects by number, with the attributes that are named), `relation` between two of them, `count`, `ground`.
"""

from random import Random
from typing import Any

from .pictures import Ground, Scene, Thing

Claim = dict[str, Any]
NUMBERS = ("no", "one", "two", "three", "four", "five")


def describe(scene: Scene, random: Random) -> list[tuple[str, Claim]]:
    """Return five captions of a scene, text and claim each."""
    order = random.sample(range(len(scene.things)), len(scene.things))
    pair, related, single = order[:2], [order[0], order[-1]], order[1 % len(order)]
    return [
        _pair(scene, random, pair),
        _relation(scene, random, related),
        _place(scene, random, single),
        _count(scene),
        _abstract(scene, random),
    ]


def phrase(thing: Thing, attributes: set[str] | None = None) -> str:
    """Name an object: ``a big striped red circle``; of size and texture only what `attributes` has."""
    words = [thing.colour, thing.shape]
    if thing.texture != "plain" and (attributes is None or "texture" in attributes):
        words.insert(0, thing.texture)
    if attributes is None or "size" in attributes:
        words.insert(0, thing.size)
    return _with_article(" ".join(words))


def ground_phrase(ground: Ground) -> str:
    """Name a ground: ``a plain red ground``, ``a red and blue striped ground``."""
    if ground.pattern == "plain":
        return f"a plain {ground.colours[0]} ground"
    return _with_article(f"{' and '.join(ground.colours)} {ground.pattern} ground")


def relation(one: Thing, other: Thing) -> str:
    """Say where one object lies, seen from another; the boxes are apart in one direction at least."""
    (x1, y1, w1, h1), (x2, y2, w2, h2) = one.box, other.box
    gaps = {
        "to the left of": x2 - x1 - w1,
        "to the right of": x1 - x2 - w2,
        "above": y2 - y1 - h1,
        "below": y1 - y2 - h2,
    }
    return max(gaps, key=lambda name: gaps[name])


def _with_article(words: str) -> str:
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def _ground_claim(ground: Ground) -> Claim:
    return {"pattern": ground.pattern, "colours": list(ground.colours)}


def _named(scene: Scene, number: int, random: Random) -> tuple[str, Claim]:
    """Describe one object by colour and shape, and by chance by size and texture."""
    thing = scene.things[number]
    said = {name for name in ("size", "texture") if random.random() < 0.5}
    claim: Claim = {"thing": number, "shape": thing.shape, "colour": thing.colour}
    if "size" in said:
        claim["size"] = thing.size
    if "texture" in said and thing.texture != "plain":
        claim["texture"] = thing.texture
    return phrase(thing, said), claim


def _pair(scene: Scene, random: Random, numbers: list[int]) -> tuple[str, Claim]:
    (one, one_claim), (other, other_claim) = (_named(scene, number, random) for number in numbers)
    text = f"{one} and {other} on {ground_phrase(scene.ground)}"
    return text, {"things": [one_claim, other_claim], "ground": _ground_claim(scene.ground)}


def _relation(scene: Scene, random: Random, numbers: list[int]) -> tuple[str, Claim]:
    (one, one_claim), (other, other_claim) = (_named(scene, number, random) for number in numbers)
    where = relation(*(scene.things[number] for number in numbers))
    return f"{one} {where} {other}", {"things": [one_claim, other_claim], "relation": where}


def _place(scene: Scene, random: Random, number: int) -> tuple[str, Claim]:
    thing, claim = _named(scene, number, random)
    claim["place"] = place = scene.things[number].place
    where = "in the middle" if place == "middle" else f"at the {place}"
    text = f"{ground_phrase(scene.ground)} with {thing} {where}"
    return text, {"things": [claim], "ground": _ground_claim(scene.ground)}


def _count(scene: Scene) -> tuple[str, Claim]:
    number = len(scene.things)
    text = f"{NUMBERS[number]} shapes on {ground_phrase(scene.ground)}"
    return text, {"count": number, "ground": _ground_claim(scene.ground)}


def _abstract(scene: Scene, random: Random) -> tuple[str, Claim]:
    """Say something that is true of many scenes."""
    ground, thing = scene.ground, random.choice(scene.things)
    amount, count = ("several things", "several") if len(scene.things) > 2 else ("a pair of things", 2)
    remarks: list[tuple[str, Claim]] = [
        (f"something {thing.colour}", {"things": [{"colour": thing.colour}]}),
        (f"a {thing.size} {thing.shape}", {"things": [{"shape": thing.shape, "size": thing.size}]}),
    ]
    if ground.tone != "mixed":
        claim: Claim = {"count": count, "ground": {"tone": ground.tone}}
        remarks.append((f"{amount} on a {ground.tone} ground", claim))
    if ground.pattern != "plain":
        claim = {"count": count, "ground": {"pattern": ground.pattern}}
        remarks.append((f"{amount} on a {ground.pattern} ground", claim))
    return random.choice(remarks)
