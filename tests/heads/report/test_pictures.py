"""Pictures of a page: as the network saw them, turned as EXIF says or not, and held once."""

import base64
import io
from types import SimpleNamespace

import numpy as np
import pytest
from oriented import save, shown
from PIL import Image
from timm.data import create_transform
from torchvision.transforms import functional as transforms

from xret.heads.report.attention import place_of, window_of
from xret.heads.report.examples import PageRun
from xret.heads.report.pictures import SIDE, Pictures
from xret.pipeline.data.sources import FOLDER, FolderReader

PIXELS = np.zeros((40, 60, 3), dtype=np.uint8)
PIXELS[:, :30] = (250, 20, 20)  # red on the left of the file; above, once it is turned


def pictures_of(folder, name):
    """Return the pictures of what stands for a store of one picture."""
    return Pictures(
        SimpleNamespace(
            file_names=lambda *_: [name],
            dataset="x",
            images=1,
            source=FOLDER,
            set_names=lambda _: [],
            open_pictures=lambda at, *_: FolderReader(at),
        ),
        folder,
    )


def pixels_of(picture):
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(picture.data)))).astype(float)


@pytest.mark.parametrize(
    ("preprocessing", "side", "crop"),
    [
        ({"resize": 256, "crop": 224}, [256], 224),
        ({"stretch": 64, "crop": 48}, [64, 64], 48),
        ({"stretch": 64}, [64, 64], 64),
        (None, [64, 64], 64),
    ],
)
def test_a_grid_lies_where_its_network_looks(preprocessing, side, crop):
    across, down = np.meshgrid(np.linspace(0, 250, 320), np.linspace(0, 250, 200))
    picture = Image.fromarray(np.stack([across, down, 0 * down], 2).astype(np.uint8))
    features = SimpleNamespace(identity={"preprocessing": preprocessing} if preprocessing else {})
    corner, size = window_of(features, picture.size)
    seen = np.asarray(transforms.center_crop(transforms.resize(picture, side), [crop])).astype(float)
    # A pixel of the gradient tells where it lies.
    np.testing.assert_allclose(seen[crop // 2, [0, -1], 0] / 250, [corner[0], corner[0] + size[0]], atol=0.02)
    np.testing.assert_allclose(seen[[0, -1], crop // 2, 1] / 250, [corner[1], corner[1] + size[1]], atol=0.02)


@pytest.mark.parametrize(("size", "resized"), [((320, 200), 64), ((200, 320), 80)])
def test_a_grid_reaches_beyond_a_picture_that_is_padded(size, resized):
    prepare = create_transform((3, 64, 64), crop_pct=64 / resized, crop_mode="border", mean=(0,) * 3, std=(1,) * 3)
    seen = prepare(Image.new("RGB", size, "blue"))[2] > 0.5
    corner, share = window_of(SimpleNamespace(identity={"preprocessing": {"resize": resized, "pad": 64}}), size)
    for side, inside in enumerate((seen.any(0), seen.any(1))):
        first, last = inside.nonzero()[[0, -1], 0].tolist()
        edges = [(edge - corner[side]) / share[side] * 64 for edge in (0, 1)]  # of the picture in the square
        np.testing.assert_allclose(np.clip(edges, 0, 64), [first, last + 1], atol=1)


def test_a_video_is_shown_by_its_first_frame(tmp_path):
    (tmp_path / "clip").mkdir()
    for name, colour in (("10.png", "blue"), ("9.png", "red")):
        Image.new("RGB", (400, 200), colour).save(tmp_path / "clip" / name)
    pictures = pictures_of(tmp_path, "clip")
    held = pictures.hold("clip", True)
    assert held.size == (SIDE, SIDE // 2)
    np.testing.assert_allclose(pixels_of(held)[20, 20], (255, 0, 0), atol=3)
    assert not pictures.unreadable


def test_a_page_holds_a_picture_once_as_each_set_saw_it(tmp_path):
    save(tmp_path / "a.png", PIXELS, 6)
    pictures = pictures_of(tmp_path, "a.png")
    for upright, expected in ((False, PIXELS), (True, shown(PIXELS, 6))) * 2:
        np.testing.assert_allclose(pixels_of(pictures.hold("a.png", upright)), expected, atol=60)
    assert [picture.size for picture in pictures.held] == [(60, 40), (40, 60)]
    assert pictures.hold("absent.png", True) is None
    assert "absent.png" in pictures.unreadable


@pytest.mark.parametrize("size", [(60, 40), (40, 60)])
def test_imported_boxes_lie_in_the_picture_of_their_size(tmp_path, size):
    save(tmp_path / "a.png", PIXELS, 6)
    box = np.array([[0, 0, 20, 10]], dtype=np.float32)
    arrays = {"boxes": box[None], "size": np.array([size])}
    features = SimpleNamespace(
        kind="roi", grid=None, identity={}, length=np.array([1]), array=lambda name, rows: arrays[name][rows]
    )
    batches = SimpleNamespace(image_set=features, image_rows=np.array([0]))
    seen = SimpleNamespace(batches=batches, file_names=["a.png"])
    place = place_of(PageRun("run", seen, pictures_of(tmp_path, "a.png")), 0)
    assert place.picture.size == size
    np.testing.assert_allclose(place.boxes * np.tile(size, 2), box)
