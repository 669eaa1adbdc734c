"""The bottom-up-attention detector: Faster R-CNN with a Caffe-style ResNet-101, on torchvision's operators.

After Anderson et al., Bottom-Up and Top-Down Attention, 2018, and the network definition they published.
"""

from torch import Tensor, nn
from torch.nn import functional
from torchvision.ops import roi_pool

from .caffe_boxes import STRIDE, clip, decode, grid_anchors, propose

CLASSES = 1600
ATTRIBUTES = 400
ANCHORS = 12
PROPOSALS = 300
_POOLED = 14  # cells of a pooled region, each way


class ConvNorm(nn.Conv2d):
    """A convolution without bias and the batch norm after it."""

    def __init__(self, channels: int, out: int, kernel: int, stride: int = 1, dilation: int = 1) -> None:
        super().__init__(channels, out, kernel, stride, padding=dilation * (kernel // 2), dilation=dilation, bias=False)
        self.norm = nn.BatchNorm2d(out)

    def forward(self, input: Tensor) -> Tensor:
        """Convolve and normalise."""
        return self.norm(super().forward(input))


class Bottleneck(nn.Module):
    """A residual block whose stride is in the first 1×1 convolution; torchvision's is in the 3×3."""

    def __init__(self, channels: int, width: int, stride: int, dilation: int) -> None:
        super().__init__()
        self.conv1 = ConvNorm(channels, width, 1, stride)
        self.conv2 = ConvNorm(width, width, 3, dilation=dilation)
        self.conv3 = ConvNorm(width, 4 * width, 1)
        self.shortcut = None if channels == 4 * width else ConvNorm(channels, 4 * width, 1, stride)

    def forward(self, maps: Tensor) -> Tensor:
        """Return maps [B,4·width,H/stride,W/stride]."""
        inner = self.conv2(self.conv1(maps).relu_()).relu_()
        return functional.relu_(self.conv3(inner) + (maps if self.shortcut is None else self.shortcut(maps)))


def stage(blocks: int, channels: int, width: int, stride: int, dilation: int = 1) -> nn.Sequential:
    """Return a stage of a ResNet; only its first block has a stride."""
    first = Bottleneck(channels, width, stride, dilation)
    return nn.Sequential(first, *(Bottleneck(4 * width, width, 1, dilation) for _ in range(blocks - 1)))


class Backbone(nn.Module):
    """ResNet-101 up to its fourth stage, at a stride of 16."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = ConvNorm(3, 64, 7, stride=2)
        self.res2 = stage(3, 64, 64, 1)
        self.res3 = stage(4, 256, 128, 2)
        self.res4 = stage(23, 512, 256, 2)

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the feature map [B,1024,⌈H/16⌉,⌈W/16⌉], or a cell fewer each way, of pixels [B,3,H,W]."""
        # Caffe pools without padding, and lets the last window overhang.
        pooled = functional.max_pool2d(self.stem(pixels).relu_(), 3, 2, ceil_mode=True)
        return self.res4(self.res3(self.res2(pooled)))


class GridNetwork(nn.Module):
    """The detector's ResNet-101 as an ordinary one, its last stage at a stride of 32 (Chen et al., VSE∞, 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = Backbone()
        self.res5 = stage(3, 1024, 512, 2)

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the feature map [B,2048,H',W'] of pixels [B,3,H,W]."""
        return self.res5(self.backbone(pixels))


class ProposalHead(nn.Module):
    """Say of each anchor how far it holds an object, as one logit, and where the object's box is."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1024, 512, 3, padding=1)
        self.objectness_logits = nn.Conv2d(512, ANCHORS, 1)
        self.anchor_deltas = nn.Conv2d(512, 4 * ANCHORS, 1)

    def forward(self, maps: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits [H·W·12] and deltas [H·W·12,4] of the map of one image [1,1024,H,W]."""
        hidden = self.conv(maps).relu_()
        logits, deltas = self.objectness_logits(hidden)[0], self.anchor_deltas(hidden)[0]
        return logits.permute(1, 2, 0).reshape(-1), deltas.permute(1, 2, 0).reshape(-1, 4)


class Predictor(nn.Module):
    """Classify regions, background first. The weights for boxes and attributes only have a place for the files'."""

    def __init__(self) -> None:
        super().__init__()
        self.cls_score = nn.Linear(2048, CLASSES + 1)
        self.bbox_pred = nn.Linear(2048, 4 * CLASSES)
        self.class_embedding = nn.Embedding(CLASSES + 1, 256)
        self.attribute_hidden = nn.Linear(2048 + 256, 512)
        self.attribute_score = nn.Linear(512, ATTRIBUTES + 1)

    def forward(self, features: Tensor) -> Tensor:
        """Return the scores [n,1600] of region features [n,2048]: a softmax with background, without it."""
        return functional.softmax(self.cls_score(features), 1)[:, 1:]


class DetectorNetwork(nn.Module):
    """The whole detector, for one image at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = Backbone()
        self.rpn = ProposalHead()
        self.res5 = stage(3, 1024, 512, 1, dilation=2)
        self.predictor = Predictor()

    def forward(self, pixels: Tensor, smallest: float, proposals: int = PROPOSALS) -> tuple[Tensor, Tensor, Tensor]:
        """Return at most `proposals` proposals [n,4], their features [n,2048] and their scores [n,1600].

        Pixels [1,3,H,W] are blue, green, red, less their means; `smallest` is the shortest side of a proposal.
        """
        maps = self.backbone(pixels)
        boxes = self.propose(maps, pixels.shape[2], pixels.shape[3], smallest, proposals)
        features = self.region_features(maps, boxes)
        return boxes, features, self.predictor(features)

    def propose(self, maps: Tensor, height: int, width: int, smallest: float, proposals: int = PROPOSALS) -> Tensor:
        """Return the proposals [n,4] for an image of the given size, from its feature map [1,1024,H,W]."""
        logits, deltas = self.rpn(maps)
        anchors = grid_anchors(maps.shape[2], maps.shape[3], maps.device)
        boxes = clip(decode(anchors, deltas), height, width)
        return boxes[propose(boxes, logits, smallest, after=proposals)]

    def region_features(self, maps: Tensor, boxes: Tensor) -> Tensor:
        """Return the features [n,2048] of boxes [n,4]: maxima of 14×14 parts, the last stage, the mean."""
        last: Tensor = self.res5(roi_pool(maps, [boxes], _POOLED, 1 / STRIDE))
        return last.mean((2, 3))
