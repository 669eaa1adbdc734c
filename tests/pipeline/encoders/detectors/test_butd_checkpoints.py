"""The published layouts: their lists, and the same numbers in each of them."""

import pytest
import torch
from butd_files import ANCHORS, BOX, MOVED, RPN, as_milvlg, draw
from encoder_contract import refused

from xret.pipeline.encoders.detectors.butd_checkpoints import convert
from xret.pipeline.encoders.detectors.butd_network import DetectorNetwork, GridNetwork
from xret.pipeline.encoders.spec import EncoderSpec

SPEC = EncoderSpec("butd", weights="FILE")
with torch.device("meta"):
    OWN = DetectorNetwork().state_dict()


@pytest.fixture(scope="module")
def airsplay():
    return draw()


@pytest.fixture(scope="module")
def converted(airsplay):
    return convert(airsplay, OWN, SPEC)


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_both_layouts_of_the_same_numbers_are_one_network(airsplay, converted):
    assert same(convert(as_milvlg(airsplay), OWN, SPEC), converted)


def test_rows_go_where_they_belong(airsplay, converted):
    score = airsplay[f"{BOX}cls_score.weight"]
    assert torch.equal(converted["predictor.cls_score.weight"][0], score[1600])
    assert torch.equal(converted["predictor.cls_score.weight"][1], score[0])
    assert torch.equal(converted["predictor.bbox_pred.weight"], airsplay[f"{BOX}bbox_pred.weight"])
    assert torch.equal(converted["predictor.class_embedding.weight"][7], airsplay[f"{BOX}cls_embedding.weight"][6])
    assert torch.equal(converted["predictor.attribute_score.bias"][1:], airsplay[f"{BOX}attr_score.bias"][:400])
    assert torch.equal(converted["rpn.conv.weight"], airsplay[f"{RPN}conv.weight"])
    assert torch.equal(converted["backbone.stem.norm.bias"], airsplay["backbone.stem.conv1.norm.bias"])
    name = "res5.0.shortcut.weight"
    assert torch.equal(converted[name], airsplay[f"roi_heads.{name}"])


def test_the_anchors_of_a_file_tell_the_order_of_its_rows(airsplay, converted):
    order = [scale + 4 * ratio for scale in range(4) for ratio in range(3)]  # scale by scale, as detectron2 has them
    other = dict(airsplay)
    for kind in ("weight", "bias"):
        logits, deltas = airsplay[f"{RPN}objectness_logits.{kind}"], airsplay[f"{RPN}anchor_deltas.{kind}"]
        other[f"{RPN}objectness_logits.{kind}"] = logits[order]
        other[f"{RPN}anchor_deltas.{kind}"] = torch.cat([deltas[4 * n : 4 * n + 4] for n in order])
    other[ANCHORS] = MOVED[order]
    assert same(convert(other, OWN, SPEC), converted)
    assert same(convert(as_milvlg(other), OWN, SPEC), converted)


def test_without_anchors_their_order_is_caffes(airsplay, converted):
    assert same(convert({k: v for k, v in airsplay.items() if k != ANCHORS}, OWN, SPEC), converted)


def test_other_anchors_are_refused(airsplay):
    for anchors in (MOVED / 16, MOVED[[0] * 12]):
        sentence = "FILE: its anchors .* not those of the published files"
        refused(sentence, convert, {**airsplay, ANCHORS: anchors}, OWN, SPEC)


def test_counters_and_half_precision_do_not_matter(airsplay, converted):
    counters = {f"{k.removesuffix('running_var')}num_batches_tracked": torch.tensor(0) for k in airsplay if "_var" in k}
    assert same(convert({**airsplay, **counters}, OWN, SPEC), converted)
    half = convert({**airsplay, "backbone.stem.conv1.weight": airsplay["backbone.stem.conv1.weight"].half()}, OWN, SPEC)
    assert {value.dtype for value in half.values()} == {torch.float32}


def test_a_file_without_attributes_is_taken(airsplay, converted):
    state = convert({k: v for k, v in airsplay.items() if "attr" not in k and "embed" not in k}, OWN, SPEC)
    assert state.keys() == {name for name in converted if "attribute" not in name and "embedding" not in name}


def test_what_does_not_fit_is_listed(airsplay):
    wrong = dict(as_milvlg(airsplay))
    del wrong["backbone.res4.22.conv3.norm.bias"], wrong[f"{RPN}conv.bias"]
    wrong |= {"mask.weight": torch.ones(1), f"{BOX}cls_score.bias": torch.ones(81)}
    refused(
        r"FILE: these weights do not fit 'butd': 2 missing \(backbone.res4.22.conv3.norm.bias, rpn.conv.bias\);"
        r" 1 unknown \(mask.weight\); 1 of another shape \(predictor.cls_score.bias \(\[81\] in place of \[1601\]",
        *(convert, wrong, OWN, SPEC),
    )


def test_a_detectors_weights_are_no_grids(airsplay):
    with torch.device("meta"):
        own = GridNetwork().state_dict()
    refused(r"unknown \(", convert, airsplay, own, SPEC)
