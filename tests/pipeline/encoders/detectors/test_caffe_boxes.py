"""Anchors, regressions and proposals, against published numbers, hand calculations and loops."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xret.pipeline.encoders.detectors.caffe_boxes import cell_anchors, clip, corners, decode, grid_anchors, propose

# What py-faster-rcnn's generate_anchors prints for scales 8, 16 and 32, and before each ratio the box of scale 4.
PUBLISHED = [
    [-38, -16, 53, 31], [-84, -40, 99, 55], [-176, -88, 191, 103], [-360, -184, 375, 199], [-24, -24, 39, 39],
    [-56, -56, 71, 71], [-120, -120, 135, 135], [-248, -248, 263, 263], [-14, -36, 29, 51], [-36, -80, 51, 95],
    [-80, -168, 95, 183], [-168, -344, 183, 359],
]  # fmt: skip


def test_anchors_are_the_published_ones():
    assert cell_anchors().tolist() == PUBLISHED


def test_anchors_go_row_by_row():
    anchors = grid_anchors(2, 3, torch.device("cpu")).reshape(2, 3, 12, 4)
    for y in range(2):
        for x in range(3):
            expected = [[a + 16 * x, b + 16 * y, c + 16 * x, d + 16 * y] for a, b, c, d in PUBLISHED]
            assert anchors[y, x].tolist() == expected


def test_a_regression_by_hand():
    boxes = torch.tensor([[10.0, 20, 29, 59], [0, 0, 0, 0]])  # 20×40 pixels about (20, 40), and one pixel
    deltas = torch.tensor([[0.5, -0.25, math.log(2), 0], [0, 0, 0, 99]])
    moved, huge = decode(boxes, deltas).tolist()
    assert moved == pytest.approx([10, 10, 50, 50])  # 40×40 about (30, 30)
    assert huge == pytest.approx([0, 0.5 - 31.25, 1, 0.5 + 31.25])  # no side grows more than 62.5 times


def test_boxes_end_at_the_last_pixel():
    boxes = torch.tensor([[-5.0, -1, 700, 30], [3, 4, 5, 6], [900, 2, 950, 3]])
    assert clip(boxes, 20, 640).tolist() == [[0, 0, 639, 19], [3, 4, 5, 6], [639, 2, 639, 3]]
    assert corners(boxes[1:2]).tolist() == [[3, 4, 6, 7]]


def overlap(a, b):
    """Count pixels, ends included."""
    inside = [min(a[2 + k], b[2 + k]) - max(a[k], b[k]) + 1 for k in (0, 1)]
    if min(inside) <= 0:
        return 0.0
    common = inside[0] * inside[1]
    areas = [(box[2] - box[0] + 1) * (box[3] - box[1] + 1) for box in (a, b)]
    return common / (sum(areas) - common)


def proposals_by_hand(boxes, objectness, smallest, before, after, most):
    large = [n for n, box in enumerate(boxes) if min(box[2] - box[0] + 1, box[3] - box[1] + 1) >= smallest] or list(
        range(len(boxes))
    )
    kept = []
    for n in sorted(large, key=lambda n: -objectness[n])[:before]:
        if all(overlap(boxes[n], boxes[other]) <= most for other in kept):
            kept.append(n)
    return kept[:after]


box = st.tuples(st.integers(0, 20), st.integers(0, 20), st.integers(0, 20), st.integers(0, 20)).map(
    lambda b: [b[0], b[1], b[0] + b[2], b[1] + b[3]]
)


@settings(max_examples=60, deadline=None)
@given(
    boxes=st.lists(st.tuples(box, st.integers(0, 9)), min_size=1, max_size=14),
    smallest=st.sampled_from([1, 5, 9.5, 40]),
    before=st.integers(1, 15),
    after=st.integers(1, 8),
    most=st.sampled_from([0.31, 0.69]),
)
def test_proposals_are_those_of_a_loop(boxes, smallest, before, after, most):
    coordinates, objectness = [list(b) for b, _ in boxes], [float(score) for _, score in boxes]
    chosen = propose(torch.tensor(coordinates).float(), torch.tensor(objectness), smallest, before, after, most)
    assert chosen.tolist() == proposals_by_hand(coordinates, objectness, smallest, before, after, most)


def test_in_a_tiny_image_small_boxes_may_stay():
    boxes = torch.tensor([[0.0, 0, 3, 3], [0, 0, 900, 3]])
    assert propose(boxes, torch.tensor([1.0, 2.0]), 16).tolist() == [1, 0]
