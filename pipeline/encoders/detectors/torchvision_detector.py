"""Region features of torchvision's Faster R-CNN, whose weights anyone can download."""

from typing import Any

import torch
from torch import Tensor
from torchvision.models.detection import FasterRCNN_ResNet50_FPN_V2_Weights, fasterrcnn_resnet50_fpn_v2
from torchvision.transforms.functional import convert_image_dtype, normalize, pil_to_tensor

from ...data.images import LONGEST, AnyPicture, open_image
from ..spec import EncoderSpec
from ..weights import load_network, noise_images
from .regions import REGIONS, Detected, RegionEncoder, Selection

_SHORTER, _LONGER = 800, 1333


class DetectorEncoder(RegionEncoder):
    """Encode images as regions that a Faster R-CNN with a feature pyramid, trained on COCO, finds.

    It is not bottom-up attention: its features come from the two-layer box head. The choice among proposals is that
    of bottom-up attention, with torchvision's own overlap. Boxes are outlines in pixels of the original image. A class
    is its number in COCO, 1 to 90, as torchvision publishes it; 0 is background.
    """

    name = "fasterrcnn_resnet50_fpn_v2"
    channels = global_channels = 1024
    first_class = 1

    def __init__(self, spec: EncoderSpec, device: str) -> None:
        selection = Selection(*(spec.regions or REGIONS), proposals=1000, confidence=0.2, overlap=0.5)
        weights_id, network = load_network(spec, _build, _run, FasterRCNN_ResNet50_FPN_V2_Weights.COCO_V1)
        self.device = device
        self._network = network.to(device)
        preprocessing = {"decoder": "pillow", "channels": "RGB", "shorter": _SHORTER, "longer": _LONGER}
        mean, std = list(network.transform.image_mean), list(network.transform.image_std)
        preprocessing |= {"interpolation": "bilinear without antialiasing", "mean": mean, "std": std}
        super().__init__(selection, weights_id, preprocessing, "roi_heads.box_head")

    def decode(self, picture: AnyPicture) -> tuple[Tensor, tuple[int, int]]:
        """Read an image; return pixels uint8 [3,H,W], which the network itself resizes, and its (width, height)."""
        image = open_image(picture, upright=True, longest=LONGEST)
        return pil_to_tensor(image), image.size

    def detect(self, picture: Tensor) -> Detected:
        """Return the proposals of a picture, uint8 [3,H,W]."""
        height, width = picture.shape[1:]
        images, _ = self._network.transform([convert_image_dtype(picture.to(self.device))])
        maps = self._network.backbone(images.tensors)
        boxes = self._network.rpn(images, maps)[0][0]
        heads = self._network.roi_heads
        features = heads.box_head(heads.box_roi_pool(maps, [boxes], images.image_sizes))
        scores = heads.box_predictor.cls_score(features).softmax(1)[:, 1:]
        resized_height, resized_width = images.image_sizes[0]
        factors = boxes.new_tensor([width / resized_width, height / resized_height] * 2)
        return Detected(boxes, features, scores, boxes * factors, (width, height))


def _build() -> Any:
    network = fasterrcnn_resnet50_fpn_v2(weights=None, weights_backbone=None, min_size=_SHORTER, max_size=_LONGER)
    return network.eval().requires_grad_(False)


def _run(network: Any) -> None:
    """Run a network on varied images, and its box head on varied boxes."""
    images = normalize(noise_images(4, 128), network.transform.image_mean, network.transform.image_std)
    boxes = torch.tensor([[0.0, 0, 128, 128], [0, 0, 64, 64], [64, 0, 96, 128], [30, 70, 50, 90]])
    heads, sizes = network.roi_heads, [(128, 128)] * 4
    heads.box_head(heads.box_roi_pool(network.backbone(images), [boxes] * 4, sizes))
