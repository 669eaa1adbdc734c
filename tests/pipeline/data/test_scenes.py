"""Generated scenes: the same for the same seed, truly described, and often described alike."""

import itertools
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from xret.pipeline.data.images import open_image
from xret.pipeline.data.manifest import load_manifest
from xret.pipeline.data.samples import read_samples
from xret.pipeline.data.scenes.generate import generate_scenes
from xret.pipeline.data.scenes.pictures import COLOURS
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
    return {
        "to the left of": x1 + w1 <= x2,
        "to the right of": x2 + w2 <= x1,
        "above": y1 + h1 <= y2,
        "below": y2 + h2 <= y1,
    }[relation]


def in_place(place: str, thing: dict) -> bool:
    x, y, width, height = thing["box"]
    ninths = [("top left", "top", "top right"), ("left", "middle", "right"), ("bottom left", "bottom", "bottom right")]
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


def test_every_caption_is_true_of_its_picture(images):
    for image in images:
        for sentence in image["sentences"]:
            assert fits(sentence["claim"], image["scene"]), (image["filename"], sentence["raw"])


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


def test_the_seed_decides_every_byte(tmp_path):
    few = {"train": 6, "val": 2, "test": 2}
    one = contents(generate_scenes(tmp_path / "one", seed=3, **few).parent)
    assert one == contents(generate_scenes(tmp_path / "deep" / "two", seed=3, **few).parent)
    other = contents(generate_scenes(tmp_path / "other", seed=4, **few).parent)
    assert one.keys() == other.keys()
    assert all(one[name] != other[name] for name in one)


def test_a_foreign_folder_is_refused_and_left_alone(tmp_path):
    for name in ("thesis.txt", "scenes.yaml"):
        foreign = tmp_path / name.partition(".")[0]
        foreign.mkdir()
        (foreign / name).write_bytes(b"mine \xff")
        with pytest.raises(ManifestError, match=f"{foreign} holds something else"):
            generate_scenes(foreign, train=1, val=1, test=1)
        assert contents(foreign) == {name: b"mine \xff"}


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
