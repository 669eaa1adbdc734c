"""torchvision's detector as regions: its own parts run one by one, and what bad input gets."""

import numpy as np
import pytest
import torch
from encoder_contract import RegionContract, image_encoder, picture, refused
from PIL import Image
from torchvision.transforms.functional import pil_to_tensor


def load(weights, regions):
    return image_encoder("fasterrcnn_resnet50_fpn_v2", weights, regions=regions)


def small(encoder):
    """Make an encoder quick: small images, and few proposals."""
    encoder._network.transform.min_size, encoder._network.transform.max_size = (96,), 160
    encoder._network.rpn._post_nms_top_n["testing"] = 20
    return encoder


@pytest.fixture(scope="module")
def encoder_of_module():
    return small(load("random:0", (3, 8)))


class TestRegions(RegionContract):
    classes = range(1, 91)

    @pytest.fixture
    def encoder(self, encoder_of_module):
        return encoder_of_module

    def test_box_feature_and_score_belong_together(self, encoder, tmp_path):
        path = picture(tmp_path / "p.png", (150, 120))
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


def test_it_has_a_thousand_regions_at_most():
    refused("from 1 to 1000", load, "random:0", (1, 1001))
