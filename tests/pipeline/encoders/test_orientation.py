"""Pictures are encoded upright, as their EXIF orientation says, whatever wraps the encoder."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from encoder_contract import image_encoder
from oriented import save, shown
from torchvision.transforms.functional import pil_to_tensor

from xret.heads.training.finetuning.end_to_end import read_window
from xret.pipeline.data.sources import FolderReader
from xret.pipeline.encoders.detectors.butd import ButdEncoder
from xret.pipeline.encoders.detectors.torchvision_detector import DetectorEncoder

PIXELS = np.random.default_rng(0).integers(0, 256, (60, 90, 3), dtype=np.uint8)


@pytest.fixture
def folders(tmp_path):
    """Return folders of a turned picture and of the same one upright."""
    for folder, pixels, orientation in (("turned", PIXELS, 8), ("plain", shown(PIXELS, 8), 1)):
        (tmp_path / folder).mkdir()
        save(tmp_path / folder / "a.png", pixels, orientation)
    return tmp_path / "turned", tmp_path / "plain"


@pytest.mark.parametrize("options", [{}, {"pool": (1, 2)}, {"views": "crop-flip:2"}, {"frames": 2}], ids=str)
def test_whatever_wraps_an_encoder_turns_pictures_as_it_does(folders, options):
    encoder = image_encoder("resnet18", "random:0", 64, **options)
    paths = [folder if "frames" in options else folder / "a.png" for folder in folders]
    decoded = [encoder.decode_views(path, "k") if "views" in options else encoder.decode(path) for path in paths]
    assert decoded[0][1] == decoded[1][1] == (60, 90)
    assert torch.equal(decoded[0][0], decoded[1][0])
    assert encoder.identity["preprocessing"]["orientation"] == "exif"


def test_detectors_and_windows_of_a_fine_tuning_turn_pictures_likewise(folders):
    encoder = SimpleNamespace(_scale=lambda _: 1.0, prepare=pil_to_tensor)
    for kind in (ButdEncoder, DetectorEncoder):
        turned, plain = (kind.decode(encoder, folder / "a.png") for folder in folders)
        assert turned[1] == plain[1] == (60, 90)
        assert str(turned[0]) == str(plain[0])
    windows = [read_window(encoder, FolderReader(f), "a.png", np.random.default_rng(0)) for f in folders]
    assert torch.equal(*windows)
