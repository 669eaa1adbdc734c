"""What goes around the encoder of a grid: pooled cells, views of a picture, frames of a video."""

import random

import numpy as np
import pytest
import torch
from encoder_contract import image_encoder, picture
from PIL import Image
from torchvision.transforms import RandomResizedCrop

from xret.pipeline.encoders import wrappers
from xret.pipeline.encoders.wrappers import FramesEncoder
from xret.pipeline.errors import EncoderError, SampleError


def load(size=64, **options):
    return image_encoder("resnet18", "random:0", size, **options)


@pytest.fixture(scope="module")
def grid():
    return load()


def test_pooled_cells_are_the_means_of_their_windows():
    whole = image_encoder("own_encoder:Quarters", "w", 60)
    pooled = image_encoder("own_encoder:Quarters", "w", 60, pool=(2, 2))
    pixels = torch.randint(256, (2, 3, 60, 60), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    cells, global_ = whole.encode(pixels)
    local, same = pooled.encode(pixels)
    assert (pooled.grid, pooled.rows) == ((1, 2), 2)
    np.testing.assert_allclose(local[:, 0], cells[:, [0, 1, 3, 4]].mean(1), rtol=1e-6)
    np.testing.assert_allclose(local[:, 1], cells[:, [2, 5]].mean(1), rtol=1e-6)
    assert np.array_equal(same, global_)
    assert pooled.identity == {**whole.identity, "pool": [2, 2]}
    for pool in ((1, 1), (3, 1), (0, 2)):
        with pytest.raises(EncoderError, match="averages nothing in the grid of 2 x 3 cells of 'quarters'"):
            image_encoder("own_encoder:Quarters", "w", 60, pool=pool)


def test_the_eight_turns_and_mirrorings_of_a_square(tmp_path):
    path = picture(tmp_path / "p.png", (64, 64))
    square, plain = Image.open(path), load(56)  # as much is cut off on all sides
    seen = load(56, views="dihedral:8").decode_views(path, "7")[0]
    quarters = [None, Image.Transpose.ROTATE_90, Image.Transpose.ROTATE_180, Image.Transpose.ROTATE_270]
    mirrored = square.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    expected = [one if turn is None else one.transpose(turn) for one in (square, mirrored) for turn in quarters]
    for view, turned in zip(seen, expected, strict=True):  # up to what resizing rounds
        assert (view.int() - plain.prepare(turned).int()).abs().max() <= 1
    assert len({view.numpy().tobytes() for view in seen}) == 8


@pytest.mark.parametrize("augment", wrappers.AUGMENTATIONS)
def test_the_first_view_is_the_picture_as_it_is(grid, augment, tmp_path):
    path = picture(tmp_path / "p.png")
    encoder = load(views=f"{augment}:4")
    pixels, size = encoder.decode_views(path, "7")
    whole, own = grid.decode(path)
    assert (size, pixels.shape) == (own, (4, *whole.shape))
    assert torch.equal(pixels[0], whole)
    local, global_ = encoder.encode(pixels[None])
    assert (local.shape, global_.shape) == ((1, 4, grid.rows, grid.channels), (1, 4, grid.channels))
    for view in range(4):
        alone, alone_global = grid.encode(pixels[view][None])
        assert alone.tobytes() == local[:, view].tobytes()
        assert alone_global.tobytes() == global_[:, view].tobytes()


def test_crops_follow_from_picture_and_number(tmp_path):
    path = picture(tmp_path / "p.png")
    few, many = (load(views=f"crop-flip:{count}").decode_views(path, "7")[0] for count in (3, 6))
    assert torch.equal(few, many[:3])  # how many there are changes none of them
    assert len({view.numpy().tobytes() for view in many}) == 6
    other = load(views="crop-flip:3").decode_views(path, "8")[0]
    assert torch.equal(other[0], few[0])
    assert not torch.equal(other[1], few[1])


def test_half_of_the_crops_are_mirrored(tmp_path):
    shade = np.tile(np.linspace(0, 255, 120, dtype=np.uint8), (90, 1))
    Image.fromarray(shade).convert("RGB").save(tmp_path / "p.png")
    seen = load(views="crop-flip:201").decode_views(tmp_path / "p.png", "7")[0][1:].float()
    falling = (seen[..., -1].mean((1, 2)) < seen[..., 0].mean((1, 2))).float().mean()
    assert 0.4 < falling < 0.6


@pytest.mark.parametrize("size", [(300, 200), (64, 64), (90, 400), (3, 2), (1, 1), (1, 90)])
def test_windows_are_those_of_torchvision(size):
    rng, drawn = random.Random(0), []
    for _ in range(2000):
        left, top, right, bottom = wrappers.window(size, rng)
        assert 0 <= left < right <= size[0] and 0 <= top < bottom <= size[1]
        drawn.append((left, top, right - left, bottom - top))
    torch.manual_seed(0)
    blank = torch.zeros(3, size[1], size[0])
    theirs = [RandomResizedCrop.get_params(blank, list(wrappers._AREA), list(wrappers._RATIO)) for _ in range(2000)]
    expected = np.array([(left, top, width, height) for top, left, height, width in theirs], float)
    got = np.array(drawn, float)
    error = 6 * (expected.std(0) + got.std(0)) / len(got) ** 0.5
    assert (np.abs(got.mean(0) - expected.mean(0)) <= error + 1e-9).all()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"views": "dihedral:9"}, "a square has eight turns and mirrorings; ask for at most 8"),
        ({"views": "blur:2"}, "`views` blur:2: give crop-flip:N or dihedral:N, with two or more views N"),
        ({"views": "dihedral:1"}, "with two or more views N"),
        ({"views": "dihedral:many"}, "with two or more views N"),
        ({"views": "dihedral:2", "frames": 3}, "`frames` takes the global feature of each frame; leave `pool`"),
    ],
)
def test_what_has_no_views_is_refused(options, sentence):
    with pytest.raises(EncoderError, match=sentence):
        load(**options)


def test_only_squares_are_turned(tmp_path):
    pixels, _ = load(views="dihedral:2", pool=(2, 1)).decode_views(picture(tmp_path / "p.png"), "7")
    assert torch.equal(pixels[1], pixels[0].rot90(1, (1, 2)))
    with pytest.raises(EncoderError, match="`views` dihedral:2 turns squares, and 'oblong' sees none"):
        image_encoder("own_encoder:Oblong", views="dihedral:2")


@pytest.fixture
def video(tmp_path):
    """Write a folder of frames: the number of each is its shade."""

    def make(numbers, name="video", pattern="frame_{}.png", size=(70, 66)):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        for number in numbers:
            Image.new("RGB", size, (number, number, number)).save(folder / pattern.format(number))
        return folder

    return make


def shades(pixels):
    return pixels[:, 0, 0, 0].tolist()


@pytest.mark.parametrize(
    ("there", "wanted", "taken"),
    [
        (1, 4, [0]),
        (3, 4, [0, 1, 2]),
        (5, 4, [0, 1, 3, 4]),
        (12, 4, [1, 4, 7, 10]),
        (100, 4, [12, 37, 62, 87]),
        (12, 1, [6]),
        (7, 3, [1, 3, 5]),
    ],
)
def test_frames_are_the_middles_of_equal_parts(grid, video, there, wanted, taken):
    pixels, size = FramesEncoder(grid, wanted).decode(video(range(there)))
    assert shades(pixels) == taken
    assert pixels.dtype == torch.uint8 and pixels.shape == (len(taken), 3, 64, 64)
    assert size == (70, 66)


@pytest.mark.parametrize("pattern", ["frame_{}.png", "{}.png", "a{:04d}.png", "s2-{}-x.PNG", "video7_{}_of_20.png"])
def test_frames_are_in_natural_order_and_the_first_ones_size_counts(grid, video, pattern):
    video([8], pattern=pattern, size=(64, 90))
    pixels, size = FramesEncoder(grid, 20).decode(video(range(9, 13), pattern=pattern))
    assert (shades(pixels), size) == ([8, 9, 10, 11, 12], (64, 90))


def test_frames_may_be_seen_whole(video):
    folder = video([1], size=(90, 60))
    left = Image.new("RGB", (90, 60))
    left.paste((200, 200, 200), (0, 0, 10, 60))  # within what the middle leaves out
    left.save(folder / "frame_1.png")
    whole, middle = load(frames=4, whole=True), load(frames=4)
    square = np.asarray(left.resize((64, 64), Image.Resampling.BILINEAR))
    assert np.array_equal(whole.decode(folder)[0][0].permute(1, 2, 0).numpy(), square)
    assert middle.decode(folder)[0].max() == 0 and middle.identity != whole.identity


def test_rows_are_the_global_features_of_the_frames(grid):
    generator = torch.Generator().manual_seed(0)
    batch = [torch.randint(256, (n, 3, 64, 64), generator=generator, dtype=torch.uint8) for n in (3, 1, 5)]
    encoder = FramesEncoder(grid, 5)
    regions = encoder.encode(batch)
    assert [video.local.shape for video in regions] == [(3, 512), (1, 512), (5, 512)]
    assert (encoder.rows, encoder.channels, encoder.global_channels, encoder.extras) == (5, 512, 512, ())
    for video, found in zip(batch, regions, strict=True):
        alone = [grid.encode(frame[None])[1][0] for frame in video]
        np.testing.assert_allclose(found.local, alone, atol=2e-4, rtol=2e-4)
    again = encoder.encode(batch)
    assert all(a.local.tobytes() == b.local.tobytes() for a, b in zip(regions, again, strict=True))


def test_a_folder_that_is_none_and_a_damaged_frame_are_named(grid, video, tmp_path):
    def refusal(path):
        with pytest.raises(SampleError) as caught:
            FramesEncoder(grid, 4).decode(path)
        assert caught.value.sample == str(path)
        return caught.value.reason

    assert refusal(tmp_path / "nowhere") == "there is no such folder of frames"
    assert refusal(video([1]) / "frame_1.png") == "a folder of frames is expected here (not a directory)"
    empty = video([], "empty")
    (empty / "video.mp4").write_bytes(b"?")
    assert refusal(empty).startswith("there is no frame in this folder; frames end in .apng")
    folder = video(range(12))
    (folder / "frame_0.png").write_bytes(b"torn")  # which is not taken
    assert shades(FramesEncoder(grid, 4).decode(folder)[0]) == [1, 4, 7, 10]
    (folder / "frame_4.png").write_bytes(b"torn")
    assert refusal(folder).startswith("its frame frame_4.png cannot be used: this is no JPEG")
