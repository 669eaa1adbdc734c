"""torchvision's detector as regions: its own parts run one by one, and what bad input gets."""

import urllib.error

import numpy as np
import pytest
import torch
from encoder_contract import EncoderContract
from PIL import Image
from torchvision.models.detection import FasterRCNN_ResNet50_FPN_V2_Weights
from torchvision.transforms.functional import pil_to_tensor

from xret.pipeline.encoders.detectors.torchvision_detector import DetectorEncoder
from xret.pipeline.errors import EncoderError, SampleError


def small(encoder):
    """Make an encoder quick: small images, and few proposals."""
    encoder._network.transform.min_size, encoder._network.transform.max_size = (96,), 160
    encoder._network.rpn._post_nms_top_n["testing"] = 20
    return encoder


@pytest.fixture(scope="module")
def encoder_of_module():
    return small(DetectorEncoder("random:0", (3, 8), "cpu"))


def picture(path, size=(150, 120), seed=0):
    numbers = np.random.default_rng(seed).integers(0, 256, (size[1] // 8 + 1, size[0] // 8 + 1, 3), dtype=np.uint8)
    Image.fromarray(numbers).resize(size).save(path)
    return path


class TestRegions(EncoderContract):
    @pytest.fixture
    def encoder(self, encoder_of_module):
        return encoder_of_module

    def test_declares_itself(self, encoder):
        assert (encoder.name, encoder.kind, encoder.rows) == ("fasterrcnn_resnet50_fpn_v2", "roi", 8)
        assert (encoder.channels, encoder.global_channels) == (1024, 1024)
        assert encoder.extras == ("boxes", "classes", "scores")
        assert encoder.identity["preprocessing"]["shorter"] == 800
        assert encoder._network.rpn._post_nms_top_n["training"] > encoder.rows

    def test_regions_of_each_picture(self, encoder, tmp_path):
        sizes = [(150, 120), (90, 200)]
        decoded = [encoder.decode(picture(tmp_path / f"{i}.png", size, i)) for i, size in enumerate(sizes)]
        assert [size for _, size in decoded] == sizes
        for regions, size in zip(encoder.encode([image for image, _ in decoded]), sizes, strict=True):
            count = len(regions.local)
            assert 3 <= count <= 8
            assert (regions.local.dtype, regions.local.shape) == (np.float32, (count, 1024))
            assert (regions.boxes.dtype, regions.boxes.shape) == (np.float32, (count, 4))
            assert (regions.scores.dtype, regions.scores.shape) == (np.float32, (count,))
            assert np.issubdtype(regions.classes.dtype, np.integer) and regions.classes.shape == (count,)
            assert regions.size == size
            assert 0.05 < regions.local.std() < 10 and regions.local.max() < 100
            assert (regions.boxes >= 0).all() and (regions.boxes[:, 2:] <= np.array(size) + 1e-3).all()
            assert (regions.boxes[:, :2] < regions.boxes[:, 2:]).all()
            assert ((regions.classes >= 1) & (regions.classes <= 90)).all()
            assert (np.diff(regions.scores) <= 0).all()

    def test_a_picture_does_not_depend_on_the_others(self, encoder, tmp_path):
        pictures = [encoder.decode(picture(tmp_path / f"{i}.png", (120 + 9 * i, 100), i))[0] for i in range(2)]
        together = encoder.encode(pictures)
        for number, alone in enumerate([encoder.encode([one])[0] for one in pictures]):
            for name in ("local", "boxes", "classes", "scores"):
                assert getattr(alone, name).tobytes() == getattr(together[number], name).tobytes()
        assert np.abs(together[0].local[0] - together[1].local[0]).max() > 1e-2

    def test_box_feature_and_score_belong_together(self, encoder, tmp_path):
        path = picture(tmp_path / "p.png")
        image = encoder.decode(path)[0]
        regions = encoder.encode([image])[0]
        network = encoder._network
        with Image.open(path) as file, torch.inference_mode():
            images, _ = network.transform([pil_to_tensor(file.convert("RGB")).float() / 255])
            maps = network.backbone(images.tensors)
            scale = torch.tensor([120 / 150, 96 / 120] * 2)  # the shorter side is 96 here
            boxes = torch.from_numpy(regions.boxes) * scale
            features = network.roi_heads.box_head(
                network.roi_heads.box_roi_pool(maps, [boxes], [images.image_sizes[0]])
            )
            shares = network.roi_heads.box_predictor(features)[0].softmax(1)
        np.testing.assert_allclose(features, regions.local, atol=1e-3)
        kept = regions.scores > 0
        assert kept.any()
        picked = shares[torch.arange(len(features)), torch.from_numpy(regions.classes)].numpy()
        np.testing.assert_allclose(picked[kept], regions.scores[kept], atol=1e-4)


@pytest.mark.parametrize("size", [(1, 1), (3, 120), (64, 64)])
def test_small_and_narrow_pictures_have_regions(encoder_of_module, tmp_path, size):
    image, original = encoder_of_module.decode(picture(tmp_path / "p.png", size))
    regions = encoder_of_module.encode([image])[0]
    assert original == size
    assert 1 <= len(regions.local) <= 8
    assert np.isfinite(regions.local).all()


def test_a_picture_that_cannot_be_used_is_named(encoder_of_module, tmp_path):
    Image.new("RGB", (1, 101)).save(tmp_path / "thin.png")
    for path in (tmp_path / "thin.png", tmp_path / "absent.png"):
        with pytest.raises(SampleError) as caught:
            encoder_of_module.decode(path)
        assert caught.value.sample == str(path)


def test_random_weights_follow_from_the_seed_alone(encoder_of_module, tmp_path):
    before = torch.random.get_rng_state()
    again = small(DetectorEncoder("random:00", (3, 8), "cpu"))
    assert torch.equal(before, torch.random.get_rng_state())
    assert again.identity == encoder_of_module.identity
    image = again.decode(picture(tmp_path / "p.png"))[0]
    assert again.encode([image])[0].local.tobytes() == encoder_of_module.encode([image])[0].local.tobytes()


def test_the_downloaded_weights_are_those_of_their_file(encoder_of_module, tmp_path, monkeypatch):
    state = encoder_of_module._network.state_dict()
    monkeypatch.setattr(FasterRCNN_ResNet50_FPN_V2_Weights, "get_state_dict", lambda self, **_: state)
    torch.save(state, tmp_path / "w.pth")
    identities = [DetectorEncoder(w, (3, 8), "cpu").identity for w in ("imagenet", str(tmp_path / "w.pth"))]
    (tmp_path / "w.pth").unlink()
    assert identities[0] == identities[1]
    assert len(identities[0]["weights"]) == 64


def test_without_a_network_it_says_where_to_put_the_file(tmp_path, monkeypatch, capsys):
    def offline(*_, **__):
        raise urllib.error.URLError("no route to host")

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(torch.hub, "download_url_to_file", offline)
    with pytest.raises(EncoderError, match=r"no route.*--visual-weights FILE.*checkpoints/fasterrcnn_resnet50_fpn_v2"):
        DetectorEncoder("imagenet", (36, 36), "cpu")
    assert capsys.readouterr().out == ""  # torch's "Downloading" would spoil what --json prints


@pytest.mark.parametrize(
    ("weights", "regions", "message"),
    [
        ("imagenett", (36, 36), r"'imagenett'.*did you mean 'imagenet'"),
        ("random:x", (36, 36), "whole number"),
        ("absent.pth", (36, 36), "nor an existing file"),
        ("random:0", (5, 4), "--regions 5-4"),
        ("random:0", (1, 1001), "from 1 to 1000"),
    ],
)
def test_unknown_words_are_refused(weights, regions, message):
    with pytest.raises(EncoderError, match=message):
        DetectorEncoder(weights, regions, "cpu")


def test_weights_of_another_network_are_refused(tmp_path):
    torch.save({"model": {"backbone.stem.conv1.weight": torch.ones(64, 3, 7, 7)}}, tmp_path / "w.pth")
    with pytest.raises(EncoderError, match=r"w\.pth.*do not fit FasterRCNN: \d+ missing.*1 unknown"):
        DetectorEncoder(str(tmp_path / "w.pth"), (36, 36), "cpu")


@pytest.mark.slow
def test_a_photograph_at_full_size(shared_data):
    photograph = sorted(shared_data("flickr8k-sample").rglob("*.jpg"))[0]
    encoder = DetectorEncoder("random:0", (36, 36), "cpu")
    image, size = encoder.decode(photograph)
    regions = encoder.encode([image])[0]
    assert regions.local.shape == (36, 1024) and regions.size == size
    assert 0.05 < regions.local.std() < 10
