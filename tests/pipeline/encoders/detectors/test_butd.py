"""Bottom-up attention end to end: pictures in, regions or cells out, from files in the published layouts."""

import numpy as np
import pytest
import torch
from butd_files import caffe_resnet, vse_infty
from encoder_contract import RegionContract, image_encoder, picture, refused
from PIL import Image

from xret.pipeline.encoders.detectors import butd_network
from xret.pipeline.encoders.detectors.butd import MEAN, ButdEncoder, _resized


def small(encoder, proposals=12):
    """Make an encoder quick: small images, and few proposals."""
    encoder._shorter, encoder._longer, encoder._proposals = 64, 160, proposals
    return encoder


@pytest.fixture(autouse=True)
def small_pools(monkeypatch, request):
    """Pool regions to 4×4 in place of 14×14, which is twelve times as quick."""
    if "slow" not in request.keywords:
        monkeypatch.setattr(butd_network, "_POOLED", 4)


@pytest.fixture(scope="module")
def random():
    return small(image_encoder("butd", "random:0", regions=(3, 8)))


class TestRegions(RegionContract):
    classes = range(1600)
    beyond = -1  # they are the last pixels inside

    @pytest.fixture
    def encoder(self, random):
        return random

    def test_proposals_have_16_pixels_of_the_picture_as_it_came(self, encoder, tmp_path):
        for size in ((150, 120), (90, 200)):
            boxes = encoder.encode([encoder.decode(picture(tmp_path / "p.png", size))[0]])[0].boxes
            scale = 64 / min(size)
            assert ((boxes[:, 2:] - boxes[:, :2]) * scale + 1 >= 16 * scale - 1e-3).all()

    def test_a_box_is_the_one_its_feature_was_pooled_from(self, encoder, tmp_path):
        image = encoder.decode(picture(tmp_path / "p.png", (150, 120)))[0]
        regions = encoder.encode([image])[0]
        scale = 64 / 120
        with torch.inference_mode():
            maps = encoder._network.backbone((image.pixels - torch.tensor(MEAN)[:, None, None])[None])
            features = encoder._network.region_features(maps, torch.from_numpy(regions.boxes * scale))
            scores = encoder._network.predictor(features)
        np.testing.assert_allclose(features, regions.local, atol=1e-3)
        picked = scores[torch.arange(len(features)), torch.from_numpy(regions.classes)].numpy()
        kept = regions.scores > 0
        assert kept.any()
        np.testing.assert_allclose(picked[kept], regions.scores[kept], atol=1e-4)


@pytest.mark.parametrize(
    ("size", "resized"),
    [
        ((300, 200), (900, 600)),
        ((480, 640), (600, 800)),
        ((400, 100), (1000, 250)),
        ((1000, 601), (998, 600)),
        ((3000, 2000), (900, 600)),
        ((1, 1), (600, 600)),
        ((100, 1), (1000, 10)),
    ],
)
def test_pictures_are_resized_as_published(tmp_path, size, resized):
    encoder = ButdEncoder.__new__(ButdEncoder)
    encoder._shorter, encoder._longer = 600, 1000
    Image.new("RGB", size, (200, 30, 90)).save(tmp_path / "p.png")
    image, original = encoder.decode(tmp_path / "p.png")
    assert original == image.size == size
    assert image.pixels.shape == (3, resized[1], resized[0])
    assert image.pixels.dtype == torch.float32
    colour = torch.tensor([90.0, 30, 200])[:, None, None]  # blue first, not divided
    assert (image.pixels - colour).abs().max() < 1e-3


def bilinear_by_hand(image, height, width):
    """Weigh the four nearest pixels about each centre, as OpenCV's INTER_LINEAR; outside, the border goes on."""
    result = np.zeros((height, width, 3))
    for row in range(height):
        for column in range(width):
            y = (row + 0.5) * image.shape[0] / height - 0.5
            x = (column + 0.5) * image.shape[1] / width - 0.5
            for dy in (0, 1):
                for dx in (0, 1):
                    near = int(np.floor(y)) + dy, int(np.floor(x)) + dx
                    weight = (1 - abs(y - near[0])) * (1 - abs(x - near[1]))
                    inside = np.clip(near, 0, np.array(image.shape[:2]) - 1)
                    result[row, column] += weight * image[inside[0], inside[1]]
    return result


def test_pixels_are_interpolated_without_smoothing(tmp_path):
    numbers = np.random.default_rng(0).integers(0, 256, (33, 21, 3), dtype=np.uint8)
    Image.fromarray(numbers).save(tmp_path / "p.png")
    pixels = _resized(Image.open(tmp_path / "p.png"), 16, 16)
    expected = bilinear_by_hand(numbers.astype(float), 16, 16)[:, :, ::-1].transpose(2, 0, 1)
    np.testing.assert_allclose(pixels.numpy(), expected, atol=1e-3)


def test_nothing_of_it_can_be_downloaded():
    refused("no weights of butd can be downloaded", image_encoder, "butd", "imagenet", regions=(36, 36))


def test_the_grid_of_vse_inftys_file(tmp_path):
    halves = vse_infty(caffe_resnet())
    path = tmp_path / "original_updown_backbone.pth"
    torch.save({name: half.state_dict() for name, half in halves.items()}, path)
    encoder = image_encoder("butd-grid", str(path), 96)
    path.unlink()
    pixels = encoder.decode(picture(tmp_path / "p.png", (40, 90)))[0][None]
    local, _ = encoder.encode(pixels)
    with torch.inference_mode():
        maps = halves["top"](halves["base"](pixels - torch.tensor(MEAN)[:, None, None])).numpy()
    assert maps.std() > 0.1
    assert (local.shape, encoder.rows) == ((1, 9, 2048), 9)
    for cell in range(9):
        np.testing.assert_allclose(local[0, cell], maps[0, :, cell // 3, cell % 3], rtol=1e-3, atol=1e-2)
