"""Pictures of a page: as the network saw them, cut where a box is, and held once."""

import base64
import io
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from torchvision.transforms import functional as transforms

from xret.heads.report.pictures import SIDE, Pictures, input_of
from xret.pipeline.data.sources import FOLDER, FolderReader

pytestmark = pytest.mark.usefixtures("one_thread")


def holding(name):
    """Return what stands for a store of one picture."""

    def opened(folder, *_):
        return FolderReader(folder)

    return SimpleNamespace(file_names=lambda *_: [name], dataset="x", images=1, source=FOLDER, open_pictures=opened)


def test_a_picture_is_shown_as_the_network_saw_it(tmp_path):
    across, down = np.meshgrid(np.linspace(0, 255, 320), np.linspace(0, 255, 200))
    Image.fromarray(np.stack([across, down, 0 * down], 2).astype(np.uint8)).save(tmp_path / "a.png")
    features = SimpleNamespace(kind="grid", identity={"preprocessing": {"resize": 256, "crop": 224}})
    held = Pictures(holding("a.png"), tmp_path).hold("a.png", input_of(features))
    shown = np.asarray(Image.open(io.BytesIO(base64.b64decode(held.data)))).astype(float)
    resized = transforms.resize(Image.open(tmp_path / "a.png"), [256])
    expected = np.asarray(transforms.center_crop(resized, [224]).resize((SIDE, SIDE))).astype(float)
    assert held.size == (SIDE, SIDE)
    assert np.abs(shown - expected).mean() < 3
    features.identity = {"preprocessing": {"stretch": 64}}
    assert input_of(features) == ("stretch", 1.0)
    features.identity = {}
    assert input_of(features) is None


def test_a_video_is_shown_by_its_first_frame(tmp_path):
    (tmp_path / "clip").mkdir()
    for name, colour in (("10.png", "blue"), ("9.png", "red")):
        Image.new("RGB", (400, 200), colour).save(tmp_path / "clip" / name)
    pictures = Pictures(holding("clip"), tmp_path)
    held = pictures.hold("clip")
    shown = Image.open(io.BytesIO(base64.b64decode(held.data)))
    assert held.size == shown.size == (SIDE, SIDE // 2)
    np.testing.assert_allclose(shown.getpixel((20, 20)), (255, 0, 0), atol=3)
    assert not pictures.unreadable


def test_a_crop_is_cut_where_its_box_is(tmp_path):
    pixels = np.zeros((40, 60, 3), dtype=np.uint8)
    pixels[8:24, 16:48] = (0, 0, 255)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    pictures = Pictures(holding("a.png"), tmp_path)
    held = pictures.hold("a.png", (16, 8, 48, 24))
    shown = np.asarray(Image.open(io.BytesIO(base64.b64decode(held.data)))).astype(int)
    assert shown.shape == (16, 32, 3)
    assert np.abs(shown - (0, 0, 255)).max() < 6
    assert pictures.hold("a.png").key != held.key


def test_a_picture_is_held_once(folder, view):
    pictures = Pictures(view.cache, folder)
    shown = [pictures.show("60.jpg", 'a "quoted" <one>') for _ in range(3)]
    assert len(pictures.held) == 1
    assert shown[0] == shown[2]
    assert 'aria-label="a &quot;quoted&quot; &lt;one&gt;"' in shown[0]
