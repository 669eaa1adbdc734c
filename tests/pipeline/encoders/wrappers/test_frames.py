"""Frames of videos: which are taken, their features against the plain grid encoder, and what bad folders get."""

import numpy as np
import pytest
import torch
from loaded import image_encoder
from PIL import Image

from xret.pipeline.encoders.wrappers.frames import FramesEncoder
from xret.pipeline.errors import SampleError


@pytest.fixture(scope="module")
def grid():
    return image_encoder("resnet18", "random:0", 64)


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


# ---- which frames ----


@pytest.mark.parametrize(
    ("there", "wanted", "taken"),
    [
        (1, 4, [0]),
        (3, 4, [0, 1, 2]),
        (4, 4, [0, 1, 2, 3]),
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
def test_frames_are_in_natural_order(grid, video, pattern):
    pixels, _ = FramesEncoder(grid, 20).decode(video(range(8, 13), pattern=pattern))
    assert shades(pixels) == [8, 9, 10, 11, 12]


def test_the_size_is_the_first_ones_and_frames_may_differ(grid, video):
    video([5], pattern="1_{}.png", size=(64, 90))
    pixels, size = FramesEncoder(grid, 3).decode(video([6, 7], pattern="2_{}.png", size=(80, 70)))
    assert shades(pixels) == [5, 6, 7]
    assert size == (64, 90)


def test_frames_may_be_seen_whole(video):
    folder = video([1], size=(90, 60))
    left = Image.new("RGB", (90, 60))
    left.paste((200, 200, 200), (0, 0, 10, 60))  # within what the middle leaves out
    left.save(folder / "frame_1.png")
    whole = image_encoder("resnet18", "random:0", 64, frames=4, whole=True)
    square = np.asarray(left.resize((64, 64), Image.Resampling.BILINEAR))
    assert np.array_equal(whole.decode(folder)[0][0].permute(1, 2, 0).numpy(), square)
    middle = image_encoder("resnet18", "random:0", 64, frames=4)
    assert middle.decode(folder)[0].max() == 0 and middle.identity != whole.identity


# ---- features ----


def videos(*lengths):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(256, (n, 3, 64, 64), generator=generator, dtype=torch.uint8) for n in lengths]


def test_rows_are_the_global_features_of_the_frames(grid):
    encoder, batch = FramesEncoder(grid, 5), videos(3, 1, 5)
    regions = encoder.encode(batch)
    assert [video.local.shape for video in regions] == [(3, 512), (1, 512), (5, 512)]
    assert (encoder.rows, encoder.channels, encoder.global_channels, encoder.extras) == (5, 512, 512, ())
    for video, found in zip(batch, regions, strict=True):
        assert found.local.dtype == np.float32
        alone = [grid.encode(frame[None])[1][0] for frame in video]
        np.testing.assert_allclose(found.local, alone, atol=2e-4, rtol=2e-4)
    again = encoder.encode(batch)
    assert all(a.local.tobytes() == b.local.tobytes() for a, b in zip(regions, again, strict=True))


# ---- bad folders ----


def refusal(grid, path):
    with pytest.raises(SampleError) as caught:
        FramesEncoder(grid, 4).decode(path)
    assert caught.value.sample == str(path)
    return caught.value.reason


def test_a_folder_that_is_none_is_refused(grid, video, tmp_path):
    assert refusal(grid, tmp_path / "nowhere") == "there is no such folder of frames"
    frame = video([1]) / "frame_1.png"
    assert refusal(grid, frame) == "a folder of frames is expected here (not a directory)"
    empty = video([], "empty")
    assert refusal(grid, empty).startswith("there is no frame in this folder; frames end in .jpg")
    (empty / "video.mp4").write_bytes(b"?")
    assert refusal(grid, empty).startswith("there is no frame in this folder")


@pytest.mark.parametrize(("content", "reason"), [(b"", "the file is empty"), (b"torn", "this is no JPEG")])
def test_a_damaged_frame_is_named(grid, video, content, reason):
    folder = video([1, 2, 3])
    (folder / "frame_2.png").write_bytes(content)
    assert refusal(grid, folder).startswith(f"its frame frame_2.png cannot be used: {reason}")


def test_a_damaged_frame_that_is_not_taken_does_no_harm(grid, video):
    folder = video(range(12))
    (folder / "frame_0.png").write_bytes(b"torn")
    assert shades(FramesEncoder(grid, 4).decode(folder)[0]) == [1, 4, 7, 10]


# ---- videos in manifest and cache ----
