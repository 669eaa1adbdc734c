"""Attention is that of the model, and lights the picture where it looks."""

import base64
import io
import re
import shutil
from functools import partial

import numpy as np
import pytest
import small_store
import torch
from PIL import Image
from small_reports import recipe_of, require_sound
from small_store import make_store

from xret.heads.report import write_report
from xret.heads.report.attention import CELLS, Place, attention_of_run, grid_boxes, slot_attention
from xret.heads.report.pictures import COVER, Picture
from xret.heads.training.train import train

pytestmark = pytest.mark.usefixtures("one_thread")


def warmth(overlay):
    """Return how far an overlay colours each of its cells, from 0 to 1."""
    data = re.search('base64,([^"]+)', overlay)[1]
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))))[..., 3] / COVER


def test_attention_is_that_of_the_model(setdiv):
    weights = slot_attention(setdiv.seen, [1, 4])
    assert weights.shape == (2, 4, 4)
    torch.testing.assert_close(weights.sum(1), torch.ones(2, 4))  # slots compete for every row
    torch.testing.assert_close(weights[1:], slot_attention(setdiv.seen, [4]))


def test_the_boxes_of_a_grid_lie_row_by_row():
    assert grid_boxes(1, 2).tolist() == [[0, 0, 0.5, 1], [0.5, 0, 1, 1]]
    assert grid_boxes(2, 3)[4].tolist() == pytest.approx([1 / 3, 1 / 2, 2 / 3, 1])
    windows = grid_boxes(3, 7, (1, 2))  # four in a row, of which the last is cut off
    assert windows.shape == (12, 4)
    assert windows[:4, 0].tolist() == pytest.approx([0, 2 / 7, 4 / 7, 6 / 7])
    assert windows[7].tolist() == pytest.approx([6 / 7, 1 / 3, 1, 2 / 3])


def test_a_grid_is_lit_where_it_is_attended_to():
    weights = np.array([0.4, 0.1, 0.0, 0.2])
    overlay = Place(Picture("p", (30, 20), ""), grid_boxes(2, 2), (2, 2)).drawn(weights, "")
    np.testing.assert_allclose(warmth(overlay), weights.reshape(2, 2) / 0.4, atol=0.01)
    outlines = re.findall('<rect x="([^"]+)" y="([^"]+)" width="([^"]+)" height="([^"]+)"', overlay)
    assert outlines == [("0.0", "0.0", "15.0", "10.0"), ("15.0", "10.0", "15.0", "10.0")]


def test_regions_are_lit_where_they_are():
    boxes = np.array([[0.0, 0.0, 0.5, 0.5], [0.25, 0.25, 1.0, 1.0], [0.0, 0.5, 0.25, 1.0]])
    weights = np.array([0.2, 0.4, 0.1])
    overlay = Place(Picture("p", (40, 20), ""), boxes, (CELLS, CELLS)).drawn(np.append(weights, 0.0), "")
    warm = warmth(overlay)
    side = len(warm)
    for row in range(side):
        for column in range(side):
            x, y = (column + 0.5) / side, (row + 0.5) / side
            inside = [w for w, (x1, y1, x2, y2) in zip(weights, boxes, strict=True) if x1 <= x <= x2 and y1 <= y <= y2]
            assert warm[row, column] == pytest.approx(max(inside, default=0) / 0.4, abs=0.01)
    assert re.findall('<rect x="([^"]+)" y="([^"]+)" width="([^"]+)"', overlay) == [
        ("10.0", "5.0", "30.0"),
        ("0.0", "0.0", "20.0"),
    ]


@pytest.mark.parametrize("size", [(40, 30), (0, 0)])  # (0, 0): imports whose source does not give it
def test_regions_of_a_store_are_drawn(tmp_path, folder, monkeypatch, size):
    write = small_store.write

    def with_places(features, arrays, *rest):
        if "size" in arrays:
            count = len(arrays["size"])
            boxes = np.tile(np.array([4.0, 3.0, 20.0, 15.0], dtype=np.float32), (count, small_store.ROWS, 1))
            arrays = {**arrays, "boxes": boxes, "size": np.tile(np.array(size, dtype=np.int32), (count, 1))}
        write(features, arrays, *rest)

    monkeypatch.setattr(small_store, "image_set", partial(small_store.image_set, extras=("boxes",)))
    monkeypatch.setattr(small_store, "write", with_places)
    store = make_store(tmp_path / "roi.zarr", image="roi")
    train(store, recipe_of("setdiv"), tmp_path / "run", device="cpu")
    write_report([tmp_path / "run"], tmp_path / "roi.html", data_root=folder, device="cpu")
    text = (tmp_path / "roi.html").read_text()
    require_sound(text)
    outlines = re.findall('<rect x="([^"]+)" y="([^"]+)" width="([^"]+)" height="([^"]+)" class="outline"', text)
    if size == (0, 0):
        assert "the store does not know how large the pictures of its regions are" in text
        assert outlines == []
        return
    assert len(outlines) == 3 * 4 * 2  # images, slots, regions
    assert set(outlines) == {("4.0", "3.0", "16.0", "12.0")}


def test_images_that_cannot_be_read_are_left_out(tmp_path, setdiv, shown, folder):
    shutil.copytree(folder / "images", tmp_path / "images")
    (tmp_path / "images" / setdiv.seen.scores.file_names[0]).write_bytes(b"no picture")
    run = shown("setdiv", tmp_path)
    count = len(run.seen.scores.ids)
    _, images, reason = attention_of_run(run, count, 0)
    assert (len(images), reason) == (count - 1, "")
    for name in run.seen.scores.file_names:
        (tmp_path / "images" / name).write_bytes(b"no picture")
    assert attention_of_run(shown("setdiv", tmp_path), count, 0) == ("", [], "the pictures cannot be read")
