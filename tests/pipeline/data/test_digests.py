"""Digests of pictures that lie in files with others: several files are read at once, and each picture once."""

import hashlib
import os
import threading

from packed_data import PackedData

from xret.pipeline.data.digests import Digests
from xret.pipeline.data.manifest import load_manifest
from xret.pipeline.data.samples import read_samples
from xret.pipeline.data.sources import tar


def test_files_are_read_together_and_pictures_once(tmp_path, monkeypatch):
    data = PackedData(tmp_path / "data", count=12)
    manifest = load_manifest(data.as_tars(files=3))
    samples = read_samples(manifest)
    together, opened, open_file = threading.Barrier(3, timeout=20), [], tar.open_file

    def waiting(folder, file):
        opened.append(file.name)
        together.wait()  # for the other two
        return open_file(folder, file)

    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    monkeypatch.setattr(tar, "open_file", waiting)
    expected = {name: hashlib.blake2b(content, digest_size=16).digest() for name, content, *_ in data.rows}
    digests = Digests(samples, manifest.images)
    for images in (samples.images, samples.images[3:5]):
        assert digests.of(images) == [expected[image.file_name] for image in images]
    assert sorted(opened) == ["shard-00.tar", "shard-01.tar", "shard-02.tar"]
