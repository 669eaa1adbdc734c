"""The choice of boxes, against a made case and the rule written as loops."""

import pytest
import torch
from encoder_contract import refused
from hypothesis import given, settings
from hypothesis import strategies as st

from xret.pipeline.encoders.detectors.regions import Selection, surviving

# Boxes 0 and 1 overlap, 2 lies apart, 3 covers 2.
OVERLAPS = torch.tensor([[1, 0.6, 0, 0], [0.6, 1, 0, 0], [0, 0, 1, 0.9], [0, 0, 0.9, 1.0]])
SCORES = torch.tensor([[0.5, 0.1, 0.0], [0.4, 0.3, 0.0], [0.1, 0.0, 0.25], [0.05, 0.0, 0.2]])


def test_a_made_case():
    # Box 2 drops 3 everywhere: where both have nothing, it comes first. Class 0 drops 1 for 0, class 1 0 for 1, and
    # class 2 1 for 0, as neither has anything.
    assert surviving(SCORES, OVERLAPS > 0.3).int().tolist() == [[1, 0, 1], [0, 1, 0], [1, 1, 1], [0, 0, 0]]
    order, classes, confidences = Selection(1, 4, 300, 0.2, 0.3).select(SCORES, OVERLAPS)
    assert order.tolist() == [0, 1, 2]
    assert classes.tolist() == [0, 1, 2]
    assert confidences.tolist() == pytest.approx([0.5, 0.3, 0.25])


@pytest.mark.parametrize(
    ("regions", "confidence", "expected"),
    [
        ((1, 4), 0.3, [0, 1]),
        ((1, 1), 0.2, [0]),
        ((3, 3), 0.9, [0, 1, 2]),
        ((4, 4), 0.9, [0, 1, 2, 3]),
        ((36, 36), 0.2, [0, 1, 2, 3]),
        ((1, 4), 0.0, [0, 1, 2, 3]),
    ],
)
def test_fewest_and_most_boxes(regions, confidence, expected):
    assert Selection(*regions, 300, confidence, 0.3).select(SCORES, OVERLAPS)[0].tolist() == expected


def test_a_box_that_survives_nowhere_keeps_its_best_class_at_no_confidence():
    order, classes, confidences = Selection(4, 4, 300, 0.2, 0.3).select(SCORES, OVERLAPS)
    assert (order[3].item(), classes[3].item(), confidences[3].item()) == (3, 2, 0)


def rule_by_hand(scores, overlaps, regions, confidence, most):
    count = len(scores)
    best = [0.0] * count
    for column in range(len(scores[0])):
        kept = []
        for n in sorted(range(count), key=lambda n: -scores[n][column]):
            if all(overlaps[n][other] <= most for other in kept):
                kept.append(n)
                best[n] = max(best[n], scores[n][column])
    wanted = sum(value >= confidence for value in best)
    ordered = sorted(range(count), key=lambda n: -best[n])
    return ordered[: min(max(wanted, regions[0]), regions[1])], best


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 9),
    classes=st.integers(1, 5),
    seed=st.integers(0, 10**6),
    levels=st.sampled_from([3, 1000]),
    fewest=st.integers(1, 4),
    more=st.integers(0, 4),
)
def test_the_rule_is_that_of_loops(count, classes, seed, levels, fewest, more):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(levels + 1, (count, classes), generator=generator) / levels
    overlaps = torch.rand(count, count, generator=generator)
    overlaps = (overlaps + overlaps.T) / 2
    regions = (fewest, fewest + more)
    order, chosen, confidences = Selection(*regions, 300, 0.4, 0.5).select(scores, overlaps)
    expected, best = rule_by_hand(scores.tolist(), overlaps.tolist(), regions, 0.4, 0.5)
    assert order.tolist() == expected
    assert confidences.tolist() == [best[n] for n in expected]
    for n, column, value in zip(order, chosen, confidences, strict=True):
        assert scores[n, column] == (value if value > 0 else scores[n].max())


@pytest.mark.parametrize("regions", [(0, 5), (6, 5), (1, 301), (-1, -1)])
def test_numbers_that_make_no_sense_are_refused(regions):
    sentence = rf"`regions` {regions[0]}-{regions[1]}: .* from 1 to 300.* have 36 or 10-100"
    refused(sentence, Selection, *regions, 300, 0.2, 0.3)
    assert Selection(1, 300, 300, 0.2, 0.3).most == 300
