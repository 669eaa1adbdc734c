"""Generated scenes: the same for the same seed, truly described, and often described alike."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from xret.pipeline.data.images import open_image
from xret.pipeline.data.manifest import load_manifest
from xret.pipeline.data.samples import read_samples, tokenize
from xret.pipeline.data.scenes import generate as scenes
from xret.pipeline.data.scenes.generate import generate_scenes
from xret.pipeline.data.scenes.pictures import COLOURS, PATTERNS, SHAPES, SIZES, TEXTURES
from xret.pipeline.errors import ManifestError

COUNTS = {"train": 120, "val": 40, "test": 40}
SIDE = 224
DARK = {"red", "green", "blue", "purple", "brown", "black"}
NUMBERS = {"two": 2, "three": 3, "four": 4, "five": 5}
RELATIONS = ("to the left of", "to the right of", "above", "below")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return generate_scenes(tmp_path_factory.mktemp("scenes") / "set", seed=3, **COUNTS).parent


@pytest.fixture(scope="module")
def images(folder) -> list[dict]:
    return json.loads((folder / "dataset_scenes.json").read_text())["images"]


def contents(folder: Path) -> dict[str, bytes]:
    """Return every file below a folder."""
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


# --- The checker: whether a claim holds of a scene, decided from the record alone


def lies(relation: str, one: dict, other: dict) -> bool:
    (x1, y1, w1, h1), (x2, y2, w2, h2) = one["box"], other["box"]
    if relation == "to the left of":
        return x1 + w1 <= x2
    if relation == "to the right of":
        return x2 + w2 <= x1
    if relation == "above":
        return y1 + h1 <= y2
    assert relation == "below"
    return y2 + h2 <= y1


def in_place(place: str, thing: dict) -> bool:
    x, y, width, height = thing["box"]
    ninths = [
        ("top left", "top", "top right"),
        ("left", "middle", "right"),
        ("bottom left", "bottom", "bottom right"),
    ]
    row = [y + height / 2 < line for line in (SIDE / 3, 2 * SIDE / 3, SIDE)].index(True)
    column = [x + width / 2 < line for line in (SIDE / 3, 2 * SIDE / 3, SIDE)].index(True)
    return ninths[row][column] == place


def is_thing(said: dict, thing: dict) -> bool:
    looks = all(said[key] == thing[key] for key in ("shape", "colour", "size", "texture") if key in said)
    return looks and ("place" not in said or in_place(said["place"], thing))


def is_ground(said: dict, ground: dict) -> bool:
    tones = {colour in DARK for colour in ground["colours"]}
    return (
        said.get("pattern", ground["pattern"]) == ground["pattern"]
        and said.get("colours", ground["colours"]) == ground["colours"]
        and ("tone" not in said or tones == {said["tone"] == "dark"})
    )


def fits(claim: dict, scene: dict) -> bool:
    """Say whether a claim is true of a scene: whether some of its objects can be the ones that are named."""
    assert set(claim) <= {"things", "relation", "count", "ground"}
    number = len(scene["things"])
    if "count" in claim and not (number >= 3 if claim["count"] == "several" else number == claim["count"]):
        return False
    if not is_ground(claim.get("ground", {}), scene["ground"]):
        return False
    said = claim.get("things", [])
    return any(
        all(itertools.starmap(is_thing, zip(said, chosen, strict=True)))
        and ("relation" not in claim or lies(claim["relation"], *chosen))
        for chosen in itertools.permutations(scene["things"], len(said))
    )


def test_the_checker_can_say_no():
    def thing(shape, colour, box):
        return {"shape": shape, "colour": colour, "size": "small", "texture": "plain", "box": box}

    scene = {
        "ground": {"pattern": "striped", "colours": ["red", "white"]},
        "things": [thing("star", "blue", [0, 0, 50, 50]), thing("ring", "pink", [150, 90, 50, 50])],
    }
    star, ring = {"shape": "star"}, {"shape": "ring"}
    assert fits({"things": [star, ring], "relation": "to the left of", "count": 2}, scene)
    assert not fits({"things": [ring, star], "relation": "to the left of"}, scene)
    assert not fits({"things": [star, ring], "relation": "below"}, scene)
    assert not fits({"things": [star, star]}, scene)
    assert not fits({"things": [star | {"colour": "pink"}]}, scene)
    assert fits({"things": [star | {"place": "top left"}, ring | {"place": "right"}]}, scene)
    assert not fits({"things": [star | {"place": "top"}]}, scene)
    assert not fits({"count": "several"}, scene)
    assert not fits({"ground": {"tone": "dark"}}, scene)
    assert not fits({"ground": {"tone": "light"}}, scene)
    assert not fits({"ground": {"colours": ["red"]}}, scene)


# --- What the captions say


def test_every_caption_is_true_of_its_picture(images):
    for image in images:
        for sentence in image["sentences"]:
            assert fits(sentence["claim"], image["scene"]), (image["filename"], sentence["raw"])


def test_the_objects_that_a_claim_numbers_are_the_ones_that_it_describes(images):
    numbered = [
        (said, image["scene"]["things"][said["thing"]])
        for image in images
        for sentence in image["sentences"]
        for said in sentence["claim"].get("things", [])
        if "thing" in said
    ]
    assert len(numbered) == 5 * len(images)  # two, two and one in the first three captions
    assert all(is_thing(said, thing) for said, thing in numbered)


def test_the_text_says_what_the_claim_says_and_no_more(images):
    known = {*COLOURS, *SHAPES, *SIZES, *TEXTURES, *PATTERNS, "dark", "light", *NUMBERS, "several", "pair"}
    for image in images:
        for sentence in image["sentences"]:
            claim, text = sentence["claim"], sentence["raw"]
            ground = claim.get("ground", {})
            said = [
                thing[key]
                for thing in claim.get("things", [])
                for key in ("shape", "colour", "size", "texture")
                if key in thing
            ]
            said += [*ground.get("colours", []), *(ground[key] for key in ("pattern", "tone") if key in ground)]
            if "count" in claim:
                number = {v: k for k, v in NUMBERS.items()}.get(claim["count"], claim["count"])
                said.append("pair" if "pair" in text and claim["count"] == 2 else number)
            words = tokenize(text)
            assert Counter(word for word in words if word in known) == Counter(said), text
            assert [r for r in RELATIONS if f" {r} " in text] == [claim[key] for key in claim if key == "relation"]
            for place in (thing["place"] for thing in claim.get("things", []) if "place" in thing):
                assert text.endswith("in the middle" if place == "middle" else f" at the {place}")
            assert sentence["tokens"] == words


def part_of(claim: dict) -> frozenset:
    """Return which attributes of what a claim is about, whatever it says of them."""
    things = {(thing.get("thing"), key) for thing in claim.get("things", []) for key in thing}
    return frozenset(
        things | {("ground", key) for key in claim.get("ground", {})} | (set(claim) & {"count", "relation"})
    )


def test_five_captions_describe_five_different_parts(images):
    for image in images:
        assert len(image["sentences"]) == 5
        parts = {part_of(sentence["claim"]) for sentence in image["sentences"]}
        assert len(parts) == 5
        everything = frozenset().union(*parts)
        assert all(part < everything for part in parts)
        named = [{t["thing"] for t in sentence["claim"].get("things", [])} for sentence in image["sentences"][:3]]
        if len(image["scene"]["things"]) > 2:
            assert named[0] != named[1] != named[2] != named[0]


def test_many_captions_fit_several_pictures(images):
    claims = [sentence["claim"] for image in images for sentence in image["sentences"]]
    fitting = [sum(fits(claim, image["scene"]) for image in images) for claim in claims]
    assert min(fitting) >= 1
    assert sum(number > 1 for number in fitting) >= 0.1 * len(claims)
    assert sum(number == 1 for number in fitting) >= 0.1 * len(claims)  # or there would be nothing to learn
    assert np.mean(fitting[4::5]) > 3 * np.mean(fitting[1::5])  # the abstract ones far more than the relations
    texts = [sentence["raw"] for image in images for sentence in image["sentences"]]
    assert len(set(texts)) < len(texts)


# --- What the pictures show


def test_scenes_are_made_as_promised(images):
    for image in images:
        things, ground = image["scene"]["things"], image["scene"]["ground"]
        assert 2 <= len(things) <= 5
        assert len({(thing["shape"], thing["colour"]) for thing in things}) == len(things)
        assert not {thing["colour"] for thing in things} & set(ground["colours"])
        assert len(ground["colours"]) == (1 if ground["pattern"] == "plain" else 2)
        for thing in things:
            least, most = SIZES[thing["size"]]
            assert least <= thing["box"][2] <= most
            assert thing["texture"] in TEXTURES
        for one, other in itertools.combinations(things, 2):
            assert any(lies(relation, one, other) for relation in RELATIONS)


def test_objects_colours_and_grounds_come_from_the_same_lists_in_every_split(images):
    for split in COUNTS:
        chosen = [image["scene"] for image in images if image["split"] == split]
        things = [thing for scene in chosen for thing in scene["things"]]
        assert {thing["shape"] for thing in things} == set(SHAPES)
        assert {thing["colour"] for thing in things} == set(COLOURS)
        assert {thing["texture"] for thing in things} == set(TEXTURES)
        assert {thing["size"] for thing in things} == set(SIZES)
        assert {len(scene["things"]) for scene in chosen} == {2, 3, 4, 5}
        assert {scene["ground"]["pattern"] for scene in chosen} == set(PATTERNS)
        assert {colour for scene in chosen for colour in scene["ground"]["colours"]} == set(COLOURS)


def test_regions_lie_in_the_picture_and_name_the_objects(images):
    for image in images:
        things = image["scene"]["things"]
        assert len(image["regions"]) == len(things)
        for region, thing in zip(image["regions"], things, strict=True):
            x, y, width, height = region["bbox"]
            assert region["bbox"] == thing["box"]
            assert x >= 0 < width
            assert y >= 0 < height
            assert x + width <= SIDE >= y + height
            assert region["class"] == thing["shape"]
            texture = [] if thing["texture"] == "plain" else [thing["texture"]]
            assert region["phrase"].split()[1:] == [thing["size"], *texture, thing["colour"], thing["shape"]]


def test_the_pictures_show_what_is_recorded(folder, images):
    for image in images[::5]:
        pixels = np.asarray(open_image(folder / "images" / image["filename"]), dtype=float)
        ground = np.ones((SIDE, SIDE), dtype=bool)
        for x, y, width, height in (thing["box"] for thing in image["scene"]["things"]):
            ground[y : y + height, x : x + width] = False
        colours = [np.array(COLOURS[colour], dtype=float) for colour in image["scene"]["ground"]["colours"]]
        # The distance of every pixel of the ground from the line between the ground's colours
        between = [(1 - t) * colours[0] + t * colours[-1] for t in np.linspace(0, 1, 20)]
        distance = np.min([np.linalg.norm(pixels - colour, axis=2) for colour in between], axis=0)
        assert np.mean(distance[ground] < 40) > 0.9, image["filename"]
        for thing in image["scene"]["things"]:
            x, y, width, height = thing["box"]
            inside = pixels[y : y + height, x : x + width]
            near = np.linalg.norm(inside - np.array(COLOURS[thing["colour"]]), axis=2) < 40
            assert near.mean() > 0.05, (image["filename"], thing)


# --- The files


def test_it_is_a_data_set_like_any_other(folder, images):
    manifest = load_manifest(folder / "scenes.yaml")
    samples = read_samples(manifest)
    assert samples.dataset == "scenes"
    assert samples.splits == {"train": (0, 120), "val": (120, 160), "test": (160, 200)}
    assert manifest.counts == COUNTS
    assert [i.file_name for i in samples.images] == [image["filename"] for image in images]
    assert len({c.sentid for i in samples.images for c in i.captions}) == 1000
    assert sorted(p.name for p in folder.iterdir()) == ["dataset_scenes.json", "images", "scenes.yaml"]
    assert sorted(p.name for p in (folder / "images").iterdir()) == sorted(image["filename"] for image in images)
    for name in (image["filename"] for image in images[::20]):
        with Image.open(folder / "images" / name) as picture:
            assert (picture.format, picture.mode, picture.size) == ("JPEG", "RGB", (SIDE, SIDE))


def test_default_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr(scenes, "_write_scene", lambda folder, seed, number, split: {"number": number, "split": split})
    document = json.loads((generate_scenes(tmp_path / "s").parent / "dataset_scenes.json").read_text())
    assert Counter(image["split"] for image in document["images"]) == {"train": 800, "val": 100, "test": 100}


def test_the_seed_decides_every_byte(tmp_path, folder, images):
    few = {"train": 6, "val": 2, "test": 2}
    one = contents(generate_scenes(tmp_path / "one", seed=3, **few).parent)
    assert one == contents(generate_scenes(tmp_path / "deep" / "two", seed=3, **few).parent)
    other = contents(generate_scenes(tmp_path / "other", seed=4, **few).parent)
    assert one.keys() == other.keys()
    assert all(one[name] != other[name] for name in one)
    # A picture depends on seed and number alone: a larger set begins with the same ones
    again = json.loads(one["dataset_scenes.json"])["images"]
    for number, image in enumerate(again):
        name = f"images/{image['filename']}"
        assert one[name] == (folder / name).read_bytes()
        assert image == images[number] | {"split": image["split"]}


def test_another_process_draws_the_same(tmp_path):
    """Nothing depends on the order of a set, which differs from process to process."""
    here = contents(generate_scenes(tmp_path / "here", train=3, val=1, test=1).parent)
    code = (
        "from xret.pipeline.data.scenes.generate import *;"
        f"generate_scenes({str(tmp_path / 'there')!r}, train=3, val=1, test=1)"
    )
    for hash_seed in ("1", "2"):
        subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONHASHSEED": hash_seed})
        assert contents(tmp_path / "there") == here
        for path in sorted((tmp_path / "there").rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()


def test_scenes_that_are_there_are_left_alone(tmp_path, monkeypatch):
    path = generate_scenes(tmp_path / "s", train=2, val=1, test=1)
    monkeypatch.setattr(scenes, "_write_scene", None)
    assert generate_scenes(tmp_path / "s", train=2, val=1, test=1) == path
    for words in ({"seed": 1, "train": 2}, {"train": 3}):
        with pytest.raises(ManifestError, match="holds something else; remove it, or name a new folder"):
            generate_scenes(tmp_path / "s", **words, val=1, test=1)


def test_a_foreign_folder_is_refused_and_left_alone(tmp_path):
    for name in ("thesis.txt", "scenes.yaml"):
        foreign = tmp_path / name.partition(".")[0]
        foreign.mkdir()
        (foreign / name).write_bytes(b"mine \xff")
        with pytest.raises(ManifestError, match=f"{foreign} holds something else"):
            generate_scenes(foreign, train=1, val=1, test=1)
        assert contents(foreign) == {name: b"mine \xff"}
    with pytest.raises(ManifestError, match="holds something else"):
        generate_scenes(tmp_path / "thesis" / "thesis.txt", train=1, val=1, test=1)
    with pytest.raises(ManifestError, match="holds something else"):
        generate_scenes("/", train=1, val=1, test=1)


def test_an_empty_folder_will_do(tmp_path):
    (tmp_path / "empty").mkdir()
    assert generate_scenes(tmp_path / "empty", train=1, val=1, test=1).is_file()


def test_where_nothing_can_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ManifestError, match=r"s cannot be written: Not a directory; name another folder"):
        generate_scenes(tmp_path / "file" / "s", train=1, val=1, test=1)

    def full(*_args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(scenes, "_write_scene", full)
    with pytest.raises(ManifestError, match=r"s cannot be written: No space left on device; name another"):
        generate_scenes(tmp_path / "s", train=1, val=1, test=1)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_killed_half_way_nothing_looks_whole(tmp_path):
    target = tmp_path / "s"
    code = f"from xret.pipeline.data.scenes.generate import *; generate_scenes({str(target)!r}, train=20_000)"
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        while len(list(tmp_path.glob(".s.*.partial/images/*"))) < 5:
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    assert not target.exists()
    (part,) = tmp_path.iterdir()
    assert not (part / "scenes.yaml").exists()
    few = {"train": 3, "val": 1, "test": 1}
    after = generate_scenes(target, **few).parent
    assert not part.exists()
    assert contents(after) == contents(generate_scenes(tmp_path / "clean", **few).parent)
