"""Pictures of a page: as the network saw them, cut where a box is, and held once."""

import base64
import io
from types import SimpleNamespace

import numpy as np
import pytest
from oriented import save, shown
from PIL import Image
from torchvision.transforms import functional as transforms

from xret.heads.diagnostics.crops import Images
from xret.heads.report.attention import place_of
from xret.heads.report.examples import PageRun
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
    seen = np.asarray(Image.open(io.BytesIO(base64.b64decode(held.data)))).astype(float)
    resized = transforms.resize(Image.open(tmp_path / "a.png"), [256])
    expected = np.asarray(transforms.center_crop(resized, [224]).resize((SIDE, SIDE))).astype(float)
    assert held.size == (SIDE, SIDE)
    assert np.abs(seen - expected).mean() < 3
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
    seen = Image.open(io.BytesIO(base64.b64decode(held.data)))
    assert held.size == seen.size == (SIDE, SIDE // 2)
    np.testing.assert_allclose(seen.getpixel((20, 20)), (255, 0, 0), atol=3)
    assert not pictures.unreadable


def test_a_picture_is_held_once(folder, setdiv):
    pictures = Pictures(setdiv.seen.ranker.cache, folder)
    svgs = [pictures.show("60.jpg", 'a "quoted" <one>') for _ in range(3)]
    assert len(pictures.held) == 1
    assert svgs[0] == svgs[2]
    assert 'aria-label="a &quot;quoted&quot; &lt;one&gt;"' in svgs[0]


# ---- EXIF orientations ----

PIXELS = np.zeros((40, 60, 3), dtype=np.uint8)
PIXELS[:, :30] = (250, 20, 20)  # red on the left of the file; above, once it is turned


def test_a_page_holds_a_picture_as_each_set_saw_it(tmp_path):
    save(tmp_path / "a.png", PIXELS, 6)
    pictures = Pictures(holding("a.png"), tmp_path)
    for shows, expected in ((pictures, PIXELS), (pictures.seen(True), shown(PIXELS, 6))):
        held = np.asarray(Image.open(io.BytesIO(base64.b64decode(shows.hold("a.png").data)))).astype(int)
        np.testing.assert_allclose(held, expected, atol=60)
    assert [picture.size for picture in pictures.held] == [(60, 40), (40, 60)]
    assert pictures.seen(True).hold("absent.png") is None
    assert "absent.png" in pictures.unreadable


def test_crops_are_cut_out_of_the_picture_that_the_set_saw(tmp_path):
    save(tmp_path / "a.png", PIXELS, 6)
    for upright, expected in ((False, PIXELS), (True, shown(PIXELS, 6))):
        images = Images(FolderReader(tmp_path), upright)
        assert images.size("a.png") == images.open("a.png").size
        np.testing.assert_array_equal(images.open("a.png"), expected)


@pytest.mark.parametrize("size", [(60, 40), (40, 60)])
def test_imported_boxes_lie_in_the_picture_of_their_size(tmp_path, size):
    save(tmp_path / "a.png", PIXELS, 6)
    box = np.array([[0, 0, 20, 10]], dtype=np.float32)
    arrays = {"boxes": box[None], "size": np.array([size])}
    features = SimpleNamespace(
        kind="roi", grid=None, identity={}, length=np.array([1]), array=lambda name, rows: arrays[name][rows]
    )
    batches = SimpleNamespace(image_set=features, image_rows=np.array([0]))
    seen = SimpleNamespace(batches=batches, scores=SimpleNamespace(file_names=["a.png"]))
    place = place_of(PageRun("run", seen, Pictures(holding("a.png"), tmp_path)), 0)
    assert place.picture.size == size
    np.testing.assert_allclose(place.boxes * np.tile(size, 2), box)
