"""A terminal of so many columns in the place of standard error, and what was written on it."""

import fcntl
import os
import struct
import sys
import termios
import threading
from contextlib import contextmanager


class Screen:
    """What a terminal was sent."""

    def __init__(self):
        self.text = ""

    @property
    def lines(self):
        """Every state of every line, without the blanks at its end."""
        return [state.rstrip() for line in self.text.split("\n") for state in line.split("\r") if state.strip()]

    @property
    def kept(self):
        """What stands on each line at the end."""
        return [state[-1].rstrip() for line in self.text.split("\n") if (state := [s for s in line.split("\r") if s])]


@contextmanager
def terminal(monkeypatch, columns):
    """Let standard error be a terminal of so many columns."""
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    screen = Screen()

    def read():
        try:
            while data := os.read(master, 4096):
                screen.text += data.decode()
        except OSError:  # the other end is closed
            pass

    reader = threading.Thread(target=read)
    reader.start()
    try:
        with os.fdopen(slave, "w") as stream, monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", stream)
            yield screen
    finally:
        reader.join()
        os.close(master)
