"""The bar fits the terminal; elsewhere there are lines."""

import re

import pytest
from terminal import terminal

from xret.pipeline.progress import Progress

LONG, SHORT = "loss 0.1234 (triplet 0.1000, diversity 0.0234)", "loss 0.1234"


@pytest.mark.parametrize("columns", [120, 40])
def test_the_width_is_that_of_the_terminal(monkeypatch, columns):
    with terminal(monkeypatch, columns) as screen, Progress("epoch 3/30", 1000, "images") as progress:
        progress.update(1000, LONG, SHORT)
    assert all(len(line) <= columns for line in screen.lines)
    assert screen.kept[-1].startswith("epoch 3/30: ")


def test_kept_lines_stay_above_the_bar(monkeypatch):
    with terminal(monkeypatch, 80) as screen, Progress("epoch 1/2", 20, "images") as progress:
        progress.update(10, LONG, SHORT)
        progress.keep("epoch 1/2: done")
        progress.title = "epoch 2/2"
        progress.update(10, LONG, SHORT)
    assert screen.kept[0] == "epoch 1/2: done"
    assert screen.kept[-1].startswith("epoch 2/2: 100%|")
    assert LONG not in screen.kept[-1]


def test_bytes_are_told_in_the_units_that_people_read(monkeypatch, capsys):
    with Progress("read images.npy", 7808, "bytes", seconds=0) as progress:
        progress.update(7808)
    first, last = capsys.readouterr().err.splitlines()
    assert first == "read images.npy: 0.0 kB of 7.8 kB"
    assert re.fullmatch(r"read images.npy: 7\.8 kB of 7\.8 kB, [\d,]+\.\d [kMGT]B/s, 0 s left", last)
    with terminal(monkeypatch, 90) as screen, Progress("read images.npy", 7808, "bytes") as progress:
        progress.update(7808)
    assert "7.81k/7.81k" in screen.kept[-1] and "B/s]" in screen.kept[-1]


def test_without_a_terminal_there_are_lines(capsys):
    with Progress("epoch 1/2", 20, "images", seconds=0) as progress:
        progress.update(10, LONG, SHORT)
        progress.keep("epoch 1/2: done")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "epoch 1/2: 0/20 images"
    assert lines[1].startswith("epoch 1/2: 10/20 images, ") and lines[1].endswith(f" s left, {LONG}")
    assert lines[2:] == ["epoch 1/2: done"]  # which is not told again
