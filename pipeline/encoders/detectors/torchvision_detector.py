"""Region features of torchvision's Faster R-CNN, whose weights anyone can download."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchvision.models.detection import FasterRCNN_ResNet50_FPN_V2_Weights, fasterrcnn_resnet50_fpn_v2
from torchvision.ops import box_iou
from torchvision.transforms.functional import convert_image_dtype, normalize, pil_to_tensor

from ...data.regions import Regions
from ..pictures import library_versions, open_picture
from ..random_weights import noise_images, settle_norms
from ..weights import digest, fetch, load_strictly, read_weights, seed_or_file
from .selection import check_regions, select, selection_identity

_PROPOSALS = 1000
_SHORTER, _LONGER = 800, 1333
_CONFIDENCE, _OVERLAP = 0.2, 0.5


class DetectorEncoder:
    """Encode images as regions that a Faster R-CNN with a feature pyramid, trained on COCO, finds.

    It is not bottom-up attention: its features come from the two-layer box head. A region is an RPN proposal, the
    box from which its feature was pooled, not the box that the detector makes of it; the choice among proposals is
    that of bottom-up attention (`selection.select`), with torchvision's own overlap. Boxes are outlines in pixels of
    the original image. A class is its number in COCO, 1 to 90, as torchvision publishes it; 0 is background.

    Attributes:
        rows: most regions of an image.
        channels: width of a feature, 1024.
        extras: what comes with the features.
        identity: what decides the features.
        versions: of the libraries; they do not.
    """

    name = "fasterrcnn_resnet50_fpn_v2"
    kind = "roi"
    channels = global_channels = 1024
    extras: tuple[str, ...] = ("boxes", "classes", "scores")

    def __init__(self, weights: str, regions: tuple[int, int], device: str, trust: bool = False) -> None:
        """Build the network and load its weights.

        Args:
            weights: ``imagenet`` (torchvision's COCO_V1), a file with a state dict, or ``random:SEED``.
            regions: fewest and most regions of an image.
            device: where it runs.
            trust: let a file of weights run code while it is read.

        Raises:
            EncoderError: the weights cannot be had or do not fit, or the numbers of regions make no sense.
        """
        check_regions(regions, _PROPOSALS)
        self.rows = regions[1]
        self.device = device
        self._regions = regions
        weights_id, network = _load(weights, trust)
        self._network = network.to(device)
        transform = network.transform
        self.identity: dict[str, Any] = {
            "encoder": self.name,
            "weights": weights_id,
            "preprocessing": {
                "decoder": "pillow",
                "channels": "RGB",
                "shorter": _SHORTER,
                "longer": _LONGER,
                "interpolation": "bilinear without antialiasing",
                "mean": list(transform.image_mean),
                "std": list(transform.image_std),
            },
            "layer": "roi_heads.box_head",
            "regions": selection_identity(regions, _PROPOSALS, _CONFIDENCE, _OVERLAP),
        }
        self.versions = library_versions()

    def decode(self, path: str | Path) -> tuple[Tensor, tuple[int, int]]:
        """Read an image; the network itself resizes it, its shorter side to 800 pixels, the longer to 1333 at most.

        Returns:
            Pixels uint8 [3, H, W] on the CPU, and the image's (width, height).

        Raises:
            SampleError: the image cannot be read, or is far too long and narrow.
        """
        image = open_picture(path)
        return pil_to_tensor(image), image.size

    @torch.inference_mode()
    def encode(self, pictures: list[Tensor]) -> list[Regions]:
        """Encode pictures one by one, so that a picture's features do not depend on its company.

        Returns:
            The regions of each, most confident first.
        """
        return [self._encode(picture) for picture in pictures]

    def _encode(self, picture: Tensor) -> Regions:
        height, width = picture.shape[1:]
        images, _ = self._network.transform([convert_image_dtype(picture.to(self.device))])
        maps = self._network.backbone(images.tensors)
        boxes = self._network.rpn(images, maps)[0][0]
        heads = self._network.roi_heads
        features = heads.box_head(heads.box_roi_pool(maps, [boxes], images.image_sizes))
        scores = heads.box_predictor.cls_score(features).softmax(1)[:, 1:]
        chosen, classes, confidences = select(scores, box_iou(boxes, boxes), self._regions, _CONFIDENCE, _OVERLAP)
        resized_height, resized_width = images.image_sizes[0]
        factors = boxes.new_tensor([width / resized_width, height / resized_height] * 2)
        arrays = (features[chosen], boxes[chosen] * factors, classes + 1, confidences)
        local, places, numbers, scores = (array.cpu().numpy() for array in arrays)
        return Regions(local, places, numbers, scores, (width, height))


def _load(weights: str, trust: bool) -> tuple[str, Any]:
    """Build the network on the CPU and fill it; return what its identity says of the weights, and itself."""
    if weights == "imagenet":
        entry = FasterRCNN_ResNet50_FPN_V2_Weights.COCO_V1
        origin, state = "torchvision's detector", fetch(entry, f"weights of {DetectorEncoder.name}")
    elif isinstance(source := seed_or_file(weights, imagenet=True), int):
        return f"random:{source}", _random(source)
    else:
        origin, state = weights, read_weights(source, trust)
    with torch.random.fork_rng(devices=[]):  # its own weights are drawn first, for nothing
        network = _build()
    load_strictly(network, state, origin)
    return digest(network.state_dict()), network


def _build() -> Any:
    network = fasterrcnn_resnet50_fpn_v2(weights=None, weights_backbone=None, min_size=_SHORTER, max_size=_LONGER)
    return network.eval().requires_grad_(False)


def _random(seed: int) -> Any:
    """Build a network whose weights, and then batch norm statistics, follow from the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        network = _build()
        images = normalize(noise_images(4, 128), network.transform.image_mean, network.transform.image_std)
        boxes = torch.tensor([[0.0, 0, 128, 128], [0, 0, 64, 64], [64, 0, 96, 128], [30, 70, 50, 90]])
        heads, sizes = network.roi_heads, [(128, 128)] * 4
        settle_norms(network, lambda: heads.box_head(heads.box_roi_pool(network.backbone(images), [boxes] * 4, sizes)))
    return network
