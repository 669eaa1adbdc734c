"""Pages show a picture as its feature set saw it, and boxes lie where they were found."""

import base64
import io
from types import SimpleNamespace

import numpy as np
import pytest
from oriented import save, shown
from PIL import Image

from xret.heads.report.diagnostics.crops import Images
from xret.heads.report.pictures import Pictures
from xret.heads.report.sections.places import place_of
from xret.pipeline.data.sources import FOLDER, FolderReader

PIXELS = np.zeros((40, 60, 3), dtype=np.uint8)
PIXELS[:, :30] = (250, 20, 20)  # red on the left of the file; above, once it is turned


@pytest.fixture
def pictures(tmp_path):
    save(tmp_path / "a.png", PIXELS, 6)
    store = {"file_names": lambda *_: ["a.png"], "open_pictures": lambda folder, *_: FolderReader(folder)}
    return Pictures(SimpleNamespace(dataset="x", images=1, source=FOLDER, **store), tmp_path)


def pixels_of(held):
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(held.data)))).astype(int)


def test_a_page_holds_a_picture_as_each_set_saw_it(pictures):
    seen = pictures.seen(True)
    for shows, expected in ((pictures, PIXELS), (seen, shown(PIXELS, 6))):
        np.testing.assert_allclose(pixels_of(shows.hold("a.png")), expected, atol=60)
    assert [picture.size for picture in pictures.held] == [(60, 40), (40, 60)]
    crop = pixels_of(seen.hold("a.png", (0, 0, 40, 20)))
    assert crop.shape == (20, 40, 3) and (crop[..., 0] > 200).all()
    assert seen.hold("absent.png") is None and "absent.png" in pictures.unreadable


def test_crops_are_cut_out_of_the_picture_that_the_set_saw(pictures, tmp_path):
    for upright, expected in ((False, PIXELS), (True, shown(PIXELS, 6))):
        images = Images(FolderReader(tmp_path), upright)
        assert images.size("a.png") == images.open("a.png").size
        np.testing.assert_array_equal(images.open("a.png"), expected)


@pytest.mark.parametrize("size", [(60, 40), (40, 60)])
def test_imported_boxes_lie_in_the_picture_of_their_size(pictures, size):
    box = np.array([[0, 0, 20, 10]], dtype=np.float32)
    arrays = {"boxes": box[None], "size": np.array([size])}
    features = SimpleNamespace(
        kind="roi", grid=None, identity={}, length=np.array([1]), array=lambda name, rows: arrays[name][rows]
    )
    batches = SimpleNamespace(image_set=features, image_rows=np.array([0]))
    view = SimpleNamespace(batches=batches, scores=SimpleNamespace(file_names=["a.png"]))
    place = place_of(view, pictures, 0)
    assert place.picture.size == size
    np.testing.assert_allclose(place.boxes * np.tile(size, 2), box)
