"""The published layouts: their lists, and the same numbers in each of them."""

import pytest
import torch
from butd_files import ANCHORS, BOX, MOVED, RPN, as_milvlg, draw
from torchvision.models import resnet101

from xret.pipeline.encoders.detectors.butd_checkpoints import DETECTORS, GRIDS, convert, read_layout
from xret.pipeline.encoders.detectors.butd_network import DetectorNetwork, GridNetwork
from xret.pipeline.errors import EncoderError


@pytest.fixture(scope="module")
def airsplay():
    return draw("airsplay")


@pytest.fixture(scope="module")
def converted(airsplay):
    return convert(airsplay, DETECTORS, "FILE")


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_the_grids_list_is_that_of_torchvisions_resnet():
    places = {"conv1": "base.0", "bn1": "base.1", "layer1": "base.4", "layer2": "base.5", "layer3": "base.6"}
    places["layer4"] = "top.0"
    expected = {}
    with torch.device("meta"):
        state = resnet101().state_dict()
    for name, value in state.items():
        part, _, rest = name.partition(".")
        if part != "fc" and not name.endswith("num_batches_tracked"):
            expected[f"{places[part]}.{rest}"] = list(value.shape)
    assert read_layout("vse_infty") == (expected, frozenset())


@pytest.mark.parametrize(("layout", "logits", "boxes"), [("airsplay", 12, 6400), ("milvlg", 24, 6404)])
def test_the_detectors_lists_count_what_the_papers_network_has(layout, logits, boxes):
    shapes, optional = read_layout(layout)
    counted = {name: torch.Size(shape).numel() for name, shape in shapes.items()}
    assert sum(name.endswith("norm.running_var") for name in shapes) == 104  # convolutions of a ResNet-101
    backbone = sum(n for name, n in counted.items() if name.startswith(("backbone", "roi_heads.res5")))
    assert backbone == 42_500_160 + 2 * 52_672  # torchvision's ResNet-101 without its classes, and the statistics
    rpn = sum(n for name, n in counted.items() if name.startswith(RPN))
    assert rpn == 512 * (9 * 1024 + 1) + 513 * (logits + 48)
    heads = {name: n for name, n in counted.items() if name.startswith(BOX)}
    assert sum(heads.values()) == 2049 * (1601 + boxes) + 256 * 1601 + 512 * 2305 + 401 * 513
    assert optional == {name for name in heads if "attr" in name or "embed" in name} | {ANCHORS}
    assert len(shapes) == 5 * 104 + 6 + 9 + 1


@pytest.mark.parametrize(("layout", "network"), [("milvlg", DetectorNetwork), ("vse_infty", GridNetwork)])
def test_every_weight_of_the_network_is_filled(layout, network):
    shapes, _ = read_layout(layout)
    state = convert(
        {name: torch.zeros(1).expand(shape) for name, shape in shapes.items() if name != ANCHORS}, (layout,), ""
    )
    with torch.device("meta"):
        own = {name: value.shape for name, value in network().state_dict().items() if "num_batches" not in name}
    assert {name: value.shape for name, value in state.items()} == own


def test_both_layouts_of_the_same_numbers_are_one_network(airsplay, converted):
    assert same(convert(as_milvlg(airsplay), DETECTORS, "FILE"), converted)


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
    assert same(convert(other, DETECTORS, "FILE"), converted)
    assert same(convert(as_milvlg(other), DETECTORS, "FILE"), converted)


def test_without_anchors_their_order_is_caffes(airsplay, converted):
    assert same(convert({k: v for k, v in airsplay.items() if k != ANCHORS}, DETECTORS, "FILE"), converted)


def test_other_anchors_are_refused(airsplay):
    for anchors in (MOVED / 16, MOVED[[0] * 12]):
        with pytest.raises(EncoderError, match=r"FILE: its anchors .* not those of 64 to 512 pixels"):
            convert({**airsplay, ANCHORS: anchors}, DETECTORS, "FILE")


def test_counters_and_half_precision_do_not_matter(airsplay, converted):
    counters = {f"{k.removesuffix('running_var')}num_batches_tracked": torch.tensor(0) for k in airsplay if "_var" in k}
    assert same(convert({**airsplay, **counters}, DETECTORS, "FILE"), converted)
    half = convert(
        {**airsplay, "backbone.stem.conv1.weight": airsplay["backbone.stem.conv1.weight"].half()}, DETECTORS, ""
    )
    assert {value.dtype for value in half.values()} == {torch.float32}


def test_a_file_without_attributes_is_taken(airsplay, converted):
    state = convert({k: v for k, v in airsplay.items() if "attr" not in k and "embed" not in k}, DETECTORS, "FILE")
    assert state.keys() == {name for name in converted if "attribute" not in name and "embedding" not in name}


def test_what_does_not_fit_is_listed_by_the_files_own_names(airsplay):
    wrong = dict(as_milvlg(airsplay))
    del wrong["backbone.res4.22.conv3.norm.bias"], wrong[f"{RPN}conv.bias"]
    for number in "123":
        del wrong[f"roi_heads.res5.0.conv{number}.weight"]
    wrong |= {"mask.weight": torch.ones(1), f"{BOX}cls_score.bias": torch.ones(81)}
    with pytest.raises(EncoderError) as caught:
        convert(wrong, DETECTORS, "FILE")
    message = str(caught.value)
    assert message.startswith(
        "FILE: these weights do not fit the bottom-up-attention network in the layout of milvlg: "
    )
    assert f"5 missing (backbone.res4.22.conv3.norm.bias, {RPN}conv.bias, roi_heads.res5.0.conv1.weight" in message
    assert "1 unknown (mask.weight)" in message
    assert f"1 of another shape ({BOX}cls_score.bias ([81] in place of [1601]))" in message


def test_a_grids_weights_are_no_detector(airsplay):
    shapes, _ = read_layout("vse_infty")
    weights = {name: torch.zeros(1).expand(shape) for name, shape in shapes.items()}
    with pytest.raises(EncoderError, match=r"530 missing .*; 520 unknown \(base\.0\.weight"):
        convert(weights, DETECTORS, "FILE")
    with pytest.raises(EncoderError, match="layout of vse_infty: 520 missing"):
        convert(airsplay, GRIDS, "FILE")
