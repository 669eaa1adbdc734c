"""Bottom-up attention: the features of detected regions, and the detector's backbone as a grid.

Pixels are those of the Caffe model: blue, green, red, less a mean, divided neither by 255 nor by a deviation.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional
from torchvision.transforms.functional import pil_to_tensor

from ...data.images import LONGEST, AnyPicture, open_image
from ...errors import EncoderError
from ..base import library_versions
from ..grid import GRID_OPTIONS, IMAGE_SIZE, Grid, mean_of_cells
from ..spec import EncoderSpec
from ..weights import digest, noise_images, read_weights, seed_or_file, settle_norms
from .butd_checkpoints import IDLE, convert
from .butd_network import PROPOSALS, DetectorNetwork, GridNetwork
from .caffe_boxes import corners
from .regions import REGIONS, Detected, RegionEncoder, Selection

MEAN = (102.9801, 115.9465, 122.7717)
_SHORTER, _LONGER = 600, 1000
_SMALLEST = 16  # shortest side of a proposal, pixels of the picture as it came
_PIXELS = {"decoder": "pillow", "channels": "BGR", "mean": list(MEAN), "interpolation": "bilinear without antialiasing"}


class Picture(NamedTuple):
    """A decoded picture: pixels float32 [3,H,W] on the CPU, and its (width, height) before it was resized."""

    pixels: Tensor
    size: tuple[int, int]


class ButdEncoder(RegionEncoder):
    """Encode images as the regions of the bottom-up-attention detector.

    A region is an RPN proposal, not the box that the detector makes of it: that is the box its feature was pooled
    from, and what the published TSV files hold. Boxes count pixels of the original image, from 0, x2 and y2 inside.
    A class counts from 0 in the published ``objects_vocab.txt``, background excluded: 0 to 1599.
    """

    name = "butd"
    channels = global_channels = 2048

    def __init__(self, spec: EncoderSpec, device: str) -> None:
        """Build the network and load its weights, a published file (`butd_checkpoints`) or ``random:SEED``."""
        selection = Selection(*(spec.regions or REGIONS), proposals=PROPOSALS, confidence=0.2, overlap=0.3)
        weights_id, network = _load(DetectorNetwork, spec)
        self.device = device
        self._network = network.to(device, memory_format=torch.channels_last)
        self._mean = torch.tensor(MEAN, device=device)[:, None, None]
        self._shorter, self._longer, self._proposals = _SHORTER, _LONGER, PROPOSALS  # which tests make smaller
        preprocessing = {**_PIXELS, "shorter": _SHORTER, "longer": _LONGER}
        super().__init__(selection, weights_id, preprocessing, "res5, mean")

    def decode(self, picture: AnyPicture) -> tuple[Picture, tuple[int, int]]:
        """Read an image and resize it: its shorter side to 600 pixels, unless the longer would exceed 1000."""
        image = open_image(picture, upright=True, longest=LONGEST)
        scale = self._scale(image.size)
        width, height = (round(side * scale) for side in image.size)
        return Picture(_resized(image, height, width), image.size), image.size

    def detect(self, picture: Picture) -> Detected:
        """Return the proposals of a picture."""
        scale = self._scale(picture.size)
        pixels = (picture.pixels.to(self.device) - self._mean)[None].contiguous(memory_format=torch.channels_last)
        boxes, features, scores = self._network(pixels, _SMALLEST * scale, self._proposals)
        boxes = boxes / scale
        return Detected(corners(boxes), features, scores, boxes, picture.size)

    def _scale(self, size: tuple[int, int]) -> float:
        scale = self._shorter / min(size)
        return scale if round(scale * max(size)) <= self._longer else self._longer / max(size)


class ButdGridEncoder(Grid):
    """Encode images as the cells of the detector's backbone, run as an ordinary ResNet-101, and their mean."""

    name = "butd-grid"
    takes = GRID_OPTIONS - {"whole"}
    longest = None  # whatever its proportions, an image is stretched to the same square

    def __init__(self, spec: EncoderSpec, device: str) -> None:
        """Build the network and load its weights, VSE∞'s ``original_updown_backbone.pth`` or ``random:SEED``.

        The papers' image_size is 512.
        """
        size = spec.image_size or IMAGE_SIZE
        self.prepare = lambda image: _resized(image, size, size)
        self.device = device
        weights_id, network = _load(GridNetwork, spec)
        self.network = network.to(device, memory_format=torch.channels_last)
        self._mean = torch.tensor(MEAN, device=device)[:, None, None]
        self._measure(torch.zeros(1, 3, size, size))
        pixels = {**_PIXELS, "stretch": size}
        self.identity = {"encoder": self.name, "weights": weights_id, "preprocessing": pixels, "layer": "res5"}
        self.versions = library_versions("torch", "torchvision", "PIL")

    def _run(self, pixels: Tensor, _layers: Sequence[Any]) -> list[tuple[Tensor, Tensor]]:
        maps: Tensor = self.network((pixels - self._mean).contiguous(memory_format=torch.channels_last))
        return [(maps, mean_of_cells(maps))]


def _resized(image: Image.Image, height: int, width: int) -> Tensor:
    """Resize as OpenCV's INTER_LINEAR does, without rounding; return float32 [3,H,W], blue first."""
    pixels = pil_to_tensor(image).flip(0)[None].float()
    return functional.interpolate(pixels, (height, width), mode="bilinear", align_corners=False)[0]


def _load(kind: type[nn.Module], spec: EncoderSpec) -> tuple[str, Any]:
    """Build a network on the CPU and fill it; return its weights' entry in an identity, and itself, frozen."""
    source = seed_or_file(spec)
    if source is None:
        raise EncoderError(f"no weights of {spec.name} can be downloaded; give a published file as --visual-weights")
    if isinstance(source, int):
        weights_id, network = f"random:{source}", _random(kind, source)
    else:
        with torch.device("meta"):
            network = kind()
        own = network.state_dict()
        state = convert(read_weights(source, spec.trust), own, spec)
        # Counters of batches, and the attributes that some files lack, have no part in the features.
        state |= {name: torch.zeros(value.shape, dtype=value.dtype) for name, value in own.items() if name not in state}
        network.load_state_dict(state, assign=True)
        weights_id = digest({name: value for name, value in state.items() if not name.startswith(IDLE)})
    return weights_id, network.eval().requires_grad_(False)


def _random(kind: type[nn.Module], seed: int) -> nn.Module:
    """Build a network whose weights follow from the seed; regressions and classes are near their middle."""
    torch.default_generator.manual_seed(seed)
    network: Any = kind()
    for name, value in network.named_parameters():
        if name.startswith(("rpn.", "predictor.")):
            nn.init.normal_(value, std=0.01 if name.endswith("weight") else 0)
    mean = torch.tensor(MEAN)[:, None, None]
    settle_norms(network, lambda: network.res5(network.backbone(255 * noise_images(8, 96) - mean)))
    return network
