"""Synthetic published weights: numbers drawn for the names and shapes of the published files."""

import torch
from torch import nn
from torchvision.models import resnet101

from xret.pipeline.encoders.detectors.butd_network import DetectorNetwork

ANCHORS = "proposal_generator.anchor_generator.cell_anchors.0"
RPN = "proposal_generator.rpn_head."
BOX = "roi_heads.box_predictor."
NAMES = {"cls_embed": "cls_embedding", "attr_linear1": "fc_attr", "attr_linear2": "attr_score"}  # MILVLG's, airsplay's
# The published pickle's anchors: those of Caffe, a pixel further to the right and down.
MOVED = torch.tensor(
    [
        [middle - x + 1, middle - y + 1, middle + x + 1, middle + y + 1]
        for width, height in ((23, 12), (16, 16), (11, 22))
        for scale in (4, 8, 16, 32)
        for middle, x, y in [(7.5, (width * scale - 1) / 2, (height * scale - 1) / 2)]
    ]
)


# How airsplay's files call the parts of the network, whose weights they have in its order; and the anchors.
_PARTS = {
    "backbone.stem.": "backbone.stem.conv1.",
    "rpn.": RPN,
    "res5.": "roi_heads.res5.",
    "predictor.class_embedding.": f"{BOX}cls_embedding.",
    "predictor.attribute_hidden.": f"{BOX}fc_attr.",
    "predictor.attribute_score.": f"{BOX}attr_score.",
    "predictor.": BOX,
}


def airsplay_shapes():
    """Return the shapes of airsplay's layout by name."""
    with torch.device("meta"):
        own = {name: value.shape for name, value in DetectorNetwork().state_dict().items() if "num_batches" not in name}
    shapes = {ANCHORS: torch.Size((12, 4))}
    for name, shape in own.items():
        part = next((part for part in _PARTS if name.startswith(part)), "")
        shapes[_PARTS.get(part, "") + name.removeprefix(part)] = shape
    return shapes


def draw(seed=0):
    """Draw weights of airsplay's layout with which activations stay of order one: sums of a few powers of two."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in airsplay_shapes().items():
        values = torch.randint(-64, 65, shape, generator=generator, dtype=torch.int8).float() / 64
        if name == ANCHORS:
            values = MOVED
        elif name.endswith("running_var"):
            values = 1 + values.abs() / 2
        elif len(shape) == 4:
            values *= 2.0 ** -round(torch.tensor(shape[1:]).prod().log2().item() / 2)
        elif "norm" in name or ".bn" in name or "base.1" in name or "downsample.1" in name:
            values = values / 8 + (0.5 if name.endswith("weight") else 0)
        elif len(shape) == 2:
            values /= 16
        weights[name] = values
    return weights


def as_milvlg(airsplay, seed=1):
    """Write weights of airsplay's layout in MILVLG's, by the differences that both repositories' code shows."""
    drawn = torch.randint(-64, 65, (20000,), generator=torch.Generator().manual_seed(seed)).float() / 64
    weights = {}
    for theirs, value in airsplay.items():
        name = theirs
        for new, old in NAMES.items():
            name = name.replace(f".{old}.", f".{new}.")
        if name.startswith(f"{RPN}objectness_logits"):  # twelve rows of background, then twelve of object
            background = drawn[: value.numel()].reshape(value.shape)
            value = torch.cat([background, background + value])
        elif name.startswith(f"{BOX}bbox_pred"):  # four rows of background first
            value = torch.cat([drawn[: value[:4].numel()].reshape(value[:4].shape), value])
        elif name.startswith((f"{BOX}cls_score", f"{BOX}cls_embed", f"{BOX}attr_linear2")):  # background last to first
            value = torch.cat([value[-1:], value[:-1]])
        weights[name] = value
    return weights


def caffe_resnet():
    """Return torchvision's ResNet-101, its strides moved to the first convolutions, pooling without padding."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        resnet = resnet101().eval().requires_grad_(False)
        resnet.maxpool = nn.MaxPool2d(3, 2, padding=0, ceil_mode=True)
        for layer in (resnet.layer2, resnet.layer3, resnet.layer4):
            layer[0].conv1.stride, layer[0].conv2.stride = (2, 2), (1, 1)
        for module in resnet.modules():
            if isinstance(module, nn.BatchNorm2d):  # norms that do something
                module.running_mean.normal_(0, 0.1)
                module.running_var.uniform_(0.5, 2)
                module.weight.uniform_(0.3, 0.9)
                module.bias.normal_(0, 0.1)
    return resnet


def vse_infty(resnet):
    """Return the two halves that VSE∞ makes of a ResNet, and saves."""
    parts = [resnet.conv1, resnet.bn1, resnet.relu, resnet.maxpool, resnet.layer1, resnet.layer2, resnet.layer3]
    return {"base": nn.Sequential(*parts), "top": nn.Sequential(resnet.layer4)}
