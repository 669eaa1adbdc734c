"""The detector's parts: a stage of torchvision's ResNet-101 turned into Caffe's, pooling by loops, heads by hand."""

import math

import numpy as np
import pytest
import torch
from butd_files import caffe_resnet
from torch import nn

from xret.pipeline.encoders.detectors.butd_checkpoints import rename
from xret.pipeline.encoders.detectors.butd_network import DetectorNetwork, Predictor, ProposalHead, stage


@pytest.fixture(scope="module")
def network():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return DetectorNetwork().eval().requires_grad_(False)


def test_the_detectors_last_stage_is_dilated_in_place_of_its_stride():
    layer4, last = caffe_resnet().layer4, stage(3, 1024, 512, 1, dilation=2).eval()
    last.load_state_dict({rename(f"top.0.{name}")[5:]: value for name, value in layer4.state_dict().items()})
    maps = torch.randn(1, 1024, 5, 4, generator=torch.Generator().manual_seed(0))
    for convolution in (layer4[0].conv1, layer4[0].downsample[0]):
        convolution.stride = (1, 1)
    for block in layer4:
        block.conv2.dilation = block.conv2.padding = (2, 2)
    expected = layer4(maps)
    assert expected.shape == (1, 2048, 5, 4)
    torch.testing.assert_close(last(maps), expected, rtol=1e-4, atol=1e-4)


def pooled_by_hand(maps, box, size=14):
    """Pool one box as Caffe does: whole cells, at least one, overlapping parts, zero for empty ones."""

    def away(value):
        return math.floor(value + 0.5)

    x1, y1, x2, y2 = (away(float(value) / 16) for value in box)
    width, height = max(x2 - x1 + 1, 1), max(y2 - y1 + 1, 1)
    result = np.zeros((maps.shape[0], size, size), dtype=np.float32)
    for row in range(size):
        for column in range(size):
            top = min(max(math.floor(row * height / size) + y1, 0), maps.shape[1])
            bottom = min(max(math.ceil((row + 1) * height / size) + y1, 0), maps.shape[1])
            left = min(max(math.floor(column * width / size) + x1, 0), maps.shape[2])
            right = min(max(math.ceil((column + 1) * width / size) + x1, 0), maps.shape[2])
            if top < bottom and left < right:
                result[:, row, column] = maps[:, top:bottom, left:right].max((1, 2))
    return result


def test_regions_are_pooled_as_a_loop_does(network, monkeypatch):
    random = np.random.default_rng(0)
    maps = random.standard_normal((5, 20, 30)).astype(np.float32)
    corner, extent = random.random((12, 2)) * [479, 319], random.random((12, 2)) * [479, 319]
    boxes = np.concatenate([corner, np.minimum(corner + extent, [479, 319])], 1).astype(np.float32)
    boxes[0] = [0, 0, 479, 319]
    boxes[1] = [100, 100, 100, 100]
    boxes[2] = [8, 24, 40, 56]  # halves of a cell
    seen = []

    class Seen(nn.Module):
        def forward(self, pooled):
            seen.append(pooled)
            return pooled

    monkeypatch.setattr(network, "res5", Seen())
    features = network.region_features(torch.from_numpy(maps)[None], torch.from_numpy(boxes))
    expected = np.stack([pooled_by_hand(maps, box) for box in boxes])
    np.testing.assert_array_equal(seen[0].numpy(), expected)
    np.testing.assert_allclose(features.numpy(), expected.mean((2, 3)), atol=1e-5)


def test_logits_and_deltas_go_by_row_cell_and_anchor():
    head = ProposalHead().requires_grad_(False)
    for module in (head.conv, head.objectness_logits, head.anchor_deltas):
        module.weight.zero_()
        module.bias.zero_()
    head.conv.weight[0, 0, 1, 1] = 1  # hidden channel 0 is channel 0 of the map
    head.objectness_logits.weight[:, 0] = 100
    head.objectness_logits.bias[:] = torch.arange(12)
    head.anchor_deltas.weight[:, 0] = 100
    head.anchor_deltas.bias[:] = torch.arange(48)
    maps = torch.zeros(1, 1024, 2, 3)
    maps[0, 0] = torch.arange(6).reshape(2, 3)
    logits, deltas = head(maps)
    assert logits.tolist() == [100 * cell + anchor for cell in range(6) for anchor in range(12)]
    assert deltas.reshape(6, 48).tolist() == [[100 * cell + row for row in range(48)] for cell in range(6)]


def test_proposals_come_from_the_anchors_of_their_cell(network, monkeypatch):
    maps, wanted = torch.zeros(1, 1024, 20, 20), (9 * 20 + 11) * 12 + 4  # row 9, column 11, the square of 64 pixels

    class Head(nn.Module):
        def forward(self, _):
            logits, deltas = torch.zeros(20 * 20 * 12), torch.zeros(20 * 20 * 12, 4)
            logits[wanted], deltas[wanted, 1] = 5, 0.25
            return logits, deltas

    monkeypatch.setattr(network, "rpn", Head())
    boxes = network.propose(maps, 320, 320, 16)
    # [-24, -24, 39, 39] about (8, 8), moved by (176, 144), then down by 16; 64 wide.
    assert boxes[0].tolist() == [152, 136, 216, 200]
    assert len(boxes) <= 300


def test_classes_by_hand():
    predictor = Predictor().requires_grad_(False)
    features = torch.randn(3, 2048, generator=torch.Generator().manual_seed(0))
    logits = features.numpy() @ predictor.cls_score.weight.numpy().T + predictor.cls_score.bias.numpy()
    shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    np.testing.assert_allclose(predictor(features).numpy(), shares[:, 1:], atol=1e-6)
