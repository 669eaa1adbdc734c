"""A bar on a terminal, lines elsewhere."""

import re

from terminal import terminal

from xret.pipeline.progress import Progress


def test_a_terminal_has_a_bar_of_its_width(monkeypatch):
    with terminal(monkeypatch, 60) as screen, Progress("read images.npy", 7808, "bytes") as progress:
        progress.update(7808)
    assert all(len(line) <= 60 for line in screen.lines)
    assert screen.kept[-1].startswith("read images.npy: 100%|") and "7.81k/7.81k" in screen.kept[-1]


def test_without_a_terminal_there_are_lines(capsys):
    with Progress("verify", 20, "chunks", done=10) as progress:
        progress.update(10)
    with Progress("read images.npy", 7808, "bytes") as progress:
        progress.update(7808)
    first, last, _, in_bytes = capsys.readouterr().err.splitlines()
    assert first == "verify: 10/20 chunks"
    assert re.fullmatch(r"verify: 20/20 chunks, +[\d.]+ chunks/s, 00:00 left", last)
    assert in_bytes.startswith("read images.npy: 7.81k/7.81kB, ")
