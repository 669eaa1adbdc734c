"""Objects on plain ground: found where they were drawn, and described by hand."""

import json

import numpy as np
import pytest
import torch
from encoder_contract import image_encoder
from PIL import Image, ImageDraw
from torchvision.ops import box_iou

from xret.demo.generate import generate_scenes


def test_a_made_picture():
    image = Image.new("RGB", (90, 60), (200, 200, 200))
    pen = ImageDraw.Draw(image)
    pen.rectangle((2, 22, 17, 37), fill=(250, 0, 0))  # the left ninth of the middle row
    pen.rectangle((64, 44, 79, 47), fill=(0, 0, 250))  # bottom right, its lower half white
    pen.rectangle((64, 48, 79, 51), fill=(255, 255, 255))
    pen.point((45, 30), fill=(0, 0, 0))  # a speck
    encoder = image_encoder("plain-ground")
    decoded, size = encoder.decode(image)
    (found,) = encoder.encode([decoded])
    assert size == found.size == (90, 60)
    assert found.boxes.tolist() == [[2, 22, 18, 38], [64, 44, 80, 52]]
    for row, halves, bins, ninth in zip(
        found.local,
        ([(250, 0, 0)] * 2, [(0, 0, 250), (255, 255, 255)]),
        ({18: 1.0}, {2: 0.5, 26: 0.5}),
        (3, 8),
        strict=True,
    ):
        thumbnail, colours, places, width = np.split(row, [192, 219, 228])
        expected = np.repeat(halves, 32, axis=0).reshape(8, 8, 3) / 255
        np.testing.assert_allclose(thumbnail.reshape(8, 8, 3), expected, atol=1e-6)
        assert {at: share for at, share in enumerate(colours.tolist()) if share} == bins
        assert places.tolist() == np.eye(9)[ninth].tolist()
        assert width == pytest.approx(16 / 90)


def test_nothing_but_ground_is_one_region():
    encoder = image_encoder("plain-ground")
    (found,) = encoder.encode([Image.new("RGB", (30, 20), (9, 9, 9))])
    assert (found.boxes.tolist(), found.local.shape) == ([[0, 0, 30, 20]], (1, 229))


def test_every_object_of_a_scene_is_found(tmp_path):
    folder = generate_scenes(tmp_path / "scenes", seed=1, train=40, val=1, test=1).parent
    encoder = image_encoder("plain-ground")
    for image in json.loads((folder / "dataset_scenes.json").read_text())["images"]:
        (found,) = encoder.encode([encoder.decode(folder / "images" / image["filename"])[0]])
        drawn = torch.tensor([[x, y, x + w, y + h] for x, y, w, h in (one["bbox"] for one in image["regions"])])
        overlaps = box_iou(drawn.float(), torch.from_numpy(found.boxes))
        assert overlaps.shape == (4, 4) and overlaps.max(1).values.min() > 0.4  # a heart does not fill its box
