"""Digests tell pictures apart by their bytes alone, and folders of frames by names and bytes."""

import hashlib
import os

from xret.pipeline.data.digests import NONE, digest_of, stamp_of
from xret.pipeline.data.images import read_picture


def test_a_picture_is_known_by_its_bytes(tmp_path):
    for name, content in (("a.png", b"one"), ("b.jpg", b"one"), ("c.png", b"other")):
        (tmp_path / name).write_bytes(content)
    a, b, c = (digest_of(read_picture(tmp_path / name)) for name in ("a.png", "b.jpg", "c.png"))
    assert a == b == hashlib.blake2b(b"one", digest_size=16).digest() != c
    assert digest_of(read_picture(tmp_path / "gone.png")) == NONE


def test_frames_are_known_by_their_names_and_bytes(tmp_path):
    found = []
    pairs = {"1.png": b"a", "2.png": b"b"}, {"1.png": b"b", "2.png": b"a"}
    not_utf8 = {"\udcff.png": b"a"}, {"\udcff.png": b"b"}
    for number, frames in enumerate((*pairs, {"1.png": b"a"}, *not_utf8)):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name, content in frames.items():
            (folder / name).write_bytes(content)
        found.append(digest_of(read_picture(folder)))
    assert len({*found, NONE}) == 6


def test_a_stamp_is_bytes_and_time_and_of_frames_their_sum_and_the_latest(tmp_path):
    for name, content, time in (("1.png", b"abc", 5_000), ("2.png", b"de", 7_000), ("notes", b"f", 9_000)):
        (tmp_path / name).write_bytes(content)
        os.utime(tmp_path / name, ns=(0, time))
    assert [stamp_of(tmp_path / name) for name in ("1.png", "gone.png", "")] == [(3, 5_000), (0, 0), (5, 7_000)]
