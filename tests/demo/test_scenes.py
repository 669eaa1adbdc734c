"""Generated scenes: the same for the same seed, and a true caption for each object."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from xret.demo.generate import generate_scenes
from xret.demo.pictures import COLOURS
from xret.pipeline.data.images import open_image
from xret.pipeline.data.manifest import load_manifest
from xret.pipeline.data.samples import read_samples
from xret.pipeline.errors import ManifestError

COUNTS = {"train": 120, "val": 40, "test": 40}
SIDE = 224
PLACES = (("top left", "top", "top right"), ("left", "middle", "right"), ("bottom left", "bottom", "bottom right"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return generate_scenes(tmp_path_factory.mktemp("scenes") / "set", seed=3, **COUNTS).parent


@pytest.fixture(scope="module")
def images(folder) -> list[dict]:
    return json.loads((folder / "dataset_scenes.json").read_text())["images"]


def contents(folder: Path) -> dict[str, bytes]:
    """Return every file below a folder."""
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_each_object_has_a_caption_of_its_own_that_is_true(images):
    for image in images:
        things = [(one["bbox"], one["phrase"], one["class"]) for one in image["regions"]]
        texts = [sentence["raw"] for sentence in image["sentences"]]
        for text, ((x, y, width, height), phrase, shape) in zip(texts, things, strict=True):
            said = re.fullmatch(
                r"(a (big|small) (?:striped |dotted )?(\w+) (\w+)) (?:at the (\w+(?: \w+)?)|in the middle)", text
            )
            assert said and said[1] == phrase and said[4] == shape and said[3] in COLOURS
            assert (said[2] == "big") == (width > 50)
            row, column = (int(3 * middle / SIDE) for middle in (y + height / 2, x + width / 2))
            assert (said[5] or "middle") == PLACES[row][column]
        assert len({tuple(phrase.split()[-2:]) for _, phrase, _ in things}) == 4  # no two share shape and colour


def test_the_pictures_show_what_the_captions_say(folder, images):
    for image in images[::5]:
        pixels = np.asarray(open_image(folder / "images" / image["filename"]), dtype=float)
        ground = np.ones((SIDE, SIDE), dtype=bool)
        for x, y, width, height in (one["bbox"] for one in image["regions"]):
            assert ground[y : y + height, x : x + width].all()  # none lies on another
            ground[y : y + height, x : x + width] = False
        assert np.linalg.norm(pixels[ground] - np.median(pixels[ground], axis=0), axis=1).max() < 120
        for one in image["regions"]:
            x, y, width, height = one["bbox"]
            inside, colour = pixels[y : y + height, x : x + width], one["phrase"].split()[-2]
            near = np.linalg.norm(inside - np.array(COLOURS[colour]), axis=2) < 40
            assert near.mean() > 0.03, (image["filename"], one)


def test_it_is_a_data_set_like_any_other(folder, images):
    manifest = load_manifest(folder / "scenes.yaml")
    samples = read_samples(manifest)
    assert samples.dataset == "scenes"
    assert samples.splits == {"train": (0, 120), "val": (120, 160), "test": (160, 200)}
    assert manifest.counts == COUNTS
    assert [i.file_name for i in samples.images] == [image["filename"] for image in images]
    assert len({c.sentid for i in samples.images for c in i.captions}) == 800
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
    code = f"from xret.demo.generate import *; generate_scenes({str(target)!r}, train=20_000)"
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
