"""Views of a picture: as it is, and turned, mirrored or cropped, always alike for the same picture."""

import random

import numpy as np
import pytest
import torch
from encoder_contract import picture
from loaded import image_encoder
from PIL import Image
from torchvision.transforms import RandomResizedCrop

from xret.pipeline.encoders import AUGMENTATIONS
from xret.pipeline.encoders.wrappers import views
from xret.pipeline.errors import EncoderError


def load(count, augment, name="resnet18", size=64, **words):
    return image_encoder(name, "random:0", size, views=f"{augment}:{count}", **words)


@pytest.fixture(scope="module")
def plain():
    return image_encoder("resnet18", "random:0", 64)


def test_the_eight_turns_and_mirrorings_of_a_square(tmp_path):
    path = picture(tmp_path / "p.png", (64, 64))
    square, plain = Image.open(path), image_encoder("resnet18", "random:0", 56)  # as much is cut off on all sides
    seen = load(8, "dihedral", size=56).decode_views(path, "7")[0]
    quarters = [None, Image.Transpose.ROTATE_90, Image.Transpose.ROTATE_180, Image.Transpose.ROTATE_270]
    mirrored = square.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    expected = [one if turn is None else one.transpose(turn) for one in (square, mirrored) for turn in quarters]
    for view, turned in zip(seen, expected, strict=True):  # up to what resizing rounds
        assert (view.int() - plain.prepare(turned).int()).abs().max() <= 1
    assert len({view.numpy().tobytes() for view in seen}) == 8


@pytest.mark.parametrize("augment", AUGMENTATIONS)
def test_the_first_view_is_the_picture_as_it_is(plain, augment, tmp_path):
    path = picture(tmp_path / "p.png")
    encoder = load(4, augment)
    pixels, size = encoder.decode_views(path, "7")
    whole, own = plain.decode(path)
    assert (size, pixels.shape) == (own, (4, *whole.shape))
    assert torch.equal(pixels[0], whole)
    local, global_ = encoder.encode(pixels[None])
    assert (local.shape, global_.shape) == ((1, 4, plain.rows, plain.channels), (1, 4, plain.channels))
    for view in range(4):
        alone, alone_global = plain.encode(pixels[view][None])
        assert alone.tobytes() == local[:, view].tobytes()
        assert alone_global.tobytes() == global_[:, view].tobytes()


def test_crops_follow_from_picture_and_number(tmp_path):
    path = picture(tmp_path / "p.png")
    few, many = (load(count, "crop-flip").decode_views(path, "7")[0] for count in (3, 6))
    assert torch.equal(few, many[:3])  # how many there are changes none of them
    assert len({view.numpy().tobytes() for view in many}) == 6
    other = load(3, "crop-flip").decode_views(path, "8")[0]
    assert torch.equal(other[0], few[0])
    assert not torch.equal(other[1], few[1])


def test_half_of_the_crops_are_mirrored(tmp_path):
    shade = np.tile(np.linspace(0, 255, 120, dtype=np.uint8), (90, 1))
    Image.fromarray(shade).convert("RGB").save(tmp_path / "p.png")
    seen = load(201, "crop-flip").decode_views(tmp_path / "p.png", "7")[0][1:].float()
    falling = (seen[..., -1].mean((1, 2)) < seen[..., 0].mean((1, 2))).float().mean()
    assert 0.4 < falling < 0.6


@pytest.mark.parametrize("size", [(300, 200), (64, 64), (90, 400), (3, 2), (1, 1), (1, 90)])
def test_windows_are_those_of_torchvision(size):
    rng, drawn = random.Random(0), []
    for _ in range(2000):
        left, top, right, bottom = views.window(size, rng)
        assert 0 <= left < right <= size[0] and 0 <= top < bottom <= size[1]
        drawn.append((left, top, right - left, bottom - top))
    torch.manual_seed(0)
    blank = torch.zeros(3, size[1], size[0])
    theirs = [RandomResizedCrop.get_params(blank, list(views._AREA), list(views._RATIO)) for _ in range(2000)]
    expected = np.array([(left, top, width, height) for top, left, height, width in theirs], float)
    got = np.array(drawn, float)
    error = 6 * (expected.std(0) + got.std(0)) / len(got) ** 0.5
    assert (np.abs(got.mean(0) - expected.mean(0)) <= error + 1e-9).all()
    if min(size) > 50:
        share = got[:, 2] * got[:, 3] / (size[0] * size[1])
        assert share.max() <= 1


@pytest.mark.parametrize(
    ("count", "augment", "words", "sentence"),
    [
        (9, "dihedral", {}, "a square has eight turns and mirrorings; ask for at most 8"),
        (2, "blur", {}, "--views blur:2: give crop-flip:N or dihedral:N, with two or more views N"),
        (1, "dihedral", {}, "with two or more views N"),
        ("many", "dihedral", {}, "with two or more views N"),
        (2, "dihedral", {"frames": 3}, "--frames takes the global feature of each frame; leave --pool, --views and"),
    ],
)
def test_what_has_no_views_is_refused(count, augment, words, sentence):
    with pytest.raises(EncoderError, match=sentence):
        load(count, augment, **words)


def test_what_turns_are_the_pixels_and_not_the_pooled_cells(tmp_path):
    pixels, _ = load(2, "dihedral", pool=(2, 1)).decode_views(picture(tmp_path / "p.png"), "7")
    assert torch.equal(pixels[1], pixels[0].rot90(1, (1, 2)))
