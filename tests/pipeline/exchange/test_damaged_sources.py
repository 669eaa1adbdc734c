"""Damaged and hostile features of others: a sentence each, no traceback, no memory on the word of a header."""

import io
import struct
import time
import tracemalloc
import zipfile
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
from damage import damaged
from region_sources import ARRAYS, CHANNELS, World

from xret.pipeline.errors import SampleError
from xret.pipeline.exchange.importers import open_source
from xret.pipeline.exchange.importers.importing import _read
from xret.pipeline.exchange.importers.source import SourceError

FEATURES = SimpleNamespace(rows=5, dtype="float32")


def read_all(source, format_):
    """Read every image as an import that skips does; return the reasons of those that were refused."""
    arrays = ARRAYS if format_ == "hdf5" else {}
    opened, reasons = open_source(format_, source, "world", arrays), []
    for entry, name in enumerate(opened.ids):
        try:
            _read(opened, entry, FEATURES, name)
        except SampleError as error:
            reasons.append(error.reason)
    return reasons


def outcome(source, format_):
    """Return reasons, or the sentence that refuses the whole; fail for what takes much memory or time."""
    tracemalloc.start()
    began = time.monotonic()
    try:
        return read_all(source, format_)
    except SourceError as error:
        assert "\n" not in str(error)
        return [str(error)]
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 50e6, f"{peak:,.0f} bytes were allocated"
        assert time.monotonic() - began < 60


def written(world, format_):
    """Write a source; return it and the file to damage."""
    if format_ == "scan":
        source = world.scan()
        return source, source / "train_ims.npy"
    if format_ == "detectron-npz":
        source = world.npz()
        return source, next(source.rglob("*.npz"))
    source = world.hdf5() if format_ == "hdf5" else world.tsv(lxmert=format_ == "lxmert-tsv")
    return source, source


@pytest.mark.slow
@pytest.mark.parametrize("format_", ["scan", "detectron-npz", "hdf5", "butd-tsv", "lxmert-tsv"])
def test_no_damage_gives_more_than_a_sentence(tmp_path, format_):
    source, path = written(World(tmp_path / "w"), format_)
    assert outcome(source, format_) == []
    raw, rng, refused = path.read_bytes(), np.random.default_rng(11), 0
    for number in range(600):
        path.write_bytes(damaged(raw, rng))
        try:
            refused += outcome(source, format_) != []
        except BaseException:
            print(f"file {number} of {format_}")
            raise
    assert refused > 300


# Each class of fault by itself


def npz(**arrays):
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def npy(shape, descr="<f4"):
    """Return the header of an array."""
    text = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape}}}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


def npz_of(raw, method=zipfile.ZIP_STORED):
    """Return an .npz whose `x` is this."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        archive.writestr("x.npy", raw)
    return buffer.getvalue()


OPEN = b"\x93NUMPY\x01\x00\xf4\x01" + b"(" * 500
FOUR_GIGABYTES = b"\x93NUMPY\x02\x00\xff\xff\xff\xff{"
GOOD = {"x": np.ones((4, CHANNELS), np.float32), "bbox": np.ones((4, 4), np.float32)}
BROKEN = "its .npz is damaged, cut off, or pickled"
OF_NPZ = {
    "a size by header": (npz_of(npy((1 << 40, CHANNELS))), BROKEN),
    "a negative size": (npz_of(npy((-4, CHANNELS))), BROKEN),
    "a size beyond 64 bits": (npz_of(npy((1 << 70, CHANNELS))), BROKEN),
    "a row of gigabytes": (npz_of(npy((4, CHANNELS), "(100000000,)f4")), BROKEN),
    "an open bracket": (npz_of(OPEN), BROKEN),
    "a header of four gigabytes": (npz_of(FOUR_GIGABYTES), BROKEN),
    "a bomb": (npz_of(npy((1 << 22, CHANNELS)) + bytes(1 << 28), zipfile.ZIP_DEFLATED), BROKEN),
    "an encoder of large memory": (npz_of(npy((4, CHANNELS)) + bytes(16 * CHANNELS), zipfile.ZIP_LZMA), BROKEN),
    "no dimension": (npz(**GOOD | {"x": np.float32(1)}), BROKEN),
    "an endless width": (npz(**GOOD, image_w=np.inf), BROKEN),
    "a width beyond int32": (npz(**GOOD, image_w=1e18), "its size is 1e+18 x 0 pixels"),
    "boxes beyond float32": (npz(**GOOD | {"bbox": np.full((4, 4), 1e300)}), "its boxes hold values beyond float32"),
}


@pytest.mark.parametrize("fault", OF_NPZ)
def test_a_hostile_npz_is_one_failed_image(tmp_path, fault):
    source, path = written(World(tmp_path / "w"), "detectron-npz")
    raw, reason = OF_NPZ[fault]
    path.write_bytes(raw)
    reasons = outcome(source, "detectron-npz")
    assert len(reasons) == 1
    assert reasons[0].startswith(reason)


def test_a_folder_called_npz_is_passed_over(tmp_path):
    source, _ = written(World(tmp_path / "w"), "detectron-npz")
    (source / "a.npz").mkdir()
    assert outcome(source, "detectron-npz") == []


@pytest.mark.parametrize(
    "raw",
    [
        npy((1 << 40, 4, CHANNELS)),
        npy((-1, 4, CHANNELS)),
        npy((1 << 70, 4, CHANNELS)),
        npy((4, CHANNELS), "|O"),
        OPEN,
        FOUR_GIGABYTES,
        npz(**GOOD),
        b"PK\x03\x04",
    ],
)
def test_a_hostile_array_of_scan_is_refused(tmp_path, raw):
    source, path = written(World(tmp_path / "w"), "scan")
    path.write_bytes(raw)
    assert outcome(source, "scan") == [f"{path} is no array of numbers or was cut off; get it anew"]


def linked(file, other):
    file["regions/local"] = h5py.ExternalLink(other, "secret")


def soft(file, other):
    file["outside"] = h5py.ExternalLink(other, "secret")
    file["regions/local"] = h5py.SoftLink("/outside")


def outside(file, other):
    file.create_dataset("regions/local", (32, 4, CHANNELS), "f4", external=[(other, 0, h5py.h5f.UNLIMITED)])


def virtual(file, other):
    layout = h5py.VirtualLayout((32, 4, CHANNELS), "f4")
    layout[:] = h5py.VirtualSource(other, "secret", (32, 4, CHANNELS))
    file.create_virtual_dataset("regions/local", layout)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (linked, "'regions/local' is a link, which may lead to another file; name the array itself"),
        (soft, "'regions/local' is a link, which may lead to another file; name the array itself"),
        (outside, "the values of 'regions/local' lie in other files; write them into this one"),
        (virtual, "the values of 'regions/local' lie in other files; write them into this one"),
    ],
)
def test_an_hdf5_file_leads_to_no_other(tmp_path, make, reason):
    source, _ = written(World(tmp_path / "w"), "hdf5")
    with h5py.File(tmp_path / "other.h5", "w") as other:
        other["secret"] = np.ones((32, 4, CHANNELS), np.float32)
    with h5py.File(source, "a") as file:
        del file["regions/local"]
        make(file, str(tmp_path / "other.h5"))
    assert outcome(source, "hdf5") == [f"{source}: {reason}"]


@pytest.mark.parametrize("chunks", [None, (1, 4, CHANNELS)])
def test_an_hdf5_array_that_is_not_in_the_file_is_refused(tmp_path, chunks):
    source, _ = written(World(tmp_path / "w"), "hdf5")
    with h5py.File(source, "a") as file:
        del file["regions/local"]
        file.create_dataset("regions/local", (1 << 40, 4, CHANNELS), "f4", chunks=chunks)
    (reason,) = outcome(source, "hdf5")
    assert "'regions/local' is float32 1099511627776 x 4 x 16, and its part of the file has 0 bytes" in reason


def test_hdf5_arrays_of_strange_types_are_refused(tmp_path):
    source, _ = written(World(tmp_path / "w"), "hdf5")
    for value in (h5py.Empty("f4"), np.zeros(32, [("a", "f4")]), np.float32(1)):
        with h5py.File(source, "a") as file:
            del file["regions/local"]
            file["regions/local"] = value
        (reason,) = outcome(source, "hdf5")
        assert str(source) in reason
