"""A bar on a terminal, lines elsewhere."""

import fcntl
import logging
import os
import re
import struct
import sys
import termios

from xret.pipeline.progress import Progress


def test_a_terminal_has_a_bar_of_its_width(monkeypatch):
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    with os.fdopen(slave, "w") as screen, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", screen)
        with Progress("read images.npy", 7808, "bytes") as progress:
            progress.update(7808)
        written = ""
        while "7.81k/7.81k" not in written:  # a terminal passes on a part at a time
            written += os.read(master, 4096).decode()
    os.close(master)
    states = [state.rstrip() for state in re.split("[\r\n]", written) if state.strip()]
    assert all(len(state) <= 60 for state in states)
    assert states[-1].startswith("read images.npy: 100%|") and "7.81k/7.81k" in states[-1]


def test_without_a_terminal_there_are_lines(capsys):
    with Progress("verify", 20, "chunks", done=10) as progress:
        progress.update(10)
    with Progress("read images.npy", 7808, "bytes") as progress:
        progress.update(7808)
    first, last, _, in_bytes = capsys.readouterr().err.splitlines()
    assert first == "verify: 10/20 chunks"
    assert re.fullmatch(r"verify: 20/20 chunks, +[\d.]+ chunks/s, 00:00 left", last)
    assert in_bytes.startswith("read images.npy: 7.81k/7.81kB, ")


def test_quiet_shows_nothing(capsys, monkeypatch):
    monkeypatch.setattr(logging.getLogger("xret"), "level", logging.WARNING)  # as --quiet sets it
    for terminal in (False, True):
        monkeypatch.setattr(sys.stderr, "isatty", lambda seen=terminal: seen)
        with Progress("verify", 20, "chunks") as progress:
            progress.update(20)
    assert capsys.readouterr().err == ""
